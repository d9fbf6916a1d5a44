/*
 * Background snapshot: which pages were empty when they were protected
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

/* Whether snapshot_holes_scan() finds holes, which need no protection then. */
bool snapshot_holes_can_scan(SnapshotHoles *h);

/**
 * snapshot_holes_scan: find the holes of a block, if it is not a shared file
 *
 * Called after all its used length was protected, except parts that are not in
 * the snapshot, and before anything can write to it.  Returns 0 or -errno.
 */
int snapshot_holes_scan(SnapshotHoles *h, RAMBlock *rb);

/**
 * snapshot_holes_test: whether a page was a hole when it was protected
 *
 * @rb: block that was protected, and passed to snapshot_holes_scan()
 * @offset: of the page in the block
 * @size: of the page, a multiple of the host's page size or smaller
 *
 * Returns true if it was, so that it reads as zeros in the snapshot.  If not,
 * it may contain data, and is still protected.  The page must not have been
 * released since.
 */
bool snapshot_holes_test(SnapshotHoles *h, RAMBlock *rb, ram_addr_t offset,
                         size_t size);

#endif
