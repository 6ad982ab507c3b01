/* System calls that fail on purpose, for what lies below one directory.

   Loaded by LD_PRELOAD, so it stands between a program (Python and its libraries) and libc. Nothing
   happens before `faults_begin`. Then each call on a path or descriptor below the root is counted,
   by what it does and where: in the pools (below a directory `.portus`), or elsewhere, which is
   where checkpoints are. One kind of call at one kind of place fails, once or from then on, by `faults_arm`. A failing close does close, as on Linux; any
   other failing call has no effect.

   What it cannot see: calls that libc makes by itself (readdir's getdents64 is met at opendir and
   readdir), and stores through a mapping.

   Not seccomp or ptrace, which take two process switches a call; and not FUSE, which cannot fail
   close, mmap or locks at will. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum call {
  OPEN, CREATE, CLOSE, READ, WRITE, FSYNC, FDATASYNC, TRUNCATE, ALLOCATE, LINK, RENAME, UNLINK,
  MKDIR, RMDIR, STAT, FSTAT, LIST, LOCK, MAP, STATFS, CHMOD, UTIME, ACCESS, READLINK, CALLS
};
enum place { POOL, FILES, PLACES };

#define ANY -1
#define ANY_CHANGE -2
#define PATH_ROOM 4096

static char root[PATH_ROOM];
static size_t root_length;
static atomic_int watching;
static atomic_long counts[CALLS][PLACES];
static atomic_long totals[PLACES], changes[PLACES];

static atomic_int armed;
static int armed_call, armed_place, armed_errno, armed_for_ever;
static long armed_from;
static atomic_long hits;
static char hit_path[PATH_ROOM];
static int hit_call;

/* Watch from now on what is below `path`, which is absolute and has no symbolic links. */
void faults_begin(const char *path) {
  root_length = strlen(path);
  memcpy(root, path, root_length + 1);
  atomic_store(&watching, 1);
}

/* Let the call number `from` (counted from 0, from `faults_begin` on) of the kind `call` at `place`
   fail with `error`; and all after it if `for_ever`. ANY and ANY_CHANGE: the number counts all calls
   at the place, or all that change something. */
void faults_arm(int call, int place, long from, int error, int for_ever) {
  armed_call = call, armed_place = place, armed_from = from;
  armed_errno = error, armed_for_ever = for_ever;
  atomic_store(&armed, 1);
}

void faults_end(void) {
  atomic_store(&armed, 0);
  atomic_store(&watching, 0);
}

long faults_count(int call, int place) { return atomic_load(&counts[call][place]); }
long faults_hits(void) { return atomic_load(&hits); }
const char *faults_path(void) { return hit_path; }
int faults_call(void) { return hit_call; }

static int is_change(enum call call) {
  switch (call) {
    case CREATE: case WRITE: case TRUNCATE: case ALLOCATE: case LINK: case RENAME: case UNLINK:
    case MKDIR: case RMDIR: case CHMOD: case UTIME: return 1;
    default: return 0;
  }
}

/* Count a call on an absolute path; true if it is to fail, and then errno says how. */
static int fails_at(enum call call, const char *path) {
  if (strncmp(path, root, root_length) || (path[root_length] && path[root_length] != '/')) return 0;
  const char *rest = path + root_length;
  enum place place = FILES;
  if (strstr(rest, "/.portus")) place = POOL;
  long own = atomic_fetch_add(&counts[call][place], 1);
  long all = atomic_fetch_add(&totals[place], 1);
  long changed = is_change(call) ? atomic_fetch_add(&changes[place], 1) : -1;
  if (!atomic_load(&armed) || (int)place != armed_place) return 0;
  long number = armed_call == ANY ? all : armed_call == ANY_CHANGE ? changed : own;
  if (armed_call >= 0 && call != (enum call)armed_call) return 0;
  if (number < armed_from || (number > armed_from && !armed_for_ever)) return 0;
  if (atomic_fetch_add(&hits, 1) == 0) {
    hit_call = call;
    snprintf(hit_path, sizeof hit_path, "%s", path);
  }
  errno = armed_errno;
  return 1;
}

static int path_of(int descriptor, char *path) {
  char name[40];
  snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
  long length = syscall(SYS_readlink, name, path, PATH_ROOM - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return 1;
}

static int fails_on(enum call call, int descriptor) {
  char path[PATH_ROOM];
  int before = errno;
  if (!atomic_load(&watching) || descriptor < 0) return 0;
  int found = path_of(descriptor, path);
  errno = before;
  return found && fails_at(call, path);
}

static int fails_named(enum call call, int directory, const char *name) {
  char path[2 * PATH_ROOM];
  int before = errno;
  if (!atomic_load(&watching) || !name) return 0;
  if (name[0] == '/') return fails_at(call, name);
  if (directory == AT_FDCWD) {
    if (syscall(SYS_getcwd, path, PATH_ROOM) < 0) path[0] = 0;
  } else if (!path_of(directory, path)) {
    path[0] = 0;
  }
  errno = before;
  if (name[0]) snprintf(path + strlen(path), PATH_ROOM, "/%s", name);
  return fails_at(call, path);
}

#define REAL(name) ((__typeof__(&name))next(#name))

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

/* Python asks for the same ten calls over and over: each is looked up once. */
#define CALLING(name)                                        \
  static __typeof__(&name) real;                             \
  if (!real) real = REAL(name)

#define BY_DESCRIPTOR(result, name, call, declared, given, descriptor) \
  result name declared {                                               \
    CALLING(name);                                                     \
    if (fails_on(call, descriptor)) return (result)-1;                 \
    return real given;                                                 \
  }

#define BY_NAME(result, name, call, declared, given, directory, path) \
  result name declared {                                              \
    CALLING(name);                                                    \
    if (fails_named(call, directory, path)) return (result)-1;        \
    return real given;                                                \
  }

/* Names. Of two the second is the one that changes. */

static mode_t mode_of(int flags, va_list rest) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPENS(name)                                                                   \
  int name(const char *path, int flags, ...) {                                        \
    CALLING(name);                                                                    \
    va_list rest;                                                                     \
    va_start(rest, flags);                                                            \
    mode_t mode = mode_of(flags, rest);                                               \
    va_end(rest);                                                                     \
    if (fails_named(flags & O_CREAT ? CREATE : OPEN, AT_FDCWD, path)) return -1;      \
    return real(path, flags, mode);                                                   \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                \
  int name(int directory, const char *path, int flags, ...) {                         \
    CALLING(name);                                                                    \
    va_list rest;                                                                     \
    va_start(rest, flags);                                                            \
    mode_t mode = mode_of(flags, rest);                                               \
    va_end(rest);                                                                     \
    if (fails_named(flags & O_CREAT ? CREATE : OPEN, directory, path)) return -1;     \
    return real(directory, path, flags, mode);                                        \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

#define STREAMS(name)                                                                 \
  FILE *name(const char *path, const char *mode) {                                    \
    CALLING(name);                                                                    \
    int reads = mode[0] == 'r';                                                       \
    if (fails_named(reads ? OPEN : CREATE, AT_FDCWD, path)) return NULL;              \
    return real(path, mode);                                                          \
  }
STREAMS(fopen)
STREAMS(fopen64)

BY_NAME(int, link, LINK, (const char *a, const char *b), (a, b), AT_FDCWD, b)
BY_NAME(int, linkat, LINK, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f), e, b)
BY_NAME(int, rename, RENAME, (const char *a, const char *b), (a, b), AT_FDCWD, b)
BY_NAME(int, renameat, RENAME, (int d, const char *a, int e, const char *b), (d, a, e, b), e, b)
BY_NAME(int, unlink, UNLINK, (const char *a), (a), AT_FDCWD, a)
BY_NAME(int, unlinkat, f & AT_REMOVEDIR ? RMDIR : UNLINK, (int d, const char *a, int f), (d, a, f), d, a)
BY_NAME(int, rmdir, RMDIR, (const char *a), (a), AT_FDCWD, a)
BY_NAME(int, mkdir, MKDIR, (const char *a, mode_t m), (a, m), AT_FDCWD, a)
BY_NAME(int, mkdirat, MKDIR, (int d, const char *a, mode_t m), (d, a, m), d, a)
BY_NAME(int, chmod, CHMOD, (const char *a, mode_t m), (a, m), AT_FDCWD, a)
BY_NAME(int, fchmodat, CHMOD, (int d, const char *a, mode_t m, int f), (d, a, m, f), d, a)
BY_NAME(int, utimensat, UTIME, (int d, const char *a, const struct timespec t[2], int f), (d, a, t, f), d, a)
BY_NAME(int, access, ACCESS, (const char *a, int m), (a, m), AT_FDCWD, a)
BY_NAME(int, faccessat, ACCESS, (int d, const char *a, int m, int f), (d, a, m, f), d, a)
BY_NAME(ssize_t, readlink, READLINK, (const char *a, char *b, size_t n), (a, b, n), AT_FDCWD, a)
BY_NAME(ssize_t, readlinkat, READLINK, (int d, const char *a, char *b, size_t n), (d, a, b, n), d, a)
BY_NAME(int, truncate64, TRUNCATE, (const char *a, off64_t n), (a, n), AT_FDCWD, a)
BY_NAME(int, stat, STAT, (const char *a, struct stat *s), (a, s), AT_FDCWD, a)
BY_NAME(int, stat64, STAT, (const char *a, struct stat64 *s), (a, s), AT_FDCWD, a)
BY_NAME(int, lstat, STAT, (const char *a, struct stat *s), (a, s), AT_FDCWD, a)
BY_NAME(int, lstat64, STAT, (const char *a, struct stat64 *s), (a, s), AT_FDCWD, a)
BY_NAME(int, fstatat, STAT, (int d, const char *a, struct stat *s, int f), (d, a, s, f), d, a)
BY_NAME(int, fstatat64, STAT, (int d, const char *a, struct stat64 *s, int f), (d, a, s, f), d, a)
BY_NAME(int, statx, STAT, (int d, const char *a, int f, unsigned m, struct statx *s), (d, a, f, m, s), d, a)
BY_NAME(int, statvfs64, STATFS, (const char *a, struct statvfs64 *s), (a, s), AT_FDCWD, a)

DIR *opendir(const char *path) {
  CALLING(opendir);
  if (fails_named(LIST, AT_FDCWD, path)) return NULL;
  return real(path);
}

DIR *fdopendir(int descriptor) {
  CALLING(fdopendir);
  if (fails_on(LIST, descriptor)) return NULL;
  return real(descriptor);
}

#define READS_NAMES(entry, name)                                  \
  struct entry *name(DIR *directory) {                            \
    CALLING(name);                                                \
    if (fails_on(LIST, dirfd(directory))) return NULL;            \
    return real(directory);                                       \
  }
READS_NAMES(dirent, readdir)
READS_NAMES(dirent64, readdir64)

/* Descriptors. */

BY_DESCRIPTOR(ssize_t, read, READ, (int d, void *b, size_t n), (d, b, n), d)
BY_DESCRIPTOR(ssize_t, pread64, READ, (int d, void *b, size_t n, off64_t o), (d, b, n, o), d)
BY_DESCRIPTOR(ssize_t, preadv64, READ, (int d, const struct iovec *v, int n, off64_t o), (d, v, n, o), d)
BY_DESCRIPTOR(ssize_t, preadv64v2, READ, (int d, const struct iovec *v, int n, off64_t o, int f), (d, v, n, o, f), d)
BY_DESCRIPTOR(ssize_t, write, WRITE, (int d, const void *b, size_t n), (d, b, n), d)
BY_DESCRIPTOR(ssize_t, writev, WRITE, (int d, const struct iovec *v, int n), (d, v, n), d)
BY_DESCRIPTOR(ssize_t, pwrite64, WRITE, (int d, const void *b, size_t n, off64_t o), (d, b, n, o), d)
BY_DESCRIPTOR(ssize_t, pwritev64, WRITE, (int d, const struct iovec *v, int n, off64_t o), (d, v, n, o), d)
BY_DESCRIPTOR(int, fsync, FSYNC, (int d), (d), d)
BY_DESCRIPTOR(int, fdatasync, FDATASYNC, (int d), (d), d)
BY_DESCRIPTOR(int, ftruncate64, TRUNCATE, (int d, off64_t n), (d, n), d)
BY_DESCRIPTOR(int, fallocate, ALLOCATE, (int d, int m, off_t o, off_t n), (d, m, o, n), d)
BY_DESCRIPTOR(int, fallocate64, ALLOCATE, (int d, int m, off64_t o, off64_t n), (d, m, o, n), d)
BY_DESCRIPTOR(int, fstat, FSTAT, (int d, struct stat *s), (d, s), d)
BY_DESCRIPTOR(int, fstat64, FSTAT, (int d, struct stat64 *s), (d, s), d)
BY_DESCRIPTOR(int, fstatfs, STATFS, (int d, struct statfs *s), (d, s), d)
BY_DESCRIPTOR(int, fstatvfs64, STATFS, (int d, struct statvfs64 *s), (d, s), d)
BY_DESCRIPTOR(int, fchmod, CHMOD, (int d, mode_t m), (d, m), d)
BY_DESCRIPTOR(int, futimens, UTIME, (int d, const struct timespec t[2]), (d, t), d)
BY_DESCRIPTOR(int, flock, LOCK, (int d, int o), (d, o), d)

int close(int descriptor) {
  CALLING(close);
  if (!fails_on(CLOSE, descriptor)) return real(descriptor);
  int error = errno;
  real(descriptor);
  errno = error;
  return -1;
}

int closedir(DIR *directory) {
  CALLING(closedir);
  if (!fails_on(CLOSE, dirfd(directory))) return real(directory);
  int error = errno;
  real(directory);
  errno = error;
  return -1;
}

#define MAPS(name, offset_type)                                                                  \
  void *name(void *a, size_t n, int p, int f, int descriptor, offset_type o) {                   \
    CALLING(name);                                                                               \
    if (descriptor >= 0 && fails_on(MAP, descriptor)) return MAP_FAILED;                         \
    return real(a, n, p, f, descriptor, o);                                                      \
  }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

static int is_lock(int command) {
  return command == F_OFD_SETLK || command == F_OFD_GETLK || command == F_SETLK ||
         command == F_SETLKW || command == F_GETLK;
}

#define CONTROLS(name)                                                                 \
  int name(int descriptor, int command, ...) {                                         \
    CALLING(name);                                                                     \
    va_list rest;                                                                      \
    va_start(rest, command);                                                           \
    uintptr_t argument = va_arg(rest, uintptr_t);                                      \
    va_end(rest);                                                                      \
    if (is_lock(command) && fails_on(LOCK, descriptor)) return -1;                     \
    return real(descriptor, command, argument);                                        \
  }
CONTROLS(fcntl)
CONTROLS(fcntl64)
