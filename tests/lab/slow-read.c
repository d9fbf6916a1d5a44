/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Preloaded into QEMU: as if a file lay on a disk that takes SLOW_READ_US for each
 * read, and the page cache had only what has been read before.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>

#define PAGE    4096
#define PAGES   (1u << 22)

/* Which pages of any file have been read: there is one */
static uint8_t cached[PAGES];

/* Returns -1, with errno, if the read must not wait and would have to */
static int wait_for(const struct iovec *iov, int count, off_t offset, int flags)
{
    const char *us = getenv("SLOW_READ_US");
    off_t first = offset / PAGE, end = offset;
    int all = 1;

    for (int i = 0; i < count; i++) {
        end += iov[i].iov_len;
    }
    for (off_t page = first; page * PAGE < end && page < PAGES; page++) {
        all &= cached[page];
        cached[page] |= !(flags & RWF_NOWAIT);
    }
    if (all || !us) {
        return 0;
    }
    if (flags & RWF_NOWAIT) {
        errno = EAGAIN;
        return -1;
    }
    return nanosleep(&(struct timespec) { .tv_nsec = atol(us) * 1000 }, NULL);
}

ssize_t preadv64v2(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t, int);

    next = next ? next : dlsym(RTLD_NEXT, "preadv64v2");
    return wait_for(iov, count, offset, flags) ? -1 : next(fd, iov, count, offset, flags);
}

ssize_t preadv64(int fd, const struct iovec *iov, int count, off_t offset)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t);

    next = next ? next : dlsym(RTLD_NEXT, "preadv64");
    return wait_for(iov, count, offset, 0) ? -1 : next(fd, iov, count, offset);
}
