/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Preloaded into QEMU: as if a file lay on a disk that takes SLOW_READ_US for each
 * read, and the page cache had only what has been read before.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>

#define PAGE    4096
#define PAGES   (1u << 22)

/* Which pages of any file have been read: there is one */
static uint8_t cached[PAGES];

static void fetch(off_t first, off_t end, const char *us)
{
    nanosleep(&(struct timespec) { .tv_nsec = atol(us) * 1000 }, NULL);
    for (off_t page = first / PAGE; page * PAGE < end && page < PAGES; page++) {
        cached[page] = 1;
    }
}

static int lacks(off_t first, off_t end)
{
    for (off_t page = first / PAGE; page * PAGE < end && page < PAGES; page++) {
        if (!cached[page]) {
            return 1;
        }
    }
    return 0;
}

ssize_t preadv64v2(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t, int);
    const char *us = getenv("SLOW_READ_US");
    off_t end = offset;

    next = next ? next : dlsym(RTLD_NEXT, "preadv64v2");
    for (int i = 0; i < count; i++) {
        end += iov[i].iov_len;
    }
    if (us && lacks(offset, end)) {
        if (flags & RWF_NOWAIT) {
            errno = EAGAIN;
            return -1;
        }
        fetch(offset, end, us);
    }
    return next(fd, iov, count, offset, flags);
}

ssize_t preadv64(int fd, const struct iovec *iov, int count, off_t offset)
{
    return preadv64v2(fd, iov, count, offset, 0);
}

/* The kernel's begins to read, and what follows waits: the same time, sooner */
int posix_fadvise64(int fd, off_t offset, off_t size, int advice)
{
    static int (*next)(int, off_t, off_t, int);
    const char *us = getenv("SLOW_READ_US");

    next = next ? next : dlsym(RTLD_NEXT, "posix_fadvise64");
    if (us && advice == POSIX_FADV_WILLNEED && lacks(offset, offset + size)) {
        fetch(offset, offset + size, us);
    }
    return next(fd, offset, size, advice);
}
