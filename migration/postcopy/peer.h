/*
 * What both ends of a migration agree on by the first PING
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PEER_H
#define MIGRATION_POSTCOPY_PEER_H

#include "migration/migration.h"

/* Bits of a PING's value, and of the PONG's that answers it */
#define PEER_GUEST_TIME     (1u << 15)
#define PEER_FETCH_STRICT   (1u << 8)
#define PEER_FETCH_CHANNELS 0x1fu

/*
 * A PeerFeature is constant and lives for ever.  Each function returns or takes
 * bits of @mask alone.
 */
typedef struct PeerFeature {
    uint32_t mask;
    /* Source, migration thread: what to ask the destination */
    uint32_t (*ask)(MigrationState *s);
    /* Destination, with the BQL: what to answer */
    uint32_t (*answer)(MigrationIncomingState *mis, uint32_t asked);
    /*
     * Source, thread of the return path: what the destination has answered, 0
     * if it knows none of this.  If the migration must not go on, sets @errp
     * and returns false.
     */
    bool (*answered)(MigrationState *s, uint32_t answer, Error **errp);
} PeerFeature;

/* Before the first migration begins; with the BQL */
void peer_register(const PeerFeature *feature);

/* Source, migration thread: the value of the first PING */
uint32_t peer_ping(MigrationState *s);

/* Destination: the value of the PONG that answers @ping.  BQL until LISTEN. */
uint32_t peer_pong(MigrationIncomingState *mis, uint32_t ping);

/*
 * Source, thread of the return path: the PONG @pong has come.  Returns false
 * and sets @errp if the migration must not go on.
 */
bool peer_ponged(MigrationState *s, uint32_t pong, Error **errp);

#endif
