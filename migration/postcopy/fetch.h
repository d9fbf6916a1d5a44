/*
 * Postcopy: fetch channels
 *
 * Connections beside the main one (parameter postcopy-fetch-channels).  The
 * destination sends page requests on them, and the source sends the requested
 * pages, each on the channel of its request.
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

/* Counts since a migration began, recoveries included */
typedef struct PostcopyFetchCounts {
    Stat64 requests;
    Stat64 pages;
    Stat64 zero_pages;
    Stat64 frames;
} PostcopyFetchCounts;

/*
 * A page of this size or more fills a link by itself, and needs a temporary
 * page as large: requested ones use one channel, and others the main channel
 */
#define POSTCOPY_FETCH_LARGE (64 * MiB)

typedef struct PostcopyFetch PostcopyFetch;
typedef struct PostcopyFetchOffer PostcopyFetchOffer;

/*
 * Fill in the counts of each channel: of the last migration from here, if it
 * has opened channels, else of the one to here
 */
void postcopy_fetch_fill_info(MigrationInfo *info);

/*
 * Number of channels on which both sides have agreed.  If not 0, there is no
 * preempt channel, even if no fetch channel can be connected.  Any thread.
 */
unsigned postcopy_fetch_agreed(void);

/* With the BQL, as peer_register(): channels are a feature of peers */
void postcopy_fetch_agree_init(void);

/* Source */

/* Make and free @s->postcopy, together with @s */
void postcopy_fetch_init(MigrationState *s);
void postcopy_fetch_destroy(MigrationState *s);

/* A migration begins: nothing is agreed on.  BQL, no migration thread. */
void postcopy_fetch_begin(MigrationState *s);

/*
 * Unless a number is set here that the destination may refuse, or it has taken
 * it: if it refuses when it has all of a precopy, it runs the guest, too
 */
bool postcopy_fetch_answered(MigrationState *s);

/* Called by the return path thread: the destination has sent @offer */
void postcopy_fetch_offered(MigrationState *s, const PostcopyFetchOffer *offer);

/*
 * Connect the agreed channels, at the same time, use those that the destination
 * has answered within two seconds (ten, if one side has set a number), and send
 * their bits on the main channel.  Called by the migration thread, without the
 * BQL; the guest still runs, or a recovery has begun.  Returns false and sets
 * @errp if the migration or recovery was given up meanwhile, or if one side has
 * set a number and fewer came up; then all are closed.
 */
bool postcopy_fetch_open(MigrationState *s, Error **errp);

/* The status is postcopy-active: requests are answered from here on */
void postcopy_fetch_go(MigrationState *s);

/*
 * Whether the background uses channels, and that of @rb.  The migration thread
 * calls these functions, up to postcopy_fetch_send_end().
 */
bool postcopy_fetch_has_any_background(MigrationState *s);
bool postcopy_fetch_has_background(MigrationState *s, RAMBlock *rb);

/*
 * The end of the background's run of pages from byte @start of @rb on, at most
 * @end.  Sets @zero if they are zeros, of which a run may have many; the window
 * limits other runs.
 */
ram_addr_t postcopy_fetch_run(MigrationState *s, RAMBlock *rb, ram_addr_t start,
                              ram_addr_t end, bool *zero);

/*
 * Hold such a run, whose pages are claimed, until the end of the slice.  The
 * caller has passed the run before to postcopy_fetch_put_run().
 */
void postcopy_fetch_hold_run(MigrationState *s, RAMBlock *rb, ram_addr_t start,
                             ram_addr_t end, bool zero);

/*
 * Put the held run into a buffer: the caller holds another one next.  Called
 * without bitmap_mutex.  Returns 0 or negative errno.
 */
int postcopy_fetch_put_run(MigrationState *s);

/*
 * After a slice: send its runs, and then @ping, which may be NULL.  Returns
 * false if there were none.  Called without bitmap_mutex.
 */
bool postcopy_fetch_end_slice(MigrationState *s, const uint32_t *ping);

/* Everything was sent: send the end on each channel */
void postcopy_fetch_send_end(MigrationState *s);

/*
 * Break all channels, so that no thread waits for one.  Any thread, with or
 * without the BQL.
 */
void postcopy_fetch_break(MigrationState *s);

/* Break all channels, wait for their threads, and close them */
void postcopy_fetch_close(MigrationState *s);

/* Destination */

/* For PostcopyIncoming.fetch; never freed, as @mis */
PostcopyFetch *postcopy_fetch_new(MigrationIncomingState *mis);

/* The channel on which @page is best requested now */
unsigned postcopy_fetch_choose(MigrationIncomingState *mis,
                               const PostcopyPage *page);

/*
 * Whether no channel is awaited: none was agreed on, or the source has reported
 * which channels it uses.  Takes no lock.
 */
bool postcopy_fetch_complete(MigrationIncomingState *mis);

/*
 * Called with the BQL: the source advises of postcopy.  Returns false and sets
 * @errp if this side has set a number and the source has not asked for it.
 */
bool postcopy_fetch_advised(MigrationIncomingState *mis, Error **errp);

/*
 * A connection other than the main one was accepted.  Waits for its first
 * message.  On success, takes another reference to @ioc.
 */
void coroutine_fn postcopy_fetch_accept(MigrationIncomingState *mis,
                                        QIOChannel *ioc, Error **errp);

/*
 * The source uses the channels with bits in @used: close the others.  Called by
 * the thread that loads the main channel, before LISTEN or in a recovery.
 */
bool postcopy_fetch_settle(MigrationIncomingState *mis, uint16_t used,
                           Error **errp);

/* Whether pages are requested on channels.  Any thread. */
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
 * when postcopy pauses.  Later requests fail.
 */
void postcopy_fetch_stop(MigrationIncomingState *mis);

/* The incoming migration is over: nothing is agreed on.  BQL. */
void postcopy_fetch_forget(MigrationIncomingState *mis);

#endif
