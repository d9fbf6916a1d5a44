/*
 * Postcopy: the interface through which missing pages are requested
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_SOURCE_H
#define MIGRATION_POSTCOPY_SOURCE_H

#include "request.h"

/*
 * Where the destination gets its pages from.  All requests of one postcopy go
 * through the PostcopySource that postcopy_fault_start() stores in
 * PostcopyIncoming.source before any page can be missed.  A recovery stores it
 * anew: it may have another number of channels, or none.
 *
 * A PostcopySource is constant and never freed.  Any thread may call its
 * functions, with or without the BQL, but not with PostcopyRequests.lock or
 * MigrationIncomingState.rp_mutex held, which the functions take.
 */
typedef struct PostcopySource {
    /*
     * Request @page, a host page that has an entry in PostcopyRequests, on the
     * connection @page->channel.  With @flush_later, the request may stay in a
     * buffer until flush().  Returns 0, or negative errno if there is no
     * connection: the entry stays, and recovery requests the page again.  The
     * page may have been placed before this returns.
     */
    int (*request)(MigrationIncomingState *mis, const PostcopyPage *page,
                   bool flush_later);
    /*
     * Send the requests that request() has left in buffers, on all connections.
     * Reports no error: the thread that loads the stream notices it, too.
     */
    void (*flush)(MigrationIncomingState *mis);
    /*
     * NULL if only the main channel has an end.  Otherwise called, repeatedly,
     * by the thread that loads the main channel after that has ended.  Sleeps
     * until all other channels have ended, or for @ms milliseconds.  Returns
     * whether all have ended, so that no further page is received.
     */
    bool (*wait_end)(MigrationIncomingState *mis, int ms);
    /*
     * NULL, or: vCPU @cpu_index has left KVM_RUN for @page.  Place the page in
     * the calling thread, if that needs no wait; returns whether it was placed.
     * If not, or if another thread places it, the vCPU requests the page.
     */
    bool (*serve)(MigrationIncomingState *mis, const PostcopyPage *page,
                  int cpu_index);
} PostcopySource;

/* Requests on the return path, pages on the main or the preempt channel */
extern const PostcopySource postcopy_return_path;

/* Requests and pages on fetch channels */
extern const PostcopySource postcopy_fetch_channels;

/* Pages are read from a file */
extern const PostcopySource postcopy_file;

#endif
