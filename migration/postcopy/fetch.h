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
#include "qemu/units.h"
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

/*
 * A page of this size or more fills a link alone, and its temporary page is so
 * large: requested ones use one channel, and others the main channel
 */
#define POSTCOPY_FETCH_LARGE (64 * MiB)

typedef struct PostcopyFetch PostcopyFetch;
typedef struct PostcopyFetchOffer PostcopyFetchOffer;

/* Fill in what each channel has done, of the side that this QEMU is */
void postcopy_fetch_fill_info(MigrationInfo *info);

/*
 * How many channels both sides have agreed on.  If any, there is no preempt
 * channel, even if it turns out that none can be connected.  Any thread.
 */
unsigned postcopy_fetch_agreed(void);

/* With the BQL, once: channels are one of the peers' features */
void postcopy_fetch_agree_init(void);

/* Source */

/* Make and free @s->postcopy: with @s itself */
void postcopy_fetch_init(MigrationState *s);
void postcopy_fetch_destroy(MigrationState *s);

/* A migration begins: nothing is agreed on.  BQL, no migration thread. */
void postcopy_fetch_begin(MigrationState *s);

/* In the thread of the return path: the destination has said so */
void postcopy_fetch_offered(MigrationState *s, const PostcopyFetchOffer *offer);

/*
 * Put the connections of those that are open into @iocs, and pointers to their
 * PostcopyFetchSource.sent into @sent, which have room for
 * POSTCOPY_FETCH_CHANNELS_MAX; returns how many.  Migration thread.
 */
unsigned postcopy_fetch_iocs(MigrationState *s, QIOChannel **iocs, bool **sent);

/* Fill in what the last migration has done, if it has opened channels */
bool postcopy_fetch_fill_outgoing(MigrationState *s, MigrationInfo *info);
void postcopy_fetch_fill_counts(MigrationInfo *info, unsigned used,
                                PostcopyFetchCounts *counts);

/*
 * Connect the channels that both sides have agreed on, at the same time, use
 * those that the destination has answered within two seconds, and tell it on
 * the main channel which ones these are.  In the migration thread, without the
 * BQL; the guest still runs, or a recovery has begun.  Returns false and sets
 * @errp if the migration or recovery has been given up meanwhile, or if fewer
 * came up than one side has set; then all are closed.
 */
bool postcopy_fetch_open(MigrationState *s, Error **errp);

/* The status is postcopy-active: requests are answered from here on */
void postcopy_fetch_go(MigrationState *s);

/*
 * Whether the background goes by channels, and that of @rb.  These functions
 * and those below are the migration thread's.
 */
bool postcopy_fetch_has_any_background(MigrationState *s);
bool postcopy_fetch_has_background(MigrationState *s, RAMBlock *rb);

/*
 * Where the background's run of pages from byte @start of @rb ends, at @end at
 * the latest; @zero is set if they are zeros, of which there may be many, while
 * others are no more than what the window lets go.
 */
ram_addr_t postcopy_fetch_run(MigrationState *s, RAMBlock *rb, ram_addr_t start,
                              ram_addr_t end, bool *zero);

/*
 * Send such a run, whose pages are claimed, at the end of the slice.  The one
 * before was given to postcopy_fetch_put_run().
 */
void postcopy_fetch_hold_run(MigrationState *s, RAMBlock *rb, ram_addr_t start,
                             ram_addr_t end, bool zero);

/*
 * Put the run that is held into a buffer: another one will be held at once.
 * Without bitmap_mutex.  Returns 0 or negative errno.
 */
int postcopy_fetch_put_run(MigrationState *s);

/*
 * Behind a slice: send its runs, and behind them @ping, which may be NULL.
 * Returns false if there were none.  Without bitmap_mutex.
 */
bool postcopy_fetch_end_slice(MigrationState *s, const uint32_t *ping);

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
 * Whether no channel is awaited: none was agreed on, or the source has said
 * which ones it uses.  Takes no lock.
 */
bool postcopy_fetch_complete(MigrationIncomingState *mis);

/*
 * With the BQL: the source advises of postcopy.  Returns false and sets @errp
 * if this side has set a number and has not been asked for it.
 */
bool postcopy_fetch_advised(MigrationIncomingState *mis, Error **errp);

/*
 * A connection has come that is not the main one.  Waits for what it says
 * first.  On success, another reference is taken.
 */
void coroutine_fn postcopy_fetch_accept(MigrationIncomingState *mis,
                                        QIOChannel *ioc, Error **errp);

/*
 * The source uses the channels whose bits are in @used: close the others.  In
 * the thread that loads the main channel, before LISTEN or in a recovery.
 */
bool postcopy_fetch_settle(MigrationIncomingState *mis, uint16_t used,
                           Error **errp);

/* Whether pages are requested by channels.  Any thread. */
bool postcopy_fetch_incoming(MigrationIncomingState *mis);

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

/* The incoming migration is over: nothing is agreed on.  BQL. */
void postcopy_fetch_forget(MigrationIncomingState *mis);

#endif
