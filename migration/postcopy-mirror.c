/*
 * Postcopy: the second mapping of shared huge pages, which they are received
 * into before the guest sees them
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/mempolicy.h>
#include <linux/userfaultfd.h>
#include <sys/syscall.h>
#include "qemu/atomic.h"
#include "qemu/bitops.h"
#include "qemu/madvise.h"
#include "qemu/thread.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "migration.h"
#include "ram.h"
#include "postcopy-mirror.h"
#include "trace.h"

/* What Linux can be built for */
#define MAX_NODES 1024

/* Blocks with a mirror; constant while the thread runs */
static GPtrArray *blocks;
static QemuThread thread;
static bool running;
static bool quit;                   /* atomic */

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

/*
 * hugetlbfs has a policy for each mapping, not for the file, and memory is
 * allocated through the mirror.  Returns 0, or negative errno.
 */
static int copy_policy(void *mirror, void *host, size_t size)
{
    unsigned long nodes[BITS_TO_LONGS(MAX_NODES)];
    int mode;

    /* The last argument but one is the number of bits and one more */
    if (syscall(SYS_get_mempolicy, &mode, nodes, MAX_NODES + 1, host,
                MPOL_F_ADDR)) {
        return errno == ENOSYS ? 0 : -errno;
    }
    if (mode != MPOL_DEFAULT &&
        syscall(SYS_mbind, mirror, size, mode, nodes, MAX_NODES + 1, 0)) {
        return -errno;
    }
    return 0;
}

uint64_t postcopy_mirror_open(RAMBlock *rb, bool shared)
{
    const char *why = obstacle(rb, shared);
    size_t size = rb->postcopy_length;
    void *mirror;
    int ret;

    if (why) {
        goto none;
    }
    mirror = mmap(NULL, size, PROT_READ | PROT_WRITE,
                  MAP_SHARED | (rb->flags & RAM_NORESERVE ? MAP_NORESERVE : 0),
                  rb->fd, rb->fd_offset);
    if (mirror == MAP_FAILED) {
        why = strerror(errno);
        goto none;
    }
    ret = copy_policy(mirror, rb->host, size);
    if (ret) {
        munmap(mirror, size);
        why = strerror(-ret);
        goto none;
    }
    rb->postcopy_mirror = mirror;
    if (!blocks) {
        blocks = g_ptr_array_new();
    }
    g_ptr_array_add(blocks, rb);
    trace_postcopy_mirror(rb->idstr, mirror);
    return UFFDIO_REGISTER_MODE_MINOR;

none:
    trace_postcopy_no_mirror(rb->idstr, why);
    return 0;
}

/*
 * Beside those who receive pages: to get memory for one that somebody else has
 * got changes nothing.
 */
static void *get_memory(void *opaque)
{
    int ret = 0;

    for (guint i = 0; i < blocks->len && !ret; i++) {
        RAMBlock *rb = g_ptr_array_index(blocks, i);
        size_t size = qemu_ram_pagesize(rb);
        ram_addr_t start = 0;

        /* Parts that the guest has not plugged in are never sent */
        if (rb->mr && memory_region_has_ram_discard_manager(rb->mr)) {
            continue;
        }
        while (start < rb->postcopy_length && !ret && !qatomic_read(&quit)) {
            ret = postcopy_mirror_populate(rb->postcopy_mirror + start, size);
            start += size;
        }
        /* An error is reported by who receives a page without memory */
        trace_postcopy_mirror_memory(rb->idstr, start, ret);
    }
    return NULL;
}

void postcopy_mirrors_start(void)
{
    if (blocks) {
        qatomic_set(&quit, false);
        qemu_thread_create(&thread, MIGRATION_THREAD_DST_MEMORY, get_memory,
                           NULL, QEMU_THREAD_JOINABLE);
        running = true;
    }
}

void postcopy_mirrors_stop(void)
{
    if (running) {
        qatomic_set(&quit, true);
        qemu_thread_join(&thread);
        running = false;
    }
    g_clear_pointer(&blocks, g_ptr_array_unref);
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
