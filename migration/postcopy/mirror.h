/*
 * Postcopy: the second mapping of shared huge pages, which they are received
 * into before the guest sees them
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_MIRROR_H
#define MIGRATION_POSTCOPY_MIRROR_H

#include "qemu/thread.h"
#include "exec/cpu-common.h"

/* Part of MigrationIncomingState */
typedef struct PostcopyMirrors {
    /* Blocks with a mirror; constant while the thread runs */
    GPtrArray *blocks;
    /* Allocates memory, if running; with the BQL, as blocks */
    QemuThread thread;
    bool running;
    /* Atomic */
    bool quit;
} PostcopyMirrors;

/**
 * postcopy_mirror_open: map @rb a second time, if it can be
 *
 * That needs memory with a file that is shared (share=on), in host pages
 * larger than the target's, of which the host kernel reports those that are in
 * the file but not mapped (UFFD_FEATURE_MINOR_HUGETLBFS, -_SHMEM), and which
 * no other process maps that takes part in the postcopy.  Without, which is
 * traced, pages are copied to @rb.
 *
 * Returns the mode to register @rb with, beside
 * UFFDIO_REGISTER_MODE_MISSING: UFFDIO_REGISTER_MODE_MINOR, or 0.  Before any
 * page is received; @shared says that other processes take part.
 */
uint64_t postcopy_mirror_open(PostcopyMirrors *m, RAMBlock *rb, bool shared);

/*
 * Start to allocate all pages of the mirrors, in a thread, before they are
 * received.  The kernel clears each, which a vCPU that waits for it would wait
 * for too.  After postcopy_mirror_open() for all blocks.
 */
void postcopy_mirrors_start(PostcopyMirrors *m);

/* End that thread, if it was started.  Before postcopy_mirror_close(). */
void postcopy_mirrors_stop(PostcopyMirrors *m);

/* When all pages have been received; does nothing if @rb has no mirror */
void postcopy_mirror_close(RAMBlock *rb);

/**
 * postcopy_mirror_populate: allocate a page of the mirror
 *
 * @page: its address in the mirror, @size in bytes.  A write to it would do as
 * well, but where there is no memory it would end QEMU by SIGBUS.  Returns 0,
 * or negative errno.
 */
int postcopy_mirror_populate(void *page, size_t size);

/*
 * Address of the byte at @start of @rb in the mirror, or NULL.  Constant while
 * pages are received.
 */
void *postcopy_mirror(RAMBlock *rb, ram_addr_t start);

#endif
