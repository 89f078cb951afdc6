/* Loaded before libc: counts what changes files under CRASH_ROOT, and at one such call kills the process or lets the call
   fail. Nothing happens before crash_arm(). Shifts the clock by crash_shift() seconds. */
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
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { COUNT, KILL, TEAR, NO_SPACE, BAD_DISK };

static int mode = -1;
static long at;
static atomic_long calls;
static atomic_long shift;
static char root[4096];

void crash_arm(int how, long number) {
  const char *given = getenv("CRASH_ROOT");
  snprintf(root, sizeof root, "%s", given ? given : "");
  at = number;
  atomic_store(&calls, 0);
  mode = how;
}
void crash_disarm(void) { mode = -1; }
long crash_calls(void) { return atomic_load(&calls); }
void crash_shift(long seconds) { atomic_store(&shift, seconds); }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int inside(const char *path) {
  char full[8192];
  if (mode < 0 || !*root) return 0;
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
  return inside(path);
}

/* The error that this call fails with; 0 where it goes on. A full disk stays full, a bad sector is met once. */
static int due(int consumes) {
  const long number = atomic_fetch_add(&calls, 1) + 1;
  if (mode == KILL && number == at) kill(getpid(), SIGKILL);
  if (mode == NO_SPACE && number >= at && consumes) return ENOSPC;
  if (mode == BAD_DISK && number == at) return EIO;
  return 0;
}
#define GUARD(touched, consumes)                        \
  if (touched) {                                        \
    const int error = due(consumes);                    \
    if (error) {                                        \
      errno = error;                                    \
      return -1;                                        \
    }                                                   \
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

int fsync(int fd) { GUARD(inside_fd(fd), 1) return NEXT(fsync)(fd); }
int fdatasync(int fd) { GUARD(inside_fd(fd), 1) return NEXT(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { GUARD(inside_fd(fd), 1) return NEXT(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { GUARD(inside_fd(fd), 1) return NEXT(ftruncate64)(fd, size); }
int truncate(const char *path, off_t size) { GUARD(inside(path), 1) return NEXT(truncate)(path, size); }
int truncate64(const char *path, off64_t size) { GUARD(inside(path), 1) return NEXT(truncate64)(path, size); }
int rename(const char *from, const char *to) { GUARD(inside(to), 1) return NEXT(rename)(from, to); }
int link(const char *from, const char *to) { GUARD(inside(to), 1) return NEXT(link)(from, to); }
int mkdir(const char *path, mode_t rights) { GUARD(inside(path), 1) return NEXT(mkdir)(path, rights); }
int unlink(const char *path) { GUARD(inside(path), 0) return NEXT(unlink)(path); }
int rmdir(const char *path) { GUARD(inside(path), 0) return NEXT(rmdir)(path); }
int unlinkat(int fd, const char *path, int flags) {
  GUARD(path[0] == '/' ? inside(path) : inside_fd(fd), 0)
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

#define OPEN(name)                                                             \
  int name(const char *path, int flags, ...) {                                 \
    va_list rest;                                                              \
    va_start(rest, flags);                                                     \
    const mode_t rights = flags & O_CREAT ? va_arg(rest, mode_t) : 0;          \
    va_end(rest);                                                              \
    GUARD((flags & O_CREAT) && inside(path), access(path, F_OK) != 0)          \
    return NEXT(name)(path, flags, rights);                                    \
  }
OPEN(open)
OPEN(open64)

int clock_gettime(clockid_t clock, struct timespec *found) {
  const int status = NEXT(clock_gettime)(clock, found);
  if (clock == CLOCK_REALTIME) found->tv_sec += atomic_load(&shift);
  return status;
}
