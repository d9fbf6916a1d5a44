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
 * MigrationIncomingState.postcopy.  Made by postcopy_fault_init(), never freed:
 * a vCPU may still exit when postcopy is over, and be kicked at any time.
 */
struct PostcopyIncoming {
    /* Pages that were requested and have not been received; constant */
    PostcopyRequests *requests;
    /*
     * Where they are requested.  Atomic, NULL before the first time.  Written
     * with the BQL before the first vCPU runs and before the fault thread is
     * created, and by recoveries before they list the pages.
     */
    const PostcopySource *source;
    /*
     * Recovery is under way and the source does not expect page requests by
     * the return path.  Written with MigrationIncomingState.rp_mutex.  A thread
     * that reads it without has entered its page in requests before; recovery
     * clears it before it lists the pages.
     */
    bool hold_requests;
    /*
     * By cpu_index, NULL before the first postcopy with exits.  Written with
     * the BQL before any vCPU can exit; never freed.
     */
    struct PostcopyFaultVCPU *vcpus;
    /* Of vCPUs that do not wait; written as vcpus is */
    struct PostcopyAsync *async;
    /* Fetch channels; constant */
    struct PostcopyFetch *fetch;
    /*
     * The file that has the guest's memory, or NULL.  Written with the BQL;
     * see file.c.
     */
    struct PostcopyFile *file;
    /* Second mappings of shared huge pages; see mirror.h */
    PostcopyMirrors mirrors;
    /* Warns of pages that are late; with the BQL, and so is the time in ms */
    QEMUTimer *late_timer;
    int64_t late_warned_ms;
};

/* By what pages are requested now, or NULL.  Any thread. */
static inline const PostcopySource *postcopy_source(MigrationIncomingState *mis)
{
    return qatomic_read(&mis->postcopy->source);
}

/* async.c: vCPUs that do not wait for missing pages */

typedef enum PostcopyFaultResult {
    /* The vCPU has to wait for the page */
    POSTCOPY_FAULT_WAIT,
    /* The same, and the request is sent as with POSTCOPY_SEND_AROUND */
    POSTCOPY_FAULT_WAIT_AROUND,
    /*
     * The vCPU has to wait for another page, to which the argument was changed,
     * before it enters the guest and faults again
     */
    POSTCOPY_FAULT_WAIT_FOR_ANOTHER,
    /* Enter the guest */
    POSTCOPY_FAULT_ENTER,
} PostcopyFaultResult;

/*
 * Do of postcopy_async_start() what takes time: with the BQL, while the guest
 * still runs on the source.  Returns whether guests will be told of pages.
 */
bool postcopy_async_prepare(void);

/*
 * Bracket the time in which vCPUs may exit for missing pages.  Start is called
 * with the BQL before any vCPU runs.
 */
void postcopy_async_start(MigrationIncomingState *mis);
void postcopy_async_stop(MigrationIncomingState *mis);

/*
 * @cpu has left KVM_RUN since @page is missing.  In the vCPU's thread, without
 * the BQL.
 */
PostcopyFaultResult postcopy_async_fault(CPUState *cpu, PostcopyPage *page);

/* For query-migrate */
void postcopy_async_fill_info(MigrationIncomingState *mis, MigrationInfo *info);

/* late.c: pages that do not come */

/* What has not come after so long is worth a warning; a page, so often */
#define POSTCOPY_LATE_MS 10000

/*
 * Warn from time to time, until postcopy has ended, if a requested page is
 * late.  Called once for each postcopy, with the BQL.
 */
void postcopy_watch_start(MigrationIncomingState *mis);

#endif
