/*
 * Postcopy: how the source sends pages that no thread has requested
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
    /* PostcopyFetchSource.sent; NULL: the kernel is asked each time */
    bool *sent;
} PostcopyLink;

/* In PostcopyOutgoing */
typedef struct PostcopyBackground {
    /*
     * Whether the background has a window: from postcopy_background_begin() to
     * the next migration.  Only the migration thread writes it, with @lock;
     * others read it with @lock.
     */
    bool active;
    /* Protects @window to @waiting, and writes of @active */
    QemuMutex lock;
    PostcopyWindow window;
    /* Bytes of a target page with PAGE_COST, on average; not 0 */
    int64_t page_bytes;
    /* The return path thread reads the destination's answers */
    bool answers;
    /* The migration thread sleeps on rate_limit_sem until a PONG posts it */
    bool waiting;
    /* Of the migration thread: connections with pages, and their number */
    PostcopyLink link[1 + POSTCOPY_FETCH_CHANNELS_MAX];
    unsigned links;
    /*
     * Of the migration thread: qemu_file_transferred() behind the last page,
     * for all connections, plus runs that are held until the end of the slice
     */
    uint64_t file_bytes;
    /*
     * Of the migration thread.  @slice: bytes of this slice; @slice_pages and
     * @in_slice: target pages and bytes of it that were sent
     */
    uint64_t slice;
    unsigned slice_pages;
    uint64_t in_slice;
    /*
     * Of the migration thread.  @next_ns: CLOCK_MONOTONIC in ns at which
     * max-postcopy-bandwidth, of @rate, allows the next slice.  @early: this
     * slice is sent before that, with only requested pages.
     */
    int64_t next_ns;
    uint64_t rate;
    bool early;
} PostcopyBackground;

/*
 * Postcopy begins, or continues after a recovery: find the window of this main
 * channel.  Migration thread.
 */
void postcopy_background_begin(MigrationState *s);

/*
 * How many neighbouring pages, one of them requested, should be sent together,
 * at least 1: see ALONG_US.  Any thread.
 */
unsigned postcopy_background_along(MigrationState *s);

/*
 * @pages target pages were sent.  Returns whether a slice is complete, so that
 * the section should end.  Migration thread.
 */
bool postcopy_background_sent(MigrationState *s, unsigned pages);

/* Bytes that complete the slice.  Migration thread. */
uint64_t postcopy_background_slice(MigrationState *s);

/*
 * After a section: send the runs of a fetch channel, and a PING if one is due.
 * Migration thread.
 */
void postcopy_background_ping(MigrationState *s);

/*
 * Whether max-postcopy-bandwidth does not allow the next slice yet: then a
 * section must have only requested pages, which the limit does not count.
 * Migration thread, before each section.
 */
bool postcopy_background_early(MigrationState *s);

/*
 * Between sections: sleep until the next slice may be sent, a page is
 * requested, or 100 ms have passed.  Returns whether a page was requested, as
 * migration_rate_limit() does.  Migration thread.
 */
bool postcopy_background_wait(MigrationState *s);

/*
 * The return path thread begins or ends.  Without it there are no answers, and
 * the background is not held back, so that a write finds the broken connection.
 * Return path thread.
 */
void postcopy_background_answers(MigrationState *s, bool answers);

/*
 * A PONG was received.  Returns false if postcopy_background_ping() does not
 * send its value.  Return path thread.
 */
bool postcopy_background_ponged(MigrationState *s, uint32_t value);

/* For query-migrate.  Any thread. */
void postcopy_background_fill_info(MigrationState *s, MigrationInfo *info);

#endif
