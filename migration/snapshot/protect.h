/*
 * Background snapshot: protection of memory, and its release
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_SNAPSHOT_PROTECT_H
#define MIGRATION_SNAPSHOT_PROTECT_H

#include "qapi/qapi-types-migration.h"
#include "exec/cpu-common.h"
#include "exec/ramblock.h"
#include "migration/qemu-file.h"

struct uffd_msg;
typedef struct BackgroundSnapshot BackgroundSnapshot;

/* Make and free @s->snapshot, together with @s */
void snapshot_init(MigrationState *s);
void snapshot_destroy(MigrationState *s);

/*
 * The thread that takes the snapshot calls all functions below, in this order,
 * except snapshot_give_up() and snapshot_fill_info().
 */

/* Choose how to protect memory.  The guest runs. */
void snapshot_prepare(void);

/* Whether pages of @rb must be in the page table before they are protected */
bool snapshot_must_populate(RAMBlock *rb);

/* Map them; false if the caller has to do it, by reading each page. */
bool snapshot_populate(RAMBlock *rb, ram_addr_t offset, ram_addr_t size);

/* Features to request of userfaultfd beside UFFD_FEATURE_PAGEFAULT_FLAG_WP */
uint64_t snapshot_uffd_features(void);

/*
 * All memory is protected by @uffd, and nothing can write to it yet.  Called in
 * an RCU critical section.  Returns 0 or -errno.
 */
int snapshot_start(int uffd);

/**
 * snapshot_next_fault: the next write that waits for a page to be saved
 *
 * Returns 1 with @msg, 0 if there is none now, negative on an error.
 */
int snapshot_next_fault(struct uffd_msg *msg);

/*
 * Whether snapshot_next_fault() has returned the page that is being saved, so
 * that its content is to be copied for it to be released at once
 */
bool snapshot_copies(RAMBlock *rb);

/* Whether a target page is known to be zeros, without reading it */
bool snapshot_is_hole(RAMBlock *rb, ram_addr_t offset);

/**
 * snapshot_saved: pages from @start to @end of @rb, which is protected, have
 * been put into @f
 *
 * Pages that a thread waits for are released at once, others together with
 * their neighbours.  Returns 0, or negative on an error.
 */
int snapshot_saved(QEMUFile *f, RAMBlock *rb, ram_addr_t start,
                   ram_addr_t end);

/* Release all pages that were saved. */
int snapshot_release_saved(QEMUFile *f);

/*
 * No more memory will be saved, and userfaultfd is about to be closed;
 * snapshot_start() need not have been called.
 */
void snapshot_stop(void);

/*
 * Let the guest write to all memory, whatever the snapshot's thread waits for.
 * The snapshot must have been cancelled: pages saved from now on are worthless.
 * Called with the BQL.
 */
void snapshot_give_up(void);

/* For query-migrate.  Called with the BQL. */
void snapshot_fill_info(MigrationInfo *info);

#endif
