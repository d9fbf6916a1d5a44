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

/* Make @mis->postcopy.  Called once for @mis; never freed. */
void postcopy_fault_init(MigrationIncomingState *mis);

/*
 * Check whether exits are available, and fail if postcopy-fault-exits=on but
 * they are not.  If they are, do the preparations that would take time in the
 * blackout.  Called with the BQL before the stream begins, so that a failure
 * costs only this QEMU, and once more before the first page.
 */
bool postcopy_fault_exits_check(Error **errp);

/* The host page of @rb that contains the byte at @offset */
PostcopyPage postcopy_page(RAMBlock *rb, ram_addr_t offset);

/*
 * Bracket the time in which pages may be missing.  postcopy_fault_start() is
 * called with the BQL before any vCPU runs; postcopy_fault_stop() when all
 * pages were received; postcopy_fault_end() when no memory is registered with
 * userfaultfd any more.  vCPUs may exit until postcopy_fault_end().
 */
void postcopy_fault_start(MigrationIncomingState *mis);
void postcopy_fault_stop(MigrationIncomingState *mis);
void postcopy_fault_end(MigrationIncomingState *mis);

/**
 * postcopy_fault_uffd: a thread that waits in the kernel has missed a page
 *
 * Requests the page if it was not requested.  @fault describes the thread.
 * Returns true if the page was received already: no other thread will wake the
 * faulting thread then.
 */
bool postcopy_fault_uffd(MigrationIncomingState *mis, const PostcopyPage *page,
                         const PostcopyFault *fault);

/**
 * postcopy_uffd_read: serve the faults that userfaultfd reports
 *
 * Returns false if no more can be read, after it has reported the error.
 * Called by the fault thread, without locks, when the fd is readable.
 */
bool postcopy_uffd_read(MigrationIncomingState *mis);

/* How the request of a page that a vCPU has missed is sent */
typedef enum PostcopyFaultSend {
    /* At once */
    POSTCOPY_SEND_NOW,
    /*
     * At once, and behind it requests of the pages around it: a guest's kernel
     * has missed the page.  A wait there stops all tasks of the guest, and a
     * kernel often misses a neighbour next.
     */
    POSTCOPY_SEND_AROUND,
    /* By the fault thread: the vCPU is about to enter its guest */
    POSTCOPY_SEND_DEFERRED,
} PostcopyFaultSend;

/*
 * A vCPU has missed a page: request it if it was not requested.  When the page
 * is received, @waiter is woken, or its on_received() called, unless this
 * returns POSTCOPY_PAGE_RECEIVED.
 */
PostcopyPageState postcopy_fault_begin(CPUState *cpu, const PostcopyPage *page,
                                       PostcopyWaiter *waiter,
                                       PostcopyFaultSend send);

/* Send the requests that are deferred.  Called by the fault thread. */
void postcopy_fault_send_deferred(MigrationIncomingState *mis);

/*
 * The connection has broken: hold requests on the return path back until
 * postcopy_fault_ask_again().  Called with rp_mutex.
 */
void postcopy_fault_hold(MigrationIncomingState *mis);

/*
 * The source has resumed: stop holding requests, and request all outstanding
 * pages again
 */
void postcopy_fault_ask_again(MigrationIncomingState *mis);

/*
 * The source has ended the main channel's stream: wait until requested pages
 * are received, on any channel.  Called without locks by the thread that loads
 * pages; does nothing in others.  Returns 0, or -EIO if they will not be
 * received: the connection has broken, a user has called migrate-pause, or the
 * source has withheld pages.
 */
int postcopy_fault_wait_end(MigrationIncomingState *mis);

/*
 * One of the channels from the source has failed: break the other one too, so
 * that postcopy pauses and can be recovered as a whole.  Called by the thread
 * that has noticed the error.
 */
void postcopy_fault_break_connection(MigrationIncomingState *mis);

/* Fill in counts and latencies of faults, if there was a postcopy */
void postcopy_fault_fill_info(MigrationInfo *info);

#endif
