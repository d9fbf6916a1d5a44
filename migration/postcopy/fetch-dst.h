/*
 * Postcopy: fetch channels, on the destination: what its files share
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_DST_H
#define MIGRATION_POSTCOPY_FETCH_DST_H

#include "migration/qemu-file.h"
#include "fetch-wire.h"
#include "fetch.h"

typedef struct PostcopyFetchChannel {
    MigrationIncomingState *mis;
    unsigned id;
    /* Protects what is below, and each request until it is in out */
    QemuMutex lock;
    /*
     * The thread has been started: requests may be sent.  The thread that
     * starts and stops it reads this without the lock.
     */
    bool active;
    QemuThread thread;
    /* Of the thread while active */
    QEMUFile *in;
    QEMUFile *out;
    /* Block of the last frame in out */
    RAMBlock *last;
} PostcopyFetchChannel;

struct PostcopyFetch {
    /*
     * How many both sides have agreed on, 0 before they have.  Atomic, written
     * with the BQL by the thread that loads the main channel, before LISTEN and
     * when the migration is over.
     */
    unsigned agreed;
    /* Of the channels of this migration; written before agreed */
    uint8_t token[POSTCOPY_TOKEN_SIZE];
    /*
     * Bits of those in use, or that were before postcopy has paused or ended.
     * Atomic, written by the thread that loads the main channel.
     */
    unsigned used;
    PostcopyFetchChannel channels[POSTCOPY_FETCH_CHANNELS_MAX];
    PostcopyFetchCounts counts[POSTCOPY_FETCH_CHANNELS_MAX];
    /*
     * Bits of those that may have requests in their buffers.  Atomic: set with
     * the channel's lock, behind the request, and taken before that lock.
     */
    unsigned unflushed;
    /*
     * Protects what is below, and, after the channel's own lock, that a
     * channel's in is there.  Held for no more than a shutdown().
     */
    QemuMutex lock;
    /* The source has said which ones it uses: none is accepted any more */
    bool settled;
    /* Counts postcopy_fetch_stop(): a hello from before is refused */
    unsigned generation;
    /* Channels of which the source has told the end */
    unsigned ended;
    QemuCond changed;
};

/* Of fetch-receive.c */

/*
 * In the channel's thread: receive until the connection ends.  Returns whether
 * that is as it should be.
 */
bool postcopy_fetch_receive_all(PostcopyFetchChannel *ch);

#endif
