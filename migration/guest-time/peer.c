/*
 * Guest time: whether the destination knows of it
 *
 * The first PING asks.  A destination that knows of guest time answers with
 * another value; any other QEMU answers with the same.  So no stream changes
 * for QEMUs that do not know, and nobody has to configure anything.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/timer.h"
#include "hw/boards.h"
#include "migration/migration.h"
#include "migration/postcopy-ram.h"
#include "peer.h"
#include "trace.h"

/* What QEMU 10.0 sends, "to make stuff easier to debug" */
#define PING_OLD    1
#define PING_ASK    0x67746d3f      /* "gtm?" */
#define PONG_YES    0x67746d21      /* "gtm!" */

void guest_time_init(MigrationState *ms)
{
    ms->guest_time = g_new0(struct GuestTimeMigration, 1);
}

void guest_time_destroy(MigrationState *ms)
{
    qapi_free_GuestTimeInfo(ms->guest_time->info);
    g_free(ms->guest_time);
}

void guest_time_begin(MigrationState *ms)
{
    ms->guest_time->peer = GUEST_TIME_PEER_NOT_ASKED;
    g_clear_pointer(&ms->guest_time->info, qapi_free_GuestTimeInfo);
}

static OnOffAuto guest_time_switch(void)
{
    return current_machine->guest_time;
}

void guest_time_set_switch(bool on)
{
    current_machine->guest_time = on ? ON_OFF_AUTO_ON : ON_OFF_AUTO_OFF;
}

bool guest_time_may_take(void)
{
    return guest_time_switch() != ON_OFF_AUTO_OFF;
}

uint32_t guest_time_ping(MigrationState *ms)
{
    if (!guest_time_may_take()) {
        return PING_OLD;
    }
    ms->guest_time->asked = get_clock();
    /* The return path may have ended already: then nobody will answer */
    qatomic_cmpxchg(&ms->guest_time->peer, GUEST_TIME_PEER_NOT_ASKED,
                    GUEST_TIME_PEER_ASKED);
    return PING_ASK;
}

uint32_t guest_time_pong(uint32_t ping)
{
    /* From LISTEN on, another thread reads the stream: too late to ask */
    if (ping != PING_ASK || !guest_time_may_take() ||
        postcopy_state_get() >= POSTCOPY_INCOMING_LISTENING) {
        return ping;
    }
    migrate_get_current()->guest_time->asked_by_source = get_clock();
    trace_guest_time_pong();
    return PONG_YES;
}

static void guest_time_answer(MigrationState *ms, GuestTimePeer peer)
{
    /* From ASKED on, the return path's thread alone writes */
    if (qatomic_read(&ms->guest_time->peer) == GUEST_TIME_PEER_ASKED) {
        ms->guest_time->answered = get_clock();
        qatomic_store_release(&ms->guest_time->peer, peer);
        trace_guest_time_answer(peer == GUEST_TIME_PEER_KNOWS);
    }
}

void guest_time_ponged(MigrationState *ms, uint32_t pong)
{
    if (pong == PONG_YES) {
        guest_time_answer(ms, GUEST_TIME_PEER_KNOWS);
    } else if (pong == PING_ASK) {
        guest_time_answer(ms, GUEST_TIME_PEER_DOES_NOT);
    }
}

void guest_time_no_pong(MigrationState *ms)
{
    guest_time_answer(ms, GUEST_TIME_PEER_DOES_NOT);
    qatomic_cmpxchg(&ms->guest_time->peer, GUEST_TIME_PEER_NOT_ASKED,
                    GUEST_TIME_PEER_DOES_NOT);
}

bool guest_time_answered(MigrationState *ms)
{
    return qatomic_load_acquire(&ms->guest_time->peer) !=
           GUEST_TIME_PEER_ASKED;
}

const char *guest_time_untold(void)
{
    MigrationState *ms = migrate_get_current();

    if (guest_time_switch() != ON_OFF_AUTO_AUTO) {
        return guest_time_may_take() ? NULL : "guest-time is off";
    }
    switch (qatomic_load_acquire(&ms->guest_time->peer)) {
    case GUEST_TIME_PEER_KNOWS:
        return NULL;
    case GUEST_TIME_PEER_NOT_ASKED:
        return "without the return path, the destination cannot be asked "
               "whether it knows guest-time";
    default:
        return "the destination does not know guest-time";
    }
}

void guest_time_since_asked(int64_t before, int64_t after, uint64_t *asked_ns,
                            uint64_t *answered_ns)
{
    MigrationState *ms = migrate_get_current();

    if (qatomic_load_acquire(&ms->guest_time->peer) ==
        GUEST_TIME_PEER_KNOWS) {
        *asked_ns = after - ms->guest_time->asked;
        *answered_ns = before - ms->guest_time->answered;
    } else {
        *asked_ns = *answered_ns = 0;
    }
}
