/*
 * Postcopy: the second mapping of shared huge pages, into which they are
 * received before the guest sees them
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_MIRROR_H
#define MIGRATION_POSTCOPY_MIRROR_H

#include "qemu/thread.h"
#include "exec/cpu-common.h"

/* Part of PostcopyIncoming */
typedef struct PostcopyMirrors {
    /* Blocks with a mirror; constant while @thread runs */
    GPtrArray *blocks;
    /* Allocates memory, if @running.  The BQL protects both, and @blocks. */
    QemuThread thread;
    bool running;
    /* Atomic: @thread has to exit */
    bool quit;
} PostcopyMirrors;

/**
 * postcopy_mirror_open: map @rb a second time, if possible
 *
 * This needs memory with a file that is shared (share=on), in host pages larger
 * than the target's.  The host kernel must report pages that are in the file
 * but not mapped (UFFD_FEATURE_MINOR_HUGETLBFS, -_SHMEM), and no other process
 * that maps the memory may take part in the postcopy.  Otherwise pages are
 * copied to @rb, and the reason is traced.
 *
 * Returns the mode with which to register @rb in addition to
 * UFFDIO_REGISTER_MODE_MISSING: UFFDIO_REGISTER_MODE_MINOR, or 0.  Called
 * before any page is received; @shared: other processes take part.
 */
uint64_t postcopy_mirror_open(PostcopyMirrors *m, RAMBlock *rb, bool shared);

/*
 * Start a thread that allocates all pages of the mirrors before they are
 * received: a vCPU that waits for a page would also wait until the kernel has
 * cleared it.  Called after postcopy_mirror_open() for all blocks.
 */
void postcopy_mirrors_start(PostcopyMirrors *m);

/* Stop that thread, if it was started; before postcopy_mirror_close() */
void postcopy_mirrors_stop(PostcopyMirrors *m);

/* Called when all pages were received; does nothing if @rb has no mirror */
void postcopy_mirror_close(RAMBlock *rb);

/**
 * postcopy_mirror_populate: allocate a page of the mirror
 *
 * @page: its address in the mirror, @size in bytes.  A write to the page would
 * allocate it, too, but without memory QEMU would get a SIGBUS.  Returns 0, or
 * negative errno.
 */
int postcopy_mirror_populate(void *page, size_t size);

/*
 * Address in the mirror of the byte at @start of @rb, or NULL.  Constant while
 * pages are received.
 */
void *postcopy_mirror(RAMBlock *rb, ram_addr_t start);

#endif
