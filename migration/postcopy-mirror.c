/*
 * Postcopy: the second mapping of shared huge pages, which they are received
 * into before the guest sees them
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include "qemu/madvise.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "ram.h"
#include "postcopy-mirror.h"
#include "trace.h"

/* Why @rb cannot have a mirror, or NULL */
static const char *obstacle(RAMBlock *rb, bool shared)
{
    uint64_t features, needed;

    if (!qemu_ram_is_shared(rb) || rb->fd < 0) {
        return "not shared, or without a file";
    }
    /*
     * The copy of a small page costs less than what avoids it: memory got and
     * cleared beforehand, and one more system call to read the page alone.
     */
    if (qemu_ram_pagesize(rb) == qemu_target_page_size()) {
        return "no huge pages";
    }
    /*
     * Another process maps the file without MINOR: it would see a page that
     * is not complete.
     */
    if (shared) {
        return "other processes take part in postcopy";
    }
    needed = qemu_ram_pagesize(rb) == qemu_real_host_page_size()
             ? UFFD_FEATURE_MINOR_SHMEM : UFFD_FEATURE_MINOR_HUGETLBFS;
    if (uffd_query_features(&features) || !(features & needed)) {
        return "userfaultfd without minor faults for such memory";
    }
    /* For postcopy_mirror_populate(); no length: just the question */
    if (qemu_madvise(rb->host, 0, QEMU_MADV_POPULATE_WRITE)) {
        return "no MADV_POPULATE_WRITE";
    }
    return NULL;
}

uint64_t postcopy_mirror_open(RAMBlock *rb, bool shared)
{
    const char *why = obstacle(rb, shared);
    void *mirror;

    if (!why) {
        mirror = mmap(NULL, rb->postcopy_length, PROT_READ | PROT_WRITE,
                      MAP_SHARED |
                      (rb->flags & RAM_NORESERVE ? MAP_NORESERVE : 0),
                      rb->fd, rb->fd_offset);
        if (mirror != MAP_FAILED) {
            rb->postcopy_mirror = mirror;
            trace_postcopy_mirror(rb->idstr, mirror);
            return UFFDIO_REGISTER_MODE_MINOR;
        }
        why = strerror(errno);
    }
    trace_postcopy_no_mirror(rb->idstr, why);
    return 0;
}

void postcopy_mirror_close(RAMBlock *rb)
{
    if (rb->postcopy_mirror) {
        munmap(rb->postcopy_mirror, rb->postcopy_length);
        rb->postcopy_mirror = NULL;
    }
}

int postcopy_mirror_populate(void *page, size_t size)
{
    while (qemu_madvise(page, size, QEMU_MADV_POPULATE_WRITE)) {
        if (errno == EFAULT) {
            return -ENOMEM; /* what would have been SIGBUS */
        }
        if (errno != EINTR && errno != EAGAIN) {
            return -errno;
        }
    }
    return 0;
}

void *postcopy_mirror(RAMBlock *rb, ram_addr_t start)
{
    return rb->postcopy_mirror ? rb->postcopy_mirror + start : NULL;
}
