/* Copies, hashes and compares lists of segments. One call does a list, without Python's lock.

   There is no hash in here: the caller hands in the functions of the xxHash that it has loaded
   already, so both sides compute with the same code. Built by core/build_native.py; loaded,
   checked and described by native.py.

   A piece is hashed first and copied right after, from the cache, into which the hash has brought
   it. So what an unknown writer changes in between is not what was hashed, and the audit, which
   hashes the source once more, finds it. The copy goes around the cache (non-temporal stores):
   the target is not read before it is written.

   While somebody waits for a long list, it is shared with a second thread. That one has a low
   priority: it is welcome to a processor that idles, and should take none from the training,
   which else shares the processors with one thread of ours. It never runs Python. */

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define ABI 4           /* grows with every change of a signature or a struct below */
#define LINE 64         /* bytes of a line of the cache */
#define STREAM_MIN 1024 /* bytes from which going around the cache pays */
#define GRAIN (1 << 20) /* bytes that a thread takes at a time, or else one unit */
#define NICENESS 10     /* of the second thread, on top of what the process has */

typedef struct {
    uint64_t low, high;
} hash128;

struct hash { /* in the order of native.py */
    void *(*create)(void);
    int (*destroy)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t length);
    hash128 (*digest)(const void *state);
    hash128 (*once)(const void *data, size_t length);
};

struct shared { /* the memory of a Stop */
    int64_t asked;
    int64_t done;
    int64_t awaited;
};

int64_t portus_abi(void) { return ABI; }

static int asked(const struct shared *shared) {
    return __atomic_load_n(&shared->asked, __ATOMIC_RELAXED) != 0;
}

static int awaited(const struct shared *shared) {
    return __atomic_load_n(&shared->awaited, __ATOMIC_RELAXED) != 0;
}

static void count(struct shared *shared, int64_t length) {
    __atomic_fetch_add(&shared->done, length, __ATOMIC_RELAXED);
}

static void put_canonical(uint8_t *target, hash128 hash) {
    for (int i = 0; i < 8; i++) {
        target[i] = (uint8_t)(hash.high >> (56 - 8 * i));
        target[8 + i] = (uint8_t)(hash.low >> (56 - 8 * i));
    }
}

#ifdef __SSE2__

static void copy(char *target, const char *source, size_t length) {
    size_t head = -(uintptr_t)target % LINE;
    if (length < STREAM_MIN) {
        memcpy(target, source, length);
        return;
    }
    memcpy(target, source, head);
    for (target += head, source += head, length -= head; length >= LINE;
         target += LINE, source += LINE, length -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)source + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)source + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)source + 3);
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)target + 1, b);
        _mm_stream_si128((__m128i *)target + 2, c);
        _mm_stream_si128((__m128i *)target + 3, d);
    }
    memcpy(target, source, length);
}

/* Orders the stores of copy before everything that the caller does next. */
static void fence(void) { _mm_sfence(); }

#else

static void copy(char *target, const char *source, size_t length) {
    memcpy(target, source, length);
}

static void fence(void) {}

#endif

/* A list of segments, and how far it is given out. Segments with the same row follow each other
   and make one unit: one digest, at digests + 16 * row. `target` null: only hash. */
struct list {
    const struct hash *hash;
    int64_t segments;
    const int64_t *source, *target, *length, *row;
    int64_t piece;
    uint8_t *digests;
    struct shared *shared;
    int64_t next;   /* the first segment that no thread has taken */
    int64_t failed; /* 1 if a thread had no memory */
};

/* Takes whole units from the list, to before *end. Returns the first segment of them. */
static int64_t take(struct list *list, int64_t *end) {
    int64_t first = __atomic_load_n(&list->next, __ATOMIC_RELAXED);
    do {
        int64_t bytes = 0;
        for (*end = first; *end < list->segments; ++*end) {
            int starts = *end == first || list->row[*end - 1] != list->row[*end];
            if (starts && bytes + list->length[*end] > GRAIN && *end > first) break;
            bytes += list->length[*end];
        }
    } while (!__atomic_compare_exchange_n(&list->next, &first, *end, 0, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return first;
}

/* One segment of a unit, by pieces. Returns 0 if it was asked to stop before the end. */
static int move_segment(const struct list *list, int64_t i, void *state) {
    const char *source = (const char *)(intptr_t)list->source[i];
    char *target = list->target ? (char *)(intptr_t)list->target[i] : NULL;
    for (int64_t left = list->length[i], step; left; left -= step) {
        if (asked(list->shared)) return 0;
        step = left < list->piece ? left : list->piece;
        list->hash->update(state, source, (size_t)step);
        if (target) {
            copy(target, source, (size_t)step);
            target += step;
        }
        source += step;
        count(list->shared, step);
    }
    return 1;
}

/* A unit that is one piece: no state is needed. */
static void move_piece(const struct list *list, int64_t i) {
    const char *source = (const char *)(intptr_t)list->source[i];
    size_t length = (size_t)list->length[i];
    put_canonical(list->digests + 16 * list->row[i], list->hash->once(source, length));
    if (list->target) copy((char *)(intptr_t)list->target[i], source, length);
    count(list->shared, list->length[i]);
}

static int start_behind(pthread_t *thread, struct list *list);

/* Works until the list is given out. `second`: the thread to start once somebody waits; null: none,
   or it was started. Returns 1 if it was. */
static int work(struct list *list, pthread_t *second) {
    int64_t i = 0, end = 0;
    void *state = list->hash->create();
    if (!state) {
        __atomic_store_n(&list->failed, 1, __ATOMIC_RELAXED);
        return 0;
    }
    int started = 0;
    while (!asked(list->shared)) {
        if (second && awaited(list->shared)) {
            started = start_behind(second, list);
            second = NULL;
        }
        if (i == end && (i = take(list, &end)) == end) break;
        int first = i == 0 || list->row[i - 1] != list->row[i];
        int last = i + 1 == list->segments || list->row[i + 1] != list->row[i];
        if (first && last && list->length[i] <= list->piece) {
            move_piece(list, i++);
            continue;
        }
        if (first) list->hash->reset(state);
        if (!move_segment(list, i, state)) break;
        if (last) put_canonical(list->digests + 16 * list->row[i], list->hash->digest(state));
        i++;
    }
    list->hash->destroy(state);
    fence();
    return started;
}

static void *work_behind(void *list) {
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + NICENESS); /* 0: this thread */
    work(list, NULL);
    return NULL;
}

static int start_behind(pthread_t *thread, struct list *list) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
    int refused = pthread_create(thread, NULL, work_behind, list);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !refused;
}

/* Hashes segments, and copies each to its address in `target` (null: does not). Returns 0; 1 if
   asked to stop before the end; -1 without memory. `threads`: the most that it may use. */
int64_t portus_move(const struct hash *hash, int64_t segments, const int64_t *source,
                    const int64_t *target, const int64_t *length, const int64_t *row,
                    int64_t piece, int64_t threads, uint8_t *digests, struct shared *shared) {
    struct list list = {hash,  segments, source,  target, length, row,
                        piece, digests,  shared, 0,      0};
    pthread_t second;
    int started = work(&list, threads > 1 ? &second : NULL);
    if (started) pthread_join(second, NULL);
    if (list.failed) return -1;
    return asked(shared);
}

/* Compares segments with what is at `target`. Returns how many were equal before the first that
   was not, or before it was asked to stop. */
int64_t portus_same(int64_t segments, const int64_t *source, const int64_t *target,
                    const int64_t *length, struct shared *shared) {
    int64_t i;
    for (i = 0; i < segments && !asked(shared); i++) {
        const void *from = (const void *)(intptr_t)source[i];
        if (memcmp(from, (const void *)(intptr_t)target[i], (size_t)length[i])) break;
        count(shared, length[i]);
    }
    return i;
}
