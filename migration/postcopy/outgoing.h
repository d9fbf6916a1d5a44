/*
 * Postcopy: the state of the source
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_OUTGOING_H
#define MIGRATION_POSTCOPY_OUTGOING_H

#include "io/channel.h"
#include "background.h"
#include "fetch.h"
#include "first.h"

/*
 * MigrationState.postcopy.  The migration thread changes channels and ioc, with
 * MigrationState.qemu_file_lock, and others look with it.
 */
struct PostcopyOutgoing {
    /* PostcopyFetchSource: those that are open; or NULL */
    GPtrArray *channels;
    /* One that is being opened, or NULL */
    QIOChannel *ioc;
    /* It has been connected, or will not be */
    QemuSemaphore connected;
    /* Requests are answered: post-copy has begun, or all is to end */
    QemuEvent active;
    /*
     * POSTCOPY_FETCH_CHANNELS_MAX; NULL before the first was opened.  The
     * pointer is written with MigrationState.qemu_file_lock.
     */
    PostcopyFetchCounts *counts;
    /* The destination has answered a PING; atomic */
    bool answered;
    PostcopyBackground background;
    PostcopyFirst first;
};

#endif
