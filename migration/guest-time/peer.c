/*
 * Guest time: whether the destination supports it, by the first PING
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/timer.h"
#include "hw/boards.h"
#include "migration/migration.h"
#include "migration/postcopy/peer.h"
#include "peer.h"
#include "trace.h"

void guest_time_set_switch(bool on)
{
    current_machine->guest_time = on ? ON_OFF_AUTO_ON : ON_OFF_AUTO_OFF;
}

bool guest_time_may_take(void)
{
    return current_machine->guest_time != ON_OFF_AUTO_OFF;
}

static uint32_t guest_time_ask(MigrationState *ms)
{
    if (!guest_time_may_take()) {
        return 0;
    }
    ms->guest_time->asked = get_clock();
    /* The return path may have ended already: then no answer is received */
    qatomic_cmpxchg(&ms->guest_time->peer, GUEST_TIME_PEER_NOT_ASKED,
                    GUEST_TIME_PEER_ASKED);
    return PEER_GUEST_TIME;
}

static uint32_t guest_time_answer(MigrationIncomingState *mis, uint32_t asked)
{
    if (!asked || !guest_time_may_take()) {
        return 0;
    }
    migrate_get_current()->guest_time->asked_by_source = get_clock();
    return PEER_GUEST_TIME;
}

static bool guest_time_answered_by(MigrationState *ms, uint32_t answer,
                                   Error **errp)
{
    /* From ASKED on, only the return path thread writes */
    if (qatomic_read(&ms->guest_time->peer) == GUEST_TIME_PEER_ASKED) {
        ms->guest_time->answered = get_clock();
        qatomic_store_release(&ms->guest_time->peer,
                              answer ? GUEST_TIME_PEER_KNOWS :
                                       GUEST_TIME_PEER_DOES_NOT);
        trace_guest_time_answer(answer);
    }
    return true;
}

static const PeerFeature guest_time_feature = {
    .mask = PEER_GUEST_TIME,
    .ask = guest_time_ask,
    .answer = guest_time_answer,
    .answered = guest_time_answered_by,
};

void guest_time_init(MigrationState *ms)
{
    ms->guest_time = g_new0(struct GuestTimeMigration, 1);
    peer_register(&guest_time_feature);
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

void guest_time_no_pong(MigrationState *ms)
{
    guest_time_answered_by(ms, 0, NULL);
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

    if (current_machine->guest_time != ON_OFF_AUTO_AUTO) {
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
