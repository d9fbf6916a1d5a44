/*
 * Guest time across a migration: the state of the instant, and the policy
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#ifdef CONFIG_LINUX
#include <sys/timex.h>
#endif
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qapi/qapi-types-migration.h"
#include "migration/client-options.h"
#include "migration/global_state.h"
#include "migration/guest-time.h"
#include "system/runstate.h"

bool guest_time_state_stop(GuestTimeState *s, const GuestTimeOps *ops,
                           bool enabled, RunState state)
{
    Error *err = NULL;

    guest_time_state_forget(s);
    /* Snapshots, paused VMs and CPR restore time as they always did */
    if (!enabled || state != RUN_STATE_FINISH_MIGRATE ||
        migrate_mode() != MIG_MODE_NORMAL) {
        return false;
    }
    s->valid = ops->take(s, &err);
    if (!s->valid) {
        ops->no_instant(error_get_pretty(err));
        error_free(err);
    }
    return s->valid;
}

bool guest_time_state_start(GuestTimeState *s, const GuestTimeOps *ops)
{
    bool done = false;
    Error *err = NULL;

    if (s->valid) {
        done = ops->restore(s, &err);
    } else if (s->incoming && runstate_is_live(global_state_get_runstate()) &&
               migrate_guest_time() != GUEST_TIME_POLICY_STOPPED) {
        error_setg(&err, "the source has not told when it stopped the guest");
    }
    if (err) {
        warn_report("guest-time: %s: %s", error_get_pretty(err),
                    ops->fall_back(s));
        error_free(err);
    }
    guest_time_state_forget(s);
    return done;
}

void guest_time_state_post_load(GuestTimeState *s)
{
    /* Not from a snapshot, whatever it holds */
    s->valid = s->incoming;
}

void guest_time_state_forget(GuestTimeState *s)
{
    *s = (GuestTimeState) {
        .incoming = runstate_check(RUN_STATE_INMIGRATE),
    };
}

int32_t guest_time_tai_offset(void)
{
#ifdef CONFIG_LINUX
    struct timex t = { 0 };

    return adjtimex(&t) < 0 ? 0 : t.tai;
#else
    return 0;
#endif
}

int64_t guest_time_to_count(GuestTimeOfDay then, GuestTimeOfDay now)
{
    const char *why;
    int64_t gap_ns;

    if (migrate_guest_time() == GUEST_TIME_POLICY_STOPPED) {
        return 0;
    }
    why = guest_time_gap(then, now, migrate_guest_time_max_gap(), &gap_ns);
    if (why) {
        warn_report("guest-time: the blackout of %" PRId64 " ms by the hosts' "
                    "time of day %s: it is not counted", gap_ns / 1000000, why);
        return 0;
    }
    return gap_ns;
}
