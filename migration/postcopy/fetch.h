/*
 * Postcopy: fetch channels
 *
 * Connections beside the main one (parameter postcopy-fetch-channels).  The
 * destination sends page requests on them, and the source the pages that were
 * requested, each on the same channel.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_H
#define MIGRATION_POSTCOPY_FETCH_H

#include "qapi/qapi-types-migration.h"
#include "qemu/coroutine.h"
#include "qemu/stats64.h"
#include "qemu/thread.h"
#include "io/channel.h"
#include "migration/migration.h"
#include "request.h"

/* Since a migration began, recoveries included */
typedef struct PostcopyFetchCounts {
    Stat64 requests;
    Stat64 pages;
    Stat64 zero_pages;
    Stat64 frames;
} PostcopyFetchCounts;

typedef struct PostcopyFetch PostcopyFetch;

/* Fill in what each channel has done, of the side that this QEMU is */
void postcopy_fetch_fill_info(MigrationInfo *info);

/* Source */

/* Make and free @s->postcopy: with @s itself */
void postcopy_fetch_init(MigrationState *s);
void postcopy_fetch_destroy(MigrationState *s);

/* A migration begins: the destination has not answered yet */
void postcopy_fetch_begin(MigrationState *s);

/* In the thread of the return path: the destination has answered a PING */
void postcopy_fetch_answered(MigrationState *s);

/* Fill in what the last migration has done, if it has opened channels */
bool postcopy_fetch_fill_outgoing(MigrationState *s, MigrationInfo *info);
void postcopy_fetch_fill_counts(MigrationInfo *info,
                                PostcopyFetchCounts *counts);

/*
 * Connect all channels, and wait until the destination has answered.  In the
 * migration thread, without the BQL.  The guest still runs, or a recovery has
 * begun; if this fails, all are closed.
 */
bool postcopy_fetch_open(MigrationState *s, Error **errp);

/* The status is postcopy-active: requests are answered from here on */
void postcopy_fetch_go(MigrationState *s);

/*
 * The migration fails: if the destination has refused the stream, tell what it
 * may have against it, in the error of @s.
 */
void postcopy_fetch_explain(MigrationState *s);

/* All that was to be sent has been: tell the destination on each channel */
void postcopy_fetch_send_end(MigrationState *s);

/*
 * Break all channels, so that no thread waits for one.  Any thread, with or
 * without the BQL.
 */
void postcopy_fetch_break(MigrationState *s);

/* Break all channels, wait for their threads, and close them */
void postcopy_fetch_close(MigrationState *s);

/* Destination */

/* For PostcopyIncoming.fetch; lives for ever, as @mis does */
PostcopyFetch *postcopy_fetch_new(MigrationIncomingState *mis);

/* By which channel @page is best requested now */
unsigned postcopy_fetch_choose(MigrationIncomingState *mis,
                               const PostcopyPage *page);

/*
 * Whether the channels of this migration are there, if there are to be any.
 * Takes no lock.
 */
bool postcopy_fetch_complete(MigrationIncomingState *mis);

/*
 * A connection has come that is not the main one.  Waits for what it says
 * first.  On success, another reference is taken.
 */
void coroutine_fn postcopy_fetch_accept(MigrationIncomingState *mis,
                                        QIOChannel *ioc, Error **errp);

/*
 * Postcopy begins, and no page has been missed: read the parameter, which stays
 * what it is.  Returns whether pages are requested by channels.
 */
bool postcopy_fetch_latch(MigrationIncomingState *mis);

/*
 * From here on pages may be requested; a thread receives on each channel.
 * Called by the thread that loads the main channel.
 */
bool postcopy_fetch_start(MigrationIncomingState *mis, Error **errp);

/*
 * Break all channels, so that no thread waits for one.  Any thread, with or
 * without the BQL.
 */
void postcopy_fetch_break_incoming(MigrationIncomingState *mis);

/*
 * Break all channels, wait for their threads, and close them: at the end, or
 * when postcopy pauses.  Requests that come later fail.
 */
void postcopy_fetch_stop(MigrationIncomingState *mis);

#endif
