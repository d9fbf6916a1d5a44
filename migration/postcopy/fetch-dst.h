/*
 * Postcopy: fetch channels, on the destination: declarations for its files
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
    /* Protects @active to @last, and each request until it is in @out */
    QemuMutex lock;
    /*
     * @thread was started: requests may be sent.  The thread that starts and
     * stops @thread reads this without @lock.
     */
    bool active;
    QemuThread thread;
    /* Only @thread uses @in while @active */
    QEMUFile *in;
    QEMUFile *out;
    /* Block of the last frame in @out */
    RAMBlock *last;
} PostcopyFetchChannel;

struct PostcopyFetch {
    /*
     * Number of channels on which both sides have agreed, 0 before that.
     * Atomic, written with the BQL by the thread that loads the main channel,
     * before LISTEN and when the migration is over.
     */
    unsigned agreed;
    /* Token of this migration's channels; written before @agreed */
    uint8_t token[POSTCOPY_TOKEN_SIZE];
    /*
     * Bits of channels in use, also after postcopy has paused or ended.
     * Atomic, written by the thread that loads the main channel.
     */
    unsigned used;
    PostcopyFetchChannel channels[POSTCOPY_FETCH_CHANNELS_MAX];
    PostcopyFetchCounts counts[POSTCOPY_FETCH_CHANNELS_MAX];
    /*
     * Bits of channels that may have requests in their buffers.  Atomic: set
     * with the channel's lock, after the request, and taken before that lock.
     */
    unsigned unflushed;
    /*
     * Protects @settled to @n_ended, and whether a channel has @in; taken after
     * the channel's own lock.  Held at most for a shutdown().
     */
    QemuMutex lock;
    /* The source has reported which channels it uses: no more are accepted */
    bool settled;
    /* Counts postcopy_fetch_stop(): an earlier hello is refused */
    unsigned generation;
    /* Number of channels that the source has ended */
    unsigned n_ended;
    QemuCond changed;
};

/* fetch-receive.c */

/*
 * Called by the channel's thread: receive until the connection ends.  Returns
 * whether it has ended as it should.
 */
bool postcopy_fetch_receive_all(PostcopyFetchChannel *ch);

#endif
