/* Simulates another clock and another disk for a process. The file TMS_MACHINE has 16 bytes: the offset of the wall
   clock in milliseconds, and the free bytes of the disk, or -1 without a limit. A write to a file uses the remaining
   bytes, and the next write fails with ENOSPC. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static struct {
    long step_ms, room_bytes;
} *machine;

__attribute__((constructor)) static void open_machine(void) {
    const char *path = getenv("TMS_MACHINE");
    int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    void *found = mmap(0, sizeof *machine, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) machine = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && machine && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long nanoseconds = now->tv_nsec + machine->step_ms % 1000 * 1000000;
        now->tv_sec += machine->step_ms / 1000 + nanoseconds / 1000000000;
        now->tv_nsec = nanoseconds % 1000000000;
        if (now->tv_nsec < 0) now->tv_nsec += 1000000000, now->tv_sec -= 1;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec read;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &read);
    now->tv_sec = read.tv_sec, now->tv_usec = read.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now) *now = read.tv_sec;
    return read.tv_sec;
}

/* How many of so many bytes a file takes; standard output and error, sockets and pipes are on no disk. */
static size_t room(int file, size_t bytes) {
    struct stat about;
    if (!machine || file <= 2 || fstat(file, &about) || !S_ISREG(about.st_mode)) return bytes;
    long left = __atomic_load_n(&machine->room_bytes, __ATOMIC_SEQ_CST);
    while (left >= 0) {
        long taken = left < (long)bytes ? left : (long)bytes;
        if (__atomic_compare_exchange_n(&machine->room_bytes, &left, left - taken, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return taken;
    }
    return bytes;
}

static ssize_t written(long result, size_t asked, size_t taken) {
    if (asked && !taken) {
        errno = ENOSPC;
        return -1;
    }
    return result;
}

ssize_t write(int file, const void *from, size_t bytes) {
    size_t taken = room(file, bytes);
    return written(bytes && !taken ? -1 : syscall(SYS_write, file, from, taken), bytes, taken);
}

ssize_t pwrite64(int file, const void *from, size_t bytes, off64_t at) {
    size_t taken = room(file, bytes);
    return written(bytes && !taken ? -1 : syscall(SYS_pwrite64, file, from, taken, at), bytes, taken);
}

ssize_t pwrite(int file, const void *from, size_t bytes, off_t at) { return pwrite64(file, from, bytes, at); }
