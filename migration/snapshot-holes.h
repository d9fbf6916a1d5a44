/*
 * Background snapshot: which pages held nothing when they were protected
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_SNAPSHOT_HOLES_H
#define MIGRATION_SNAPSHOT_HOLES_H

#include "exec/cpu-common.h"
#include "exec/ramblock.h"

typedef struct SnapshotHoles SnapshotHoles;

/* Find out what the kernel offers. */
SnapshotHoles *snapshot_holes_new(void);
void snapshot_holes_free(SnapshotHoles *h);

/*
 * Whether the kernel tells for each page if it is write-protected.  Then
 * empty page table entries need no protection: a page that is not protected
 * is one that was not there.
 */
bool snapshot_holes_know_protection(SnapshotHoles *h);

/**
 * snapshot_holes_test: whether a page was a hole when it was protected
 *
 * Returns 1 if it was, so that it reads as zeros in the snapshot; 0 if it may
 * hold data, and is protected or can be read without harm; -errno.
 *
 * @rb: block with RAM_UF_WRITEPROTECT, all of whose used length was
 *      protected, apart from what is not part of the snapshot
 * @offset: of the page in the block
 * @size: of the page, a multiple of the host's page size or smaller
 *
 * The page must not have been released since, and its protection is released
 * by the calling thread only.
 */
int snapshot_holes_test(SnapshotHoles *h, RAMBlock *rb, ram_addr_t offset,
                        size_t size);

#endif
