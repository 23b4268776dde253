/* Counts the syncs of a process that was started with this library in LD_PRELOAD, in the 8 bytes of the file TMS_SYNCS. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned long *count;

__attribute__((constructor)) static void open_count(void) {
    const char *path = getenv("TMS_SYNCS");
    int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    void *found = mmap(0, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) count = found;
}

static int synced(long number, int file) {
    int result = syscall(number, file);
    if (count) __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    return result;
}

int fdatasync(int file) { return synced(SYS_fdatasync, file); }

int fsync(int file) { return synced(SYS_fsync, file); }
