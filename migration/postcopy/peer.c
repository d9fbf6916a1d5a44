/*
 * Features on which both ends of a migration agree by the first PING
 *
 * The first PING asks.  A destination that knows the question answers with
 * another value; any other QEMU answers with the same value.  So the stream
 * does not change for QEMUs that do not know it, and needs no configuration.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/notify.h"
#include "qemu/thread.h"
#include "migration/postcopy-ram.h"
#include "peer.h"
#include "trace.h"

/* The value of QEMU 10.0, "to make stuff easier to debug" */
#define PING_OLD    1
/* "QF" in the upper half; the lower half has bits of features */
#define PING_ASK    0x51460000
/* ... and this bit in the answer */
#define PONG_ANSWER (1u << 14)

/* Only peer_register() writes it */
static const PeerFeature *features[2];

void peer_register(const PeerFeature *feature)
{
    for (unsigned i = 0; i < ARRAY_SIZE(features); i++) {
        if (!features[i] || features[i] == feature) {
            features[i] = feature;
            return;
        }
    }
    g_assert_not_reached();
}

uint32_t peer_ping(MigrationState *s)
{
    uint32_t ask = 0;

    for (unsigned i = 0; i < ARRAY_SIZE(features) && features[i]; i++) {
        ask |= features[i]->ask(s);
    }
    return ask ? PING_ASK | ask : PING_OLD;
}

uint32_t peer_pong(MigrationIncomingState *mis, uint32_t ping)
{
    uint32_t answer = 0;

    /* From LISTEN on, another thread reads the stream: too late to ask */
    if ((ping & 0xffff0000) != PING_ASK || (ping & PONG_ANSWER) ||
        postcopy_state_get() >= POSTCOPY_INCOMING_LISTENING) {
        return ping;
    }
    for (unsigned i = 0; i < ARRAY_SIZE(features) && features[i]; i++) {
        answer |= features[i]->answer(mis, ping & features[i]->mask);
    }
    trace_peer_pong(ping, answer);
    return PING_ASK | PONG_ANSWER | answer;
}

bool peer_ponged(MigrationState *s, uint32_t pong, Error **errp)
{
    uint32_t answer = pong & PONG_ANSWER ? pong : 0;

    /* An old destination echoes the question, or PING_OLD */
    if ((pong & 0xffff0000) != PING_ASK && pong != PING_OLD) {
        return true;
    }
    for (unsigned i = 0; i < ARRAY_SIZE(features) && features[i]; i++) {
        if (!features[i]->answered(s, answer & features[i]->mask, errp)) {
            return false;
        }
    }
    return true;
}
