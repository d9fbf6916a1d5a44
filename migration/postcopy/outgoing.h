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

/* Neighbouring pages of the background that a channel is about to send */
typedef struct PostcopyRun {
    RAMBlock *rb;
    ram_addr_t start;
    ram_addr_t length;
    bool zero;
} PostcopyRun;

/* MigrationState.postcopy */
struct PostcopyOutgoing {
    /*
     * PostcopyFetchSource of channels that are open or being opened; or NULL.
     * The migration thread changes it with MigrationState.qemu_file_lock; other
     * threads read it with this lock.
     */
    GPtrArray *channels;
    /* Posted when a channel is up, or will not be, or all are broken */
    QemuSemaphore connected;
    /* Set when requests are answered: postcopy has begun, or channels break */
    QemuEvent active;
    /* Cleared with MigrationState.qemu_file_lock, before channels are opened */
    PostcopyFetchCounts counts[POSTCOPY_FETCH_CHANNELS_MAX];
    /*
     * Number of channels on which both sides have agreed, 0 before that:
     * atomic, written by the return path thread after @offer and @strict, which
     * do not change then.
     */
    unsigned agreed;
    PostcopyFetchOffer offer;
    /* No fewer than @agreed channels may be used: one side has set a number */
    bool strict;
    /* Bits of the channels in use: atomic, written by the migration thread */
    unsigned used;
    /*
     * Of the migration thread.  @turn: the channel of the background's next
     * run, counted from the last one.  @run: the last run, held until the end
     * of the slice; rb is NULL if none is.  @transferred:
     * qemu_file_transferred() behind @run, if one is held.
     */
    unsigned turn;
    PostcopyRun run;
    uint64_t transferred;
    PostcopyBackground background;
    PostcopyFirst first;
};

#endif
