/*
 * Postcopy: the second mapping of shared huge pages, into which they are
 * received before the guest sees them
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/mempolicy.h>
#include <linux/userfaultfd.h>
#include <sys/syscall.h>
#include "qapi/error.h"
#include "qemu/atomic.h"
#include "qemu/bitops.h"
#include "qemu/madvise.h"
#include "qemu/thread.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "migration/migration.h"
#include "migration/ram.h"
#include "mirror.h"
#include "trace.h"

/* Maximum for which Linux can be built */
#define MAX_NODES 1024

static bool postcopy_mirror_possible(RAMBlock *rb, bool shared, Error **errp)
{
    uint64_t features;

    if (!qemu_ram_is_shared(rb) || rb->fd < 0) {
        error_setg(errp, "not shared, or without a file");
        return false;
    }
    /*
     * To copy a small page costs less than to avoid the copy: to allocate and
     * clear the page beforehand, and one more system call to read only it.  The
     * host may swap such pages out again; with MINOR, their next touch would be
     * a fault of userfaultfd.
     */
    if (qemu_ram_pagesize(rb) == qemu_real_host_page_size()) {
        error_setg(errp, "no huge pages");
        return false;
    }
    /*
     * Another process maps the file without MINOR, and would see incomplete
     * pages.
     */
    if (shared) {
        error_setg(errp, "other processes take part in postcopy");
        return false;
    }
    if (uffd_query_features(&features) ||
        !(features & UFFD_FEATURE_MINOR_HUGETLBFS)) {
        error_setg(errp, "userfaultfd without minor faults for huge pages");
        return false;
    }
    /* For postcopy_mirror_populate().  Length 0 only probes. */
    if (qemu_madvise(rb->host, 0, QEMU_MADV_POPULATE_WRITE)) {
        error_setg(errp, "no MADV_POPULATE_WRITE");
        return false;
    }
    return true;
}

/*
 * hugetlbfs has a policy for each mapping, not for the file, and the mirror
 * allocates the memory.  Returns 0, or negative errno.
 */
static int postcopy_mirror_copy_policy(void *mirror, void *host, size_t size)
{
    unsigned long nodes[BITS_TO_LONGS(MAX_NODES)];
    int mode;

    /* The last argument but one is the number of bits plus one */
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

static void *postcopy_mirror_map(RAMBlock *rb, bool shared, Error **errp)
{
    size_t size = rb->postcopy_length;
    void *mirror;
    int ret;

    if (!postcopy_mirror_possible(rb, shared, errp)) {
        return NULL;
    }
    mirror = mmap(NULL, size, PROT_READ | PROT_WRITE,
                  MAP_SHARED | (rb->flags & RAM_NORESERVE ? MAP_NORESERVE : 0),
                  rb->fd, rb->fd_offset);
    if (mirror == MAP_FAILED) {
        error_setg_errno(errp, errno, "no second mapping");
        return NULL;
    }
    ret = postcopy_mirror_copy_policy(mirror, rb->host, size);
    if (ret) {
        munmap(mirror, size);
        error_setg_errno(errp, -ret, "no NUMA policy for it");
        return NULL;
    }
    return mirror;
}

uint64_t postcopy_mirror_open(PostcopyMirrors *m, RAMBlock *rb, bool shared)
{
    Error *err = NULL;
    void *mirror = postcopy_mirror_map(rb, shared, &err);

    if (!mirror) {
        trace_postcopy_no_mirror(rb->idstr, error_get_pretty(err));
        error_free(err);
        return 0;
    }
    rb->postcopy_mirror = mirror;
    if (!m->blocks) {
        m->blocks = g_ptr_array_new();
    }
    g_ptr_array_add(m->blocks, rb);
    trace_postcopy_mirror(rb->idstr, mirror);
    return UFFDIO_REGISTER_MODE_MINOR;
}

/*
 * Runs beside the threads that receive pages: to allocate a page that is
 * allocated already changes nothing.
 */
static void *postcopy_mirror_thread(void *opaque)
{
    PostcopyMirrors *m = opaque;
    int ret = 0;

    for (guint i = 0; i < m->blocks->len && !ret; i++) {
        RAMBlock *rb = g_ptr_array_index(m->blocks, i);
        size_t size = qemu_ram_pagesize(rb);
        ram_addr_t start = 0;

        /* Parts that the guest has not plugged are never sent */
        if (rb->mr && memory_region_has_ram_discard_manager(rb->mr)) {
            continue;
        }
        while (start < rb->postcopy_length && !ret && !qatomic_read(&m->quit)) {
            ret = postcopy_mirror_populate(rb->postcopy_mirror + start, size);
            start += size;
        }
        /* The thread that receives a page without memory reports the error */
        trace_postcopy_mirror_memory(rb->idstr, start, ret);
    }
    return NULL;
}

void postcopy_mirrors_start(PostcopyMirrors *m)
{
    if (m->blocks) {
        qatomic_set(&m->quit, false);
        qemu_thread_create(&m->thread, MIGRATION_THREAD_DST_MEMORY,
                           postcopy_mirror_thread, m, QEMU_THREAD_JOINABLE);
        m->running = true;
    }
}

void postcopy_mirrors_stop(PostcopyMirrors *m)
{
    if (m->running) {
        qatomic_set(&m->quit, true);
        qemu_thread_join(&m->thread);
        m->running = false;
    }
    g_clear_pointer(&m->blocks, g_ptr_array_unref);
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
            return -ENOMEM; /* in place of a SIGBUS */
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
