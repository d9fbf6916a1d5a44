/*
 * Postcopy: the two ways in which the destination learns of missing pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FAULT_H
#define MIGRATION_POSTCOPY_FAULT_H

#include "qapi/qapi-types-migration.h"
#include "migration/migration.h"
#include "request.h"

/* Make @mis->postcopy.  Called once for @mis, which keeps it for ever. */
void postcopy_fault_init(MigrationIncomingState *mis);

/*
 * Look whether exits can be had, and fail if postcopy-fault-exits=on asks for
 * them in vain; if they can, do what would take time in the blackout.  Called
 * before the stream begins, so that a failure costs nothing but this QEMU, and
 * once more before the first page.  With the BQL.
 */
bool postcopy_fault_exits_check(Error **errp);

/* The host page of @rb with the byte at @offset */
PostcopyPage postcopy_page(RAMBlock *rb, ram_addr_t offset);

/*
 * Bracket the time in which pages may be missing.  postcopy_fault_start() is
 * called with the BQL before any vCPU runs; postcopy_fault_stop() when all
 * pages have been received; postcopy_fault_end() when no memory is registered
 * with userfaultfd any more, until which vCPUs may still exit.
 */
void postcopy_fault_start(MigrationIncomingState *mis);
void postcopy_fault_stop(MigrationIncomingState *mis);
void postcopy_fault_end(MigrationIncomingState *mis);

/**
 * postcopy_fault_uffd: a page was missed by a thread that waits in the kernel
 *
 * Requests the page if it was not requested.  @fault tells by whom it is
 * missed.  Returns true if the page is there already: nobody else will wake the
 * thread then.
 */
bool postcopy_fault_uffd(MigrationIncomingState *mis, const PostcopyPage *page,
                         const PostcopyFault *fault);

/**
 * postcopy_uffd_read: serve all faults that userfaultfd has
 *
 * Returns false if no more can be read, after it has reported the error.
 * Called by the fault thread, without locks, when the fd can be read.
 */
bool postcopy_uffd_read(MigrationIncomingState *mis);

/* How the request of a page is sent that a vCPU has missed */
typedef enum PostcopyFaultSend {
    /* At once */
    POSTCOPY_SEND_NOW,
    /*
     * At once, and behind it requests of the pages around it: a guest's kernel
     * has missed it, in which a wait stops all of its tasks, and which often
     * misses a neighbour next
     */
    POSTCOPY_SEND_AROUND,
    /* By the fault thread: the vCPU is about to run its guest */
    POSTCOPY_SEND_DEFERRED,
} PostcopyFaultSend;

/*
 * A vCPU has missed a page: request it if it was not requested.  @waiter is
 * woken, or called, when it has been received, unless the answer is
 * POSTCOPY_PAGE_RECEIVED.
 */
PostcopyPageState postcopy_fault_begin(CPUState *cpu, const PostcopyPage *page,
                                       PostcopyWaiter *waiter,
                                       PostcopyFaultSend send);

/* In the fault thread, when it is woken: send the requests that are deferred */
void postcopy_fault_send_deferred(MigrationIncomingState *mis);

/*
 * The connection has broken: hold requests by the return path back, until
 * postcopy_fault_ask_again().  Called with rp_mutex.
 */
void postcopy_fault_hold(MigrationIncomingState *mis);

/*
 * The source has resumed: let requests pass again, and request anew all that
 * is outstanding
 */
void postcopy_fault_ask_again(MigrationIncomingState *mis);

/*
 * The main channel has told that all was sent: wait until the pages that were
 * requested have come, by whatever channel.  Called by the thread that loads
 * pages, without locks; does nothing in others.  Returns 0, or -EIO if they
 * will not come: the connection has broken, somebody said migrate-pause, or
 * the source has withheld them.
 */
int postcopy_fault_wait_end(MigrationIncomingState *mis);

/*
 * One of the channels from the source cannot be used any more: break the other
 * one too, so that postcopy pauses and can be recovered as a whole.  Called by
 * the thread that has met the error.
 */
void postcopy_fault_channel_broken(MigrationIncomingState *mis);

/* Fill in counts and latencies of faults, if there was a postcopy */
void postcopy_fault_fill_info(MigrationInfo *info);

#endif
