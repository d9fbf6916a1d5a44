/*
 * Features on which both ends of a migration agree by the first PING
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PEER_H
#define MIGRATION_POSTCOPY_PEER_H

#include "migration/migration.h"

/* Bits in the value of a PING, and of the PONG that answers it */
#define PEER_GUEST_TIME     (1u << 15)
#define PEER_FETCH_STRICT   (1u << 8)
#define PEER_FETCH_CHANNELS 0x1fu

/*
 * A PeerFeature is constant and never freed.  Each function returns or takes
 * only bits of @mask.
 */
typedef struct PeerFeature {
    uint32_t mask;
    /* Source, migration thread: the question to the destination */
    uint32_t (*ask)(MigrationState *s);
    /* Destination, with the BQL: the answer to @asked */
    uint32_t (*answer)(MigrationIncomingState *mis, uint32_t asked);
    /*
     * Source, return path thread: the destination has sent @answer, 0 if it
     * does not know the feature.  Returns false and sets @errp if the migration
     * must not continue.
     */
    bool (*answered)(MigrationState *s, uint32_t answer, Error **errp);
} PeerFeature;

/*
 * Called before the first migration begins, with the BQL; again for another
 * MigrationState, as QMP's device-list-properties makes one
 */
void peer_register(const PeerFeature *feature);

/* Source, migration thread: the value of the first PING */
uint32_t peer_ping(MigrationState *s);

/* Destination: the value of the PONG that answers @ping.  BQL until LISTEN. */
uint32_t peer_pong(MigrationIncomingState *mis, uint32_t ping);

/*
 * Source, return path thread: @pong was received.  Returns false and sets @errp
 * if the migration must not continue.
 */
bool peer_ponged(MigrationState *s, uint32_t pong, Error **errp);

#endif
