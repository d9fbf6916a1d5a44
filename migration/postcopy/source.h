/*
 * Postcopy: the door through which missing pages are requested
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_SOURCE_H
#define MIGRATION_POSTCOPY_SOURCE_H

#include "request.h"

/*
 * Where the destination has its pages from.  All requests of one postcopy go
 * through the PostcopySource that postcopy_fault_start() stores in
 * PostcopyIncoming.source before any page can be missed, and recoveries anew:
 * they may come up with another number of channels, or none.
 *
 * A PostcopySource is constant and lives for ever.  Any thread may call its
 * functions, with or without the BQL, but without PostcopyRequests.lock and
 * MigrationIncomingState.rp_mutex, which they take.
 */
typedef struct PostcopySource {
    /*
     * Request @page, one host page that has an entry in PostcopyRequests, by
     * the connection @page->channel.  With @more, the request may stay in a
     * buffer until flush().  Returns 0, or negative errno if there is no
     * connection: the entry stays, and recovery requests the page again.  The
     * page may have been placed before this returns.
     */
    int (*request)(MigrationIncomingState *mis, const PostcopyPage *page,
                   bool more);
    /*
     * Send what request() has left in buffers, on all connections.  Reports no
     * error: the thread that loads the stream meets a broken connection, too.
     */
    void (*flush)(MigrationIncomingState *mis);
    /*
     * NULL if no other channel has an end of its own, or: the main
     * channel has ended: sleep until all others have, or for @ms
     * milliseconds.  Returns whether they have, so that no page comes any more.
     * Called by the thread that loads the main channel, again and again.
     */
    bool (*wait_end)(MigrationIncomingState *mis, int ms);
    /*
     * NULL, or: vCPU @cpu_index has left KVM_RUN for @page.  Place it in the
     * calling thread, if that needs no wait; returns whether it has been
     * placed.  If not, or if another thread does so, the vCPU requests it.
     */
    bool (*serve)(MigrationIncomingState *mis, const PostcopyPage *page,
                  int cpu_index);
} PostcopySource;

/* Requests by the return path, pages by the main or the preempt channel */
extern const PostcopySource postcopy_return_path;

/* Requests and pages by fetch channels */
extern const PostcopySource postcopy_fetch_channels;

/* Pages that a file has */
extern const PostcopySource postcopy_file;

#endif
