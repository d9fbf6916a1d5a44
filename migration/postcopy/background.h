/*
 * Postcopy: how the source sends what nobody has requested
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_BACKGROUND_H
#define MIGRATION_POSTCOPY_BACKGROUND_H

#include "qapi/qapi-types-migration.h"
#include "qemu/thread.h"
#include "migration/migration.h"
#include "window.h"

/* A TCP connection, which is open as long as the migration thread sends */
typedef struct PostcopyLink {
    int fd;
    /* PostcopyFetchSource.sent; NULL: it is to be asked each time */
    bool *sent;
} PostcopyLink;

/* In PostcopyOutgoing */
typedef struct PostcopyBackground {
    /*
     * Whether the background has a window: from postcopy_background_begin() to
     * the next migration.  Written by the migration thread alone; others read
     * it with the lock.
     */
    bool active;
    /* Protects all up to waiting, and is taken for the writes of active */
    QemuMutex lock;
    PostcopyWindow window;
    /* Bytes of a target page with PAGE_COST, on average; not 0 */
    int64_t page_bytes;
    /* Somebody reads what the destination says */
    bool answers;
    /* The migration thread sleeps on rate_limit_sem until a PONG posts it */
    bool waiting;
    /* Of the migration thread: those that pages go by, and how many */
    PostcopyLink link[1 + POSTCOPY_FETCH_CHANNELS_MAX];
    unsigned links;
    /*
     * Of the migration thread: qemu_file_transferred() behind the last page,
     * which counts all connections, and runs that wait for the end of the slice
     */
    uint64_t file_bytes;
    /*
     * Of the migration thread: bytes of this slice, target pages and bytes that
     * have been sent of it
     */
    uint64_t slice;
    unsigned slice_pages;
    uint64_t in_slice;
    /*
     * Of the migration thread: CLOCK_MONOTONIC in ns from which on
     * max-postcopy-bandwidth lets it send the next slice, which bandwidth that
     * was, and whether this slice came before: it has requested pages alone
     */
    int64_t next_ns;
    uint64_t rate;
    bool early;
} PostcopyBackground;

/* With PostcopyOutgoing */
void postcopy_background_init(PostcopyBackground *b);
void postcopy_background_destroy(PostcopyBackground *b);

/* A migration begins: there is no window yet.  BQL, no migration thread. */
void postcopy_background_reset(MigrationState *s);

/*
 * Postcopy begins, or goes on after a recovery: find the window of this main
 * channel.  Migration thread.
 */
void postcopy_background_begin(MigrationState *s);

/*
 * How many pages, side by side and one of them requested, should be sent, at
 * least 1: see ALONG_US.  Any thread.
 */
unsigned postcopy_background_along(MigrationState *s);

/*
 * @pages target pages were sent.  Returns whether a slice is complete, so that
 * the section should end.  Migration thread.
 */
bool postcopy_background_sent(MigrationState *s, unsigned pages);

/* How many bytes complete the slice.  Migration thread. */
uint64_t postcopy_background_slice(MigrationState *s);

/*
 * Behind a section: send the runs of a fetch channel, and a PING if it is time
 * for one.  Migration thread.
 */
void postcopy_background_ping(MigrationState *s);

/*
 * Whether max-postcopy-bandwidth does not let the next slice be sent yet: then
 * a section is to have requested pages alone, which that does not count.
 * Migration thread, before each section.
 */
bool postcopy_background_early(MigrationState *s);

/*
 * Between sections: sleep until the next slice may be sent, or a page has been
 * requested, or for 100 ms.  Returns whether a page has been requested, as
 * migration_rate_limit() does.  Migration thread.
 */
bool postcopy_background_wait(MigrationState *s);

/*
 * The return path thread begins or ends: without it there are no answers, and
 * the background is not held back, so that a write finds the broken connection.
 * Return path thread.
 */
void postcopy_background_answers(MigrationState *s, bool answers);

/*
 * A PONG has come.  Returns false if its value is none that
 * postcopy_background_ping() sends.  Return path thread.
 */
bool postcopy_background_ponged(MigrationState *s, uint32_t value);

/* For query-migrate.  Any thread. */
void postcopy_background_fill_info(MigrationState *s, MigrationInfo *info);

#endif
