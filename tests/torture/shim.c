/* LD_PRELOAD: the Nth system call below one folder fails, is cut short, does nothing, or is the last thing the process does.

   torture_arm(folder, n, error, how, kinds) counts from here on the calls whose path or descriptor lies below `folder` and
   whose kind is in the bit mask `kinds`; torture_disarm() gives their number, torture_met() how many were disturbed, and
   torture_where() the first of them in words. torture_no_exchange(1) makes renameat2 answer EINVAL, as file systems do that
   have no RENAME_EXCHANGE. Linux, glibc. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
    OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, RENAME = 16, MKDIR = 32, UNLINK = 64, MMAP = 128, TRUNCATE = 256, STATFS = 512,
    FLOCK = 1024, STAT = 2048, READDIR = 4096, CLOSE = 8192
};
enum how { ONCE, ALWAYS, SHORT, NOTHING, KILL };

static char folder[4096], where[4400];
static size_t folder_length;
static int armed, error, how, no_exchange;
static unsigned kinds;
static long nth, count, met;

void torture_arm(const char *below, long n, int e, int h, unsigned k) {
    snprintf(folder, sizeof folder, "%s", below);
    folder_length = strlen(folder);
    nth = n, error = e, how = h, kinds = k, count = met = 0, where[0] = 0;
    armed = 1;
}
long torture_disarm(void) { armed = 0; return count; }
long torture_met(void) { return met; }
const char *torture_where(void) { return where; }
void torture_no_exchange(int yes) { no_exchange = yes; }

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int below(const char *path) { return path && !strncmp(path, folder, folder_length); }

static int of_descriptor(int fd, char *out) {
    char link[64];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    REAL(ssize_t, "readlink", const char *, char *, size_t);
    ssize_t n = real(link, out, 4095);
    errno = saved;
    if (n <= 0) return 0;
    out[n] = 0;
    return below(out);
}

/* Whether this call is to be disturbed. */
static int struck(enum kind kind, const char *name, const char *path) {
    if (!(kinds & kind)) return 0;
    long now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (now != nth && !(how == ALWAYS && now > nth)) return 0;
    if (__atomic_add_fetch(&met, 1, __ATOMIC_SEQ_CST) == 1) snprintf(where, sizeof where, "%s %s", name, path);
    if (how == KILL) raise(SIGKILL);
    return 1;
}
static int at_path(enum kind kind, const char *name, const char *path) {
    return armed && below(path) && struck(kind, name, path);
}
static int at_fd(enum kind kind, const char *name, int fd) {
    char path[4096];
    return armed && of_descriptor(fd, path) && struck(kind, name, path);
}
static int at_dir(enum kind kind, const char *name, int dir, const char *path) {
    char whole[4096];
    if (!armed) return 0;
    if (path[0] == '/' || dir == AT_FDCWD) return at_path(kind, name, path);
    return of_descriptor(dir, whole) && struck(kind, name, path);
}
#define FAIL do { errno = error; return -1; } while (0)

static int opened(int dir, const char *path, int flags, mode_t mode) {
    REAL(int, "openat", int, const char *, int, ...);
    if (at_dir(OPEN, "open", dir, path)) FAIL;
    return real(dir, path, flags, mode);
}
#define MODE mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, int); va_end(a); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE return opened(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE return opened(dir, path, flags, mode); }

/* What is disturbed of `n` bytes: fewer, none, or -1 for an error. */
#define MOVE(kind, name, fd, n, call_of_n) \
    if (at_fd(kind, name, fd)) { \
        if (how == SHORT && (n) > 1) { size_t less = (n) / 2; if (less > 4096) less -= less % 4096; return call_of_n(less); } \
        if (how == NOTHING) return 0; \
        if (how != SHORT) FAIL; \
    } \
    return call_of_n(n)

ssize_t read(int fd, void *b, size_t n) {
    REAL(ssize_t, "read", int, void *, size_t);
#define CALL(k) real(fd, b, k)
    MOVE(READ, "read", fd, n, CALL);
#undef CALL
}
ssize_t pread64(int fd, void *b, size_t n, off_t o) {
    REAL(ssize_t, "pread64", int, void *, size_t, off_t);
#define CALL(k) real(fd, b, k, o)
    MOVE(READ, "pread", fd, n, CALL);
#undef CALL
}
ssize_t write(int fd, const void *b, size_t n) {
    REAL(ssize_t, "write", int, const void *, size_t);
#define CALL(k) real(fd, b, k)
    MOVE(WRITE, "write", fd, n, CALL);
#undef CALL
}
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
#define CALL(k) real(fd, b, k, o)
    MOVE(WRITE, "pwrite", fd, n, CALL);
#undef CALL
}
static ssize_t vector(int fd, const struct iovec *v, int c, off_t o, int flags) {
    REAL(ssize_t, "preadv64v2", int, const struct iovec *, int, off_t, int);
    size_t n = c == 1 ? v[0].iov_len : 1; /* several buffers are never cut short */
    struct iovec part = v[0];
#define CALL(k) (c == 1 ? (part.iov_len = (k), real(fd, &part, 1, o, flags)) : real(fd, v, c, o, flags))
    MOVE(READ, "preadv", fd, n, CALL);
#undef CALL
}
ssize_t preadv64v2(int fd, const struct iovec *v, int c, off_t o, int flags) { return vector(fd, v, c, o, flags); }
ssize_t preadv2(int fd, const struct iovec *v, int c, off_t o, int flags) { return vector(fd, v, c, o, flags); }
ssize_t preadv64(int fd, const struct iovec *v, int c, off_t o) { return vector(fd, v, c, o, 0); }
ssize_t preadv(int fd, const struct iovec *v, int c, off_t o) { return vector(fd, v, c, o, 0); }

#define ON_FD(result, function, kind, fd, types, names) \
    result function types { REAL(result, #function, EXPAND types); if (at_fd(kind, #function, fd)) FAIL; return real names; }
#define ON_PATH(result, function, kind, path, types, names) \
    result function types { REAL(result, #function, EXPAND types); if (at_path(kind, #function, path)) FAIL; return real names; }
#define ON_DIR(result, function, kind, dir, path, types, names) \
    result function types { REAL(result, #function, EXPAND types); if (at_dir(kind, #function, dir, path)) FAIL; return real names; }
#define EXPAND(...) __VA_ARGS__

ON_FD(int, fsync, SYNC, fd, (int fd), (fd))
ON_FD(int, fdatasync, SYNC, fd, (int fd), (fd))
ON_FD(int, ftruncate64, TRUNCATE, fd, (int fd, off_t n), (fd, n))
ON_FD(int, ftruncate, TRUNCATE, fd, (int fd, off_t n), (fd, n))
ON_FD(int, fallocate64, TRUNCATE, fd, (int fd, int m, off_t o, off_t n), (fd, m, o, n))
ON_FD(int, flock, FLOCK, fd, (int fd, int o), (fd, o))
ON_FD(int, fstat64, STAT, fd, (int fd, struct stat64 *s), (fd, s))
ON_FD(int, fstat, STAT, fd, (int fd, struct stat *s), (fd, s))
ON_PATH(int, rename, RENAME, a, (const char *a, const char *b), (a, b))
ON_DIR(int, renameat, RENAME, x, a, (int x, const char *a, int y, const char *b), (x, a, y, b))
ON_PATH(int, mkdir, MKDIR, p, (const char *p, mode_t m), (p, m))
ON_DIR(int, mkdirat, MKDIR, d, p, (int d, const char *p, mode_t m), (d, p, m))
ON_PATH(int, unlink, UNLINK, p, (const char *p), (p))
ON_DIR(int, unlinkat, UNLINK, d, p, (int d, const char *p, int f), (d, p, f))
ON_PATH(int, rmdir, UNLINK, p, (const char *p), (p))
ON_PATH(int, statvfs64, STATFS, p, (const char *p, struct statvfs64 *s), (p, s))
ON_PATH(int, statvfs, STATFS, p, (const char *p, struct statvfs *s), (p, s))
ON_PATH(int, stat64, STAT, p, (const char *p, struct stat64 *s), (p, s))
ON_PATH(int, stat, STAT, p, (const char *p, struct stat *s), (p, s))
ON_PATH(int, lstat64, STAT, p, (const char *p, struct stat64 *s), (p, s))
ON_PATH(int, lstat, STAT, p, (const char *p, struct stat *s), (p, s))
ON_DIR(int, fstatat64, STAT, d, p, (int d, const char *p, struct stat64 *s, int f), (d, p, s, f))
ON_DIR(int, fstatat, STAT, d, p, (int d, const char *p, struct stat *s, int f), (d, p, s, f))

int renameat2(int x, const char *a, int y, const char *b, unsigned flags) {
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
    if (no_exchange && flags) { errno = EINVAL; return -1; }
    if (at_dir(RENAME, "renameat2", x, a)) FAIL;
    return real(x, a, y, b, flags);
}
int close(int fd) {
    REAL(int, "close", int);
    if (at_fd(CLOSE, "close", fd)) { real(fd); FAIL; }
    return real(fd);
}
static int no_map(size_t n, int flags, int fd) {
    char path[4096];
    if (!armed) return 0;
    if (flags & MAP_ANONYMOUS) return n >= (1 << 20) && struck(MMAP, "mmap", "of memory");
    return of_descriptor(fd, path) && struck(MMAP, "mmap", path);
}
void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t o) {
    REAL(void *, "mmap64", void *, size_t, int, int, int, off_t);
    if (no_map(n, flags, fd)) { errno = error; return MAP_FAILED; }
    return real(at, n, prot, flags, fd, o);
}
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t o) { return mmap64(at, n, prot, flags, fd, o); }
DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    if (at_path(READDIR, "opendir", path)) { errno = error; return NULL; }
    return real(path);
}
DIR *fdopendir(int fd) {
    REAL(DIR *, "fdopendir", int);
    if (at_fd(READDIR, "fdopendir", fd)) { errno = error; return NULL; }
    return real(fd);
}
struct dirent64 *readdir64(DIR *dir) {
    REAL(struct dirent64 *, "readdir64", DIR *);
    if (at_fd(READDIR, "readdir", dirfd(dir))) { errno = error; return NULL; }
    return real(dir);
}
