/* Loaded before libc: counts what changes files under LD_CRASH_ROOT, and at one such call kills the process or lets the call
   fail. Nothing happens before crash_arm(), or before LD_CRASH_MODE arms it at the start. Shifts the clock by crash_shift()
   seconds; with LD_CRASH_JUMP it is so many seconds ahead and behind by turns. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { COUNT, KILL, TEAR, NO_SPACE, BAD_DISK, READ_ONLY, DENIED };

static int mode = -1;
static long at;
static atomic_long calls;
static atomic_long shift;
static atomic_long readings;
static long jump;
static char root[4096];

void crash_arm(int how, long number) {
  const char *given = getenv("LD_CRASH_ROOT");
  snprintf(root, sizeof root, "%s", given ? given : "");
  at = number;
  atomic_store(&calls, 0);
  mode = how;
}
void crash_disarm(void) { mode = -1; }
long crash_calls(void) { return atomic_load(&calls); }
void crash_shift(long seconds) { atomic_store(&shift, seconds); }


__attribute__((constructor)) static void arm_from_environment(void) {
  const char *how = getenv("LD_CRASH_MODE"), *seconds = getenv("LD_CRASH_JUMP");
  if (how) crash_arm(atoi(how), 1);
  if (seconds) jump = atol(seconds);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int inside(const char *path) {
  char full[8192];
  if (mode < 0 || !*root) return 0;
  /* Devices, and memory that only looks like a file, take no room on a disk. */
  if (!strncmp(path, "/dev/", 5) || !strncmp(path, "/proc/", 6) || !strncmp(path, "/memfd:", 7)) return 0;
  if (path[0] != '/') {
    if (!getcwd(full, 4096)) return 0;
    strncat(full, "/", 2);
    strncat(full, path, 4000);
    path = full;
  }
  return strncmp(path, root, strlen(root)) == 0;
}
static int inside_fd(int fd) {
  char link[64], path[4096];
  if (mode < 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  /* Pipes and sockets have no path. */
  return path[0] == '/' && inside(path);
}

/* The error that this call fails with; 0 where it goes on. A full disk stays full, a bad sector is met once. A read-only
   disk, or one of another user, is that from the start; files that are open already are elsewhere. */
static int due(int consumes) {
  const long number = atomic_fetch_add(&calls, 1) + 1;
  if (mode == KILL && number == at) kill(getpid(), SIGKILL);
  if (mode == NO_SPACE && number >= at && consumes) return ENOSPC;
  if (mode == BAD_DISK && number == at) return EIO;
  return 0;
}
/* As above, for what changes names, times or lengths. */
static int due_by_name(int consumes) {
  return mode == READ_ONLY ? EROFS : mode == DENIED ? EACCES : due(consumes);
}
#define GUARD_BY(due, touched, consumes)                \
  if (touched) {                                        \
    const int error = due(consumes);                    \
    if (error) {                                        \
      errno = error;                                    \
      return -1;                                        \
    }                                                   \
  }
#define GUARD(touched, consumes) GUARD_BY(due, touched, consumes)
#define GUARD_NAME(touched, consumes) GUARD_BY(due_by_name, touched, consumes)
static int inside_at(int fd, const char *path) {
  return path[0] == '/' || fd == AT_FDCWD ? inside(path) : inside_fd(fd);
}
static int tears(int touched) { return touched && mode == TEAR && atomic_load(&calls) + 1 == at; }

ssize_t write(int fd, const void *data, size_t size) {
  const int touched = inside_fd(fd);
  if (tears(touched)) {
    NEXT(write)(fd, data, size / 2);
    kill(getpid(), SIGKILL);
  }
  GUARD(touched, 1)
  return NEXT(write)(fd, data, size);
}
#define PWRITE(name, offset_t)                                                 \
  ssize_t name(int fd, const void *data, size_t size, offset_t offset) {       \
    const int touched = inside_fd(fd);                                         \
    if (tears(touched)) {                                                      \
      NEXT(name)(fd, data, size / 2, offset);                                  \
      kill(getpid(), SIGKILL);                                                 \
    }                                                                          \
    GUARD(touched, 1)                                                          \
    return NEXT(name)(fd, data, size, offset);                                 \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, offset_t)                                                \
  ssize_t name(int fd, const struct iovec *parts, int count, offset_t offset) { \
    GUARD(inside_fd(fd), 1)                                                    \
    return NEXT(name)(fd, parts, count, offset);                               \
  }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

int fsync(int fd) { GUARD(inside_fd(fd), 1) return NEXT(fsync)(fd); }
int fdatasync(int fd) { GUARD(inside_fd(fd), 1) return NEXT(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { GUARD(inside_fd(fd), 1) return NEXT(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { GUARD(inside_fd(fd), 1) return NEXT(ftruncate64)(fd, size); }
int truncate(const char *path, off_t size) { GUARD_NAME(inside(path), 1) return NEXT(truncate)(path, size); }
int truncate64(const char *path, off64_t size) { GUARD_NAME(inside(path), 1) return NEXT(truncate64)(path, size); }
int rename(const char *from, const char *to) { GUARD_NAME(inside(to), 1) return NEXT(rename)(from, to); }
int link(const char *from, const char *to) { GUARD_NAME(inside(to), 1) return NEXT(link)(from, to); }
int mkdir(const char *path, mode_t rights) { GUARD_NAME(inside(path), 1) return NEXT(mkdir)(path, rights); }
int unlink(const char *path) { GUARD_NAME(inside(path), 0) return NEXT(unlink)(path); }
int rmdir(const char *path) { GUARD_NAME(inside(path), 0) return NEXT(rmdir)(path); }
int unlinkat(int fd, const char *path, int flags) {
  GUARD_NAME(inside_at(fd, path), 0)
  return NEXT(unlinkat)(fd, path, flags);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
  GUARD(inside_fd(to), 1)
  return NEXT(sendfile)(to, from, offset, size);
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
  GUARD(inside_fd(to), 1)
  return NEXT(sendfile64)(to, from, offset, size);
}
int posix_fallocate(int fd, off_t from, off_t size) {
  const int error = inside_fd(fd) ? due(1) : 0;
  return error ? error : NEXT(posix_fallocate)(fd, from, size);
}
int posix_fallocate64(int fd, off64_t from, off64_t size) {
  const int error = inside_fd(fd) ? due(1) : 0;
  return error ? error : NEXT(posix_fallocate64)(fd, from, size);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
  GUARD_NAME(inside_at(to_fd, to), 1)
  return NEXT(renameat)(from_fd, from, to_fd, to);
}
int utimensat(int fd, const char *path, const struct timespec times[2], int flags) {
  GUARD_NAME(inside_at(fd, path), 0)
  return NEXT(utimensat)(fd, path, times, flags);
}
int futimens(int fd, const struct timespec times[2]) {
  GUARD_NAME(inside_fd(fd), 0)
  return NEXT(futimens)(fd, times);
}

#define WRITES(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC))
/* A disk that cannot be written opens what is there for reading, whatever O_CREAT says. */
static int refuses(int flags, int exists) {
  if (mode == READ_ONLY || mode == DENIED) return (flags & (O_WRONLY | O_RDWR | O_TRUNC)) || !exists;
  return flags & O_CREAT;
}

#define OPEN(name)                                                             \
  int name(const char *path, int flags, ...) {                                 \
    va_list rest;                                                              \
    va_start(rest, flags);                                                     \
    const mode_t rights = flags & O_CREAT ? va_arg(rest, mode_t) : 0;          \
    va_end(rest);                                                              \
    const int exists = access(path, F_OK) == 0;                                \
    GUARD_NAME(WRITES(flags) && refuses(flags, exists) && inside(path), !exists) \
    return NEXT(name)(path, flags, rights);                                    \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                           \
  int name(int fd, const char *path, int flags, ...) {                         \
    va_list rest;                                                              \
    va_start(rest, flags);                                                     \
    const mode_t rights = flags & O_CREAT ? va_arg(rest, mode_t) : 0;          \
    va_end(rest);                                                              \
    const int exists = faccessat(fd, path, F_OK, 0) == 0;                      \
    GUARD_NAME(WRITES(flags) && refuses(flags, exists) && inside_at(fd, path), !exists) \
    return NEXT(name)(fd, path, flags, rights);                                \
  }
OPENAT(openat)
OPENAT(openat64)

int clock_gettime(clockid_t clock, struct timespec *found) {
  const int status = NEXT(clock_gettime)(clock, found);
  if (clock == CLOCK_REALTIME) {
    found->tv_sec += atomic_load(&shift);
    if (jump) found->tv_sec += atomic_fetch_add(&readings, 1) % 2 ? jump : -jump;
  }
  return status;
}
