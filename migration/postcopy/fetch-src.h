/*
 * Postcopy: fetch channels, on the source: declarations for its files
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_SRC_H
#define MIGRATION_POSTCOPY_FETCH_SRC_H

#include "qemu/thread.h"
#include "migration/qemu-file.h"
#include "fetch-wire.h"
#include "outgoing.h"

typedef enum FetchState {
    /* The main thread connects the channel, or will: it has no thread */
    FETCH_CONNECTS,
    /* The channel's thread greets the destination */
    FETCH_GREETS,
    /* The destination has answered */
    FETCH_UP,
    /* It failed; @out is not NULL if it has a thread */
    FETCH_DOWN,
} FetchState;

typedef struct PostcopyFetchSource {
    MigrationState *s;
    unsigned id;
    /*
     * Atomic.  Written by the main thread, with MigrationState.qemu_file_lock,
     * up to GREETS, and then by the channel's thread
     */
    FetchState state;
    /*
     * The main thread, which connects it, also frees it: written with
     * MigrationState.qemu_file_lock while @state is FETCH_CONNECTS
     */
    bool abandoned;
    /* Why @state is FETCH_DOWN; MigrationState.qemu_file_lock */
    Error *err;
    /* Only @thread uses @in */
    QEMUFile *in;
    QemuThread thread;
    /*
     * Protects @out, @last and @unsent.  A thread holds it from taking a page
     * out of the dirty bitmap until the page is in @out: so the end frame, put
     * when the bitmap is empty, is behind all pages.  The migration thread,
     * which puts the end frame, takes it only to put a run.
     */
    QemuMutex lock;
    QEMUFile *out;
    /* Block of the last frame in out */
    RAMBlock *last;
    /* Bytes of pages in @out's buffer */
    size_t unsent;
    /* Atomic: the connection may end without an error */
    bool may_close;
    /* Atomic: bytes were sent since the link was found empty */
    bool sent;
    /* Atomic: a request came since the background last used this channel */
    bool requested;
} PostcopyFetchSource;

/* fetch-send.c */

/*
 * Called by the channel's thread: answer the request @frame.  Leaves out pages
 * that were sent, or that another channel sends.  @queued: the next request was
 * received, and its answer may go with this one; if not, neighbours are sent
 * along as far as the link has the time.  Returns the error of @ch->out, or 0.
 */
int postcopy_fetch_serve(PostcopyFetchSource *ch, const PostcopyFrame *frame,
                         bool queued);

#endif
