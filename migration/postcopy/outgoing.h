/*
 * Postcopy: the state of the source
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_OUTGOING_H
#define MIGRATION_POSTCOPY_OUTGOING_H

#include "io/channel.h"
#include "background.h"
#include "fetch-wire.h"
#include "fetch.h"
#include "first.h"

/* Pages of the background, side by side, that a channel is about to send */
typedef struct PostcopyRun {
    RAMBlock *rb;
    ram_addr_t start;
    ram_addr_t length;
    bool zero;
} PostcopyRun;

/* MigrationState.postcopy */
struct PostcopyOutgoing {
    /*
     * PostcopyFetchSource: those that are open or being opened; or NULL.  The
     * migration thread changes it, with MigrationState.qemu_file_lock, and
     * others look with it.
     */
    GPtrArray *channels;
    /* Posted when a channel is up, or will not be, or all are broken */
    QemuSemaphore connected;
    /* Requests are answered: post-copy has begun, or all is to end */
    QemuEvent active;
    /*
     * POSTCOPY_FETCH_CHANNELS_MAX; NULL before the first was opened.  The
     * pointer is written with MigrationState.qemu_file_lock.
     */
    PostcopyFetchCounts *counts;
    /*
     * How many channels both sides have agreed on, 0 before they have: atomic,
     * written by the thread of the return path behind the two below, which stay
     * then.
     */
    unsigned agreed;
    PostcopyFetchOffer offer;
    /* Fewer than agreed must not be used: one side has set a number */
    bool strict;
    /* Bits of those in use: atomic, written by the migration thread */
    unsigned used;
    /*
     * Of the migration thread: from the last channel on, which one takes the
     * background's next run; the last run, which is not in that one's buffer
     * yet, or rb is NULL and no run waits for the end of the slice; and
     * qemu_file_transferred() behind the last run, if one does
     */
    unsigned turn;
    PostcopyRun run;
    uint64_t transferred;
    PostcopyBackground background;
    PostcopyFirst first;
};

#endif
