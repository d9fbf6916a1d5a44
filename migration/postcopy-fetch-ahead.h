/*
 * Postcopy: pages that are requested before they are missed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_AHEAD_H
#define MIGRATION_POSTCOPY_FETCH_AHEAD_H

#include "migration.h"
#include "postcopy-frame.h"
#include "postcopy-request.h"

typedef struct PostcopyFetchAhead PostcopyFetchAhead;

/* For vCPUs with indices below @cpus */
PostcopyFetchAhead *postcopy_fetch_ahead_new(unsigned cpus);

/* PostcopyFaultChannels.request_ahead() */
bool postcopy_fetch_ahead(PostcopyFetchAhead *ahead,
                          MigrationIncomingState *mis, PostcopyPage *page,
                          const PostcopyFault *fault, bool request);

/*
 * Of postcopy-fetch-dst.c: send @request on @channel, or with @more put it into
 * the buffer until the next one is sent there.  Returns 0, or negative errno:
 * recovery requests what is outstanding.
 */
int postcopy_fetch_send_request(MigrationIncomingState *mis, unsigned channel,
                                const PostcopyFrame *request, bool more);

#endif
