/*
 * Postcopy: the state of the destination, and what its files share
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_INCOMING_H
#define MIGRATION_POSTCOPY_INCOMING_H

#include "qemu/timer.h"
#include "migration/migration.h"
#include "mirror.h"
#include "request.h"
#include "source.h"

/*
 * MigrationIncomingState.postcopy.  postcopy_fault_init() makes it, and nothing
 * frees it: a vCPU may exit after postcopy is over, and be kicked at any time.
 */
struct PostcopyIncoming {
    /* Pages that were requested and have not been received; constant */
    PostcopyRequests *requests;
    /*
     * How pages are requested.  Atomic, NULL before the first postcopy.
     * Written with the BQL before the first vCPU runs and before the fault
     * thread is created, and by recoveries before they list @requests.
     */
    const PostcopySource *source;
    /*
     * Recovery is under way, and the source expects no page requests on the
     * return path.  Written with MigrationIncomingState.rp_mutex.  A thread
     * that reads this without the lock has added its page to @requests before;
     * recovery clears this before it lists @requests.
     */
    bool hold_requests;
    /*
     * State of exits by cpu_index, NULL before the first postcopy with exits.
     * Written with the BQL before any vCPU can exit; never freed.
     */
    struct PostcopyFaultVCPU *vcpus;
    /* State of async page faults; written as @vcpus */
    struct PostcopyAsync *async;
    /* State of fetch channels; constant */
    struct PostcopyFetch *fetch;
    /*
     * The file that has the guest's memory, or NULL.  Written with the BQL;
     * see file.c.
     */
    struct PostcopyFile *file;
    /* Second mappings of shared huge pages; see mirror.h */
    PostcopyMirrors mirrors;
    /* Warns of late pages.  The BQL protects it, and @late_warned_ms. */
    QEMUTimer *late_timer;
    int64_t late_warned_ms;
};

/* How pages are requested now, or NULL.  Any thread. */
static inline const PostcopySource *postcopy_source(MigrationIncomingState *mis)
{
    return qatomic_read(&mis->postcopy->source);
}

/* async.c: vCPUs that do not wait for missing pages */

typedef enum PostcopyFaultResult {
    /* The vCPU has to wait for the page */
    POSTCOPY_FAULT_WAIT,
    /* The same, and the request is sent as for POSTCOPY_SEND_AROUND */
    POSTCOPY_FAULT_WAIT_AROUND,
    /*
     * The vCPU has to wait for another page, to which *@page was changed,
     * before it enters the guest and faults again
     */
    POSTCOPY_FAULT_WAIT_FOR_ANOTHER,
    /* The vCPU enters the guest */
    POSTCOPY_FAULT_ENTER,
} PostcopyFaultResult;

/*
 * The slow part of postcopy_async_start(): called with the BQL, also while the
 * guest runs on the source.  Returns whether guests will be notified of pages.
 */
bool postcopy_async_prepare(void);

/*
 * Bracket the time in which vCPUs may exit for missing pages.
 * postcopy_async_start() is called with the BQL before any vCPU runs.
 */
void postcopy_async_start(MigrationIncomingState *mis);
void postcopy_async_stop(MigrationIncomingState *mis);

/*
 * @cpu has left KVM_RUN because @page is missing.  Called in the vCPU's thread,
 * without the BQL.  Changes *@page only for POSTCOPY_FAULT_WAIT_FOR_ANOTHER.
 */
PostcopyFaultResult postcopy_async_fault(CPUState *cpu, PostcopyPage *page);

/* Fill in @info for query-migrate; with the BQL */
void postcopy_async_fill_info(MigrationIncomingState *mis, MigrationInfo *info);

/* late.c: pages that are late */

/* A request of this age causes a warning, at most one in such an interval */
#define POSTCOPY_LATE_MS 10000

/*
 * Warn repeatedly, until postcopy has ended, while a requested page is late.
 * Called once for each postcopy, with the BQL.
 */
void postcopy_watch_start(MigrationIncomingState *mis);

#endif
