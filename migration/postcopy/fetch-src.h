/*
 * Postcopy: fetch channels, on the source: what its files share
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
    /* The main thread has it, or will: there is no thread */
    FETCH_CONNECTS,
    /* Its thread says hello */
    FETCH_GREETS,
    /* The destination has answered */
    FETCH_UP,
    /* It will not; out tells whether there is a thread */
    FETCH_DOWN,
} FetchState;

typedef struct PostcopyFetchSource {
    MigrationState *s;
    unsigned id;
    /*
     * Atomic.  Written by the main thread, with MigrationState.qemu_file_lock,
     * up to GREETS, and then by the channel's
     */
    FetchState state;
    /*
     * The main thread, which connects it, frees it, too: written with
     * MigrationState.qemu_file_lock while it is FETCH_CONNECTS
     */
    bool abandoned;
    /* Why it is FETCH_DOWN; MigrationState.qemu_file_lock */
    Error *err;
    /* Of its thread */
    QEMUFile *in;
    QemuThread thread;
    /*
     * Protects out, last and unsent.  A thread holds it from when it takes a
     * page out of the dirty bitmap until the page is put in out: so the end
     * frame, put there when the bitmap is empty, is behind all pages.  The
     * migration thread, which puts the end, takes it only to put a run.
     */
    QemuMutex lock;
    QEMUFile *out;
    /* Block of the last frame in out */
    RAMBlock *last;
    /* Bytes of pages in out's buffer */
    size_t unsent;
    /* Atomic: that its connection ends is no error any more */
    bool ended;
    /* Atomic: the link may have what was sent since it was found empty */
    bool sent;
    /* Atomic: there was a request since the background's turn came here last */
    bool requested;
} PostcopyFetchSource;

/* Of fetch-send.c */

/*
 * In the channel's thread: answer the request @frame.  What was sent, or is on
 * its way by another channel, is left out.  @more: the next request is there
 * already, and its answer may go with this one; else the pages around go along
 * for which the link has the time.  Returns the error of @ch->out, or 0.
 */
int postcopy_fetch_serve(PostcopyFetchSource *ch, const PostcopyFrame *frame,
                         bool more);

#endif
