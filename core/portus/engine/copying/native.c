/* Copies and hashes lists of segments. One call does a list, without Python's lock.

   This file has no hash: the caller passes the functions of the xxHash that it has loaded
   already, so both sides compute with the same code. Built by core/build_native.py; loaded,
   checked and described by native.py.

   A source may change at any moment, and a digest must be that of the bytes that were stored. So
   each byte of a source is loaded once: the same registers go to the target and to a buffer that
   stays in the cache, and that buffer is hashed. The stores to the target go around the cache
   (non-temporal): the target is not read before it is written.

   While no thread waits, a thread of low priority works on a long list: it uses an idle
   processor, and takes little from a training that fills them all. It rests a part of the time:
   the idle processor is often the other half of the training's core, and all share the memory.
   Once a thread waits, the caller's own thread continues where that one is, and shares the rest
   with a second one of a lower priority than its own. Neither of the two ever runs Python.

   It also closes descriptors in children of C's fork, for which Python has no hook. */

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__GLIBC__) && defined(__x86_64__) && defined(__LP64__)
/* Links to the versions of before glibc 2.32 and 2.34, which later ones have too, so that a wheel
   needs only glibc 2.17, wherever it is built. The same functions, at the same addresses. */
__asm__(".symver pthread_sigmask, pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join, pthread_join@GLIBC_2.2.5");
#endif

#define ABI 9           /* grows with every change of a signature or a struct below */
#define LINE 64         /* bytes of a line of the cache */
#define PAGE 4096       /* bytes; writes to a file end at multiples of it */
#define STREAM_MIN 1024 /* bytes from which going around the cache pays */
#define FIRST 512       /* bytes to compare first: they show most changes */
#define GRAIN (1 << 20) /* bytes that a thread takes at a time, or else one unit */
#define PATIENT 10      /* niceness of the thread that works while no thread waits, likewise */
#define WORK_NS 2000000 /* a patient thread works this long, and then rests */
#define REST_NS 2000000
#define SECOND 9        /* niceness of the second thread, on top of the process's */

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
    uint64_t (*crc)(uint64_t crc, const void *data, uint64_t length); /* only 32 bits are used */
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

/* Copies through the buffer: the target gets what the buffer has, whatever the source does. */
static void copy_twice(char *target, char *buffer, const char *source, size_t length) {
    memcpy(buffer, source, length);
    __asm__ volatile("" ::: "memory"); /* or a compiler may copy to the target from the source */
    memcpy(target, buffer, length);
}

#ifdef __SSE2__

/* Copies to both places; each byte of the source is loaded once. */
static void copy(char *target, char *buffer, const char *source, size_t length) {
    size_t head = -(uintptr_t)target % LINE;
    if (length < STREAM_MIN) {
        copy_twice(target, buffer, source, length);
        return;
    }
    copy_twice(target, buffer, source, head);
    for (target += head, buffer += head, source += head, length -= head; length >= LINE;
         target += LINE, buffer += LINE, source += LINE, length -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)source + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)source + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)source + 3);
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)target + 1, b);
        _mm_stream_si128((__m128i *)target + 2, c);
        _mm_stream_si128((__m128i *)target + 3, d);
        _mm_storeu_si128((__m128i *)buffer, a);
        _mm_storeu_si128((__m128i *)buffer + 1, b);
        _mm_storeu_si128((__m128i *)buffer + 2, c);
        _mm_storeu_si128((__m128i *)buffer + 3, d);
    }
    copy_twice(target, buffer, source, length);
}

/* Orders the stores of copy before everything that the caller does next. */
static void fence(void) { _mm_sfence(); }

#else

static void copy(char *target, char *buffer, const char *source, size_t length) {
    copy_twice(target, buffer, source, length);
}

static void fence(void) {}

#endif

/* A list of segments, and how far it is given out. Segments with the same row follow each other
   and make one unit: one digest, at digests + 16 * row. `target` null: only hash; `file` not
   negative: offsets in it, to which the buffer is written, warm as it is. */
struct list {
    const struct hash *hash;
    int64_t segments;
    const int64_t *source, *target, *length, *row;
    int64_t piece;
    uint8_t *digests;
    uint32_t *crcs; /* of each row; null: not wanted */
    int file;
    struct shared *shared;
    int64_t *kept; /* bytes that the file had already, which are not written; null: all are */
    int64_t error; /* the errno of a write that failed; 0: none did */
    int64_t next;  /* the first segment that no thread has taken */
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

/* Where a thread is in the list: in segment i of those to before `end` that it took. */
struct place {
    int64_t i, end;
    int64_t moved; /* bytes of segment i */
    void *state;   /* the hash of its unit so far */
    uint32_t crc;  /* likewise */
    char *buffer;  /* of a piece */
    char *old;     /* the file's bytes there, if they are compared */
};

/* The task of a thread. A patient one leaves as soon as a thread waits. */
struct task {
    struct list *list;
    struct place *place;
    int patient, niceness;
    int64_t since_ns; /* a patient thread has worked since then */
};

static int leaves(const struct task *task) {
    const struct shared *shared = task->list->shared;
    int failed = __atomic_load_n(&task->list->error, __ATOMIC_RELAXED) != 0;
    return failed || asked(shared) || (task->patient && awaited(shared));
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Rests between two pieces, if a patient thread has worked for long enough. */
static void rest(struct task *task) {
    if (!task->patient || now_ns() - task->since_ns < WORK_NS) return;
    nanosleep(&(struct timespec){.tv_nsec = REST_NS}, NULL);
    task->since_ns = now_ns();
}

/* Returns whether the file has the buffer's bytes at `offset`. */
static int is_there(const struct list *list, const struct place *place, off_t offset,
                    size_t length) {
    for (size_t done = 0; done < length;) {
        size_t step = done || length < FIRST ? length - done : FIRST;
        ssize_t found = pread(list->file, place->old, step, offset + (off_t)done);
        if (found <= 0 || memcmp(place->old, place->buffer + done, (size_t)found)) return 0;
        done += (size_t)found;
    }
    return 1;
}

/* Copies up to a piece, to memory at `target` or to the file there. Returns the address of the
   copied bytes; the source, if it copies nothing. */
static const char *move(struct list *list, const struct place *place, char *target,
                        const char *source, size_t length) {
    if (!list->target) return source;
    if (list->file < 0) {
        copy(target, place->buffer, source, length);
        return place->buffer;
    }
    memcpy(place->buffer, source, length);
    if (list->kept && is_there(list, place, (off_t)(intptr_t)target, length)) {
        __atomic_fetch_add(list->kept, (int64_t)length, __ATOMIC_RELAXED);
        return place->buffer;
    }
    for (size_t done = 0; done < length;) {
        ssize_t count = pwrite(list->file, place->buffer + done, length - done,
                               (off_t)((intptr_t)target + done));
        if (count < 0 && errno != EINTR) {
            __atomic_store_n(&list->error, errno, __ATOMIC_RELAXED);
            break;
        }
        if (count > 0) done += (size_t)count;
    }
    return place->buffer;
}

static void add_crc(const struct list *list, uint32_t *crc, const char *data, int64_t length) {
    if (list->crcs) *crc = (uint32_t)list->hash->crc(*crc, data, (uint64_t)length);
}

/* Moves the rest of a segment, by pieces. Returns 0 if the thread leaves before the end. */
static int move_segment(struct task *task) {
    struct list *list = task->list;
    struct place *place = task->place;
    const char *source = (const char *)(intptr_t)list->source[place->i];
    char *target = list->target ? (char *)(intptr_t)list->target[place->i] : NULL;
    int64_t length = list->length[place->i];
    while (place->moved < length) {
        if (leaves(task)) return 0;
        int64_t step = list->piece;
        if (list->file >= 0) step -= (int64_t)((intptr_t)(target + place->moved) % PAGE);
        if (step > length - place->moved) step = length - place->moved;
        char *there = list->target ? target + place->moved : NULL;
        const char *moved = move(list, place, there, source + place->moved, (size_t)step);
        list->hash->update(place->state, moved, (size_t)step);
        add_crc(list, &place->crc, moved, step);
        place->moved += step;
        count(list->shared, step);
        rest(task);
    }
    place->moved = 0;
    return 1;
}

/* Moves a unit that is one piece: no state is needed. */
static void move_piece(struct list *list, const struct place *place, int64_t i) {
    const char *source = (const char *)(intptr_t)list->source[i];
    char *target = list->target ? (char *)(intptr_t)list->target[i] : NULL;
    size_t length = (size_t)list->length[i];
    const char *moved = move(list, place, target, source, length);
    put_canonical(list->digests + 16 * list->row[i], list->hash->once(moved, length));
    if (list->crcs) {
        list->crcs[list->row[i]] = 0;
        add_crc(list, &list->crcs[list->row[i]], moved, list->length[i]);
    }
    count(list->shared, list->length[i]);
}

static int start(pthread_t *thread, struct task *task);

/* Works until the list is given out, or the thread leaves; its place says where. `second`: to be
   started once a thread waits; null: none. Returns 1 if it was. */
static int work(struct task *task, pthread_t *thread, struct task *second) {
    struct list *list = task->list;
    struct place *place = task->place;
    int started = 0;
    while (!leaves(task)) {
        if (second && awaited(list->shared)) {
            started = start(thread, second);
            second = NULL;
        }
        if (place->i == place->end && (place->i = take(list, &place->end)) == place->end) break;
        int64_t i = place->i;
        int first = i == 0 || list->row[i - 1] != list->row[i];
        int last = i + 1 == list->segments || list->row[i + 1] != list->row[i];
        if (first && last && list->length[i] <= list->piece) {
            move_piece(list, place, i);
            rest(task);
        } else {
            if (first && !place->moved) {
                list->hash->reset(place->state);
                place->crc = 0;
            }
            if (!move_segment(task)) break;
            if (last) {
                put_canonical(list->digests + 16 * list->row[i], list->hash->digest(place->state));
                if (list->crcs) list->crcs[list->row[i]] = place->crc;
            }
        }
        place->i++;
    }
    fence();
    return started;
}

static void *work_behind(void *argument) {
    struct task *task = argument;
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + task->niceness); /* 0: this thread */
    task->since_ns = now_ns();
    work(task, NULL, NULL);
    return NULL;
}

static int start(pthread_t *thread, struct task *task) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
    int refused = pthread_create(thread, NULL, work_behind, task);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !refused;
}

/* Hashes segments, and copies each to its address in `target` (null: does not), or, if `file` is not
   negative, to that offset of the file. Returns 0; 1 if asked to stop before the end; -1 without
   memory; -1 - errno if a write failed. `crcs`: for the CRC32 of each unit; null: not
   wanted. `kept`: counts bytes that the file had already and that were not written; null: all are
   written. `threads`: the number that it may use beside the caller's:
   1, one in its place while no thread waits; 2, also a second one while a thread does. */
int64_t portus_move(const struct hash *hash, int64_t segments, const int64_t *source,
                    const int64_t *target, const int64_t *length, const int64_t *row,
                    int64_t piece, int64_t threads, uint8_t *digests, uint32_t *crcs,
                    int64_t file, int64_t *kept, struct shared *shared) {
    struct list list = {hash,    segments, source,    target, length, row, piece,
                        digests, crcs,     (int)file, shared, kept,   0,   0};
    size_t room = (size_t)(kept ? 2 * piece : piece);
    struct place own = {.state = hash->create(), .buffer = malloc(room)},
                 other = {.state = hash->create(), .buffer = malloc(room)};
    struct task patient = {&list, &own, 1, PATIENT, 0}, lead = {&list, &own, 0, 0, 0},
                second = {&list, &other, 0, SECOND, 0};
    int64_t result = -1;
    if (own.state && other.state && own.buffer && other.buffer) {
        own.old = own.buffer + piece;
        other.old = other.buffer + piece;
        pthread_t thread;
        if (threads > 0 && !awaited(shared) && start(&thread, &patient)) pthread_join(thread, NULL);
        if (work(&lead, &thread, threads > 1 ? &second : NULL)) pthread_join(thread, NULL);
        result = list.error ? -1 - list.error : asked(shared);
    }
    if (own.state) hash->destroy(own.state);
    if (other.state) hash->destroy(other.state);
    free(own.buffer);
    free(other.buffer);
    return result;
}

/* The descriptors to close in forked children, each plus one; 0 is none. */
static int32_t *kept;
static int64_t kept_max;

/* Runs in each child, before all other code, also after C's fork: async-signal-safe. */
static void close_kept(void) {
    for (int64_t i = 0; i < kept_max; i++) {
        if (!kept[i]) continue;
        close(kept[i] - 1);
        kept[i] = 0;
    }
}

/* Has forked children close the descriptors that are in `numbers` by then, and clear it there. Once
   for a process: `numbers` is never freed. Returns 0, or an errno. */
int64_t portus_close_in_children(int32_t *numbers, int64_t count) {
    kept_max = count;
    kept = numbers;
    return pthread_atfork(NULL, NULL, close_kept);
}
