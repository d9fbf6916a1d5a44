/*
 * Guest time across a migration: the state of the instant, and the policy
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#ifdef CONFIG_LINUX
#include <sys/timex.h>
#endif
#include "qapi/clone-visitor.h"
#include "qapi/error.h"
#include "qapi/qapi-events-guest-time.h"
#include "qapi/qapi-types-migration.h"
#include "qapi/qapi-visit-guest-time.h"
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "system/runstate.h"
#include "migration/client-options.h"
#include "migration/global_state.h"
#include "migration/guest-time.h"
#include "migration/migration.h"
#include "migration/vmstate.h"
#include "peer.h"
#include "trace.h"

/* Longer than any migration, in ns; sums of it do not overflow */
#define LONG_NS     (INT64_MAX / 8)

/* Readings of the time of day, of which the quickest counts */
#define READINGS    20

static struct GuestTimeMigration *guest_time_current(void)
{
    return migrate_get_current()->guest_time;
}

/* Each instant begins a new report for query-migrate, BQL */
static GuestTimeInfo *guest_time_info_begin(bool instant, const char *reason)
{
    struct GuestTimeMigration *m = guest_time_current();

    qapi_free_GuestTimeInfo(m->info);
    m->info = g_new0(GuestTimeInfo, 1);
    m->info->instant = instant;
    m->info->reason = g_strdup(reason);
    return m->info;
}

static void guest_time_info_reason(GuestTimeInfo *info, const char *reason)
{
    g_free(info->reason);
    info->reason = g_strdup(reason);
}

static GuestTimeHost *guest_time_info_host(const GuestTimeOfDay *t)
{
    GuestTimeHost *host = g_new0(GuestTimeHost, 1);

    host->synchronized = t->synchronized;
    host->has_max_error = t->synchronized;
    host->max_error = t->max_error_us;
    host->has_tai_offset = t->tai_offset != 0;
    host->tai_offset = t->tai_offset;
    return host;
}

static bool guest_time_from_file(const GuestTimeState *s)
{
    return s->incoming && migration_incoming_get_current()->from_file;
}

GuestTimePolicy guest_time_policy(const GuestTimeState *s)
{
    return guest_time_from_file(s) ? migrate_guest_time_restore()
                                   : migrate_guest_time();
}

/* The guest is about to run: the report is complete */
static void guest_time_info_end(const GuestTimeState *s, GuestTimeInfo *info)
{
    info->has_policy = true;
    info->policy = guest_time_policy(s);
    qapi_event_send_migration_guest_time(info);
}

void guest_time_fill_info(MigrationInfo *info)
{
    info->guest_time = QAPI_CLONE(GuestTimeInfo, guest_time_current()->info);
}

uint64_t guest_time_read_with(uint64_t (*count)(void), uint64_t *at)
{
    uint64_t least = UINT64_MAX, realtime = 0;

    for (int i = 0; i < READINGS; i++) {
        uint64_t before = count(), took;
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        took = count() - before;
        if (took < least) {
            least = took;
            *at = before + took / 2;
            realtime = now.tv_sec * NANOSECONDS_PER_SECOND + now.tv_nsec;
        }
    }
    return realtime;
}

static uint64_t guest_time_monotonic(void)
{
    return get_clock();
}

/*
 * This host's CLOCK_REALTIME minus its CLOCK_MONOTONIC, in ns.  It changes when
 * the time of day is set, and while the host is suspended.
 */
static int64_t guest_time_base(void)
{
    uint64_t monotonic = 0, realtime;

    realtime = guest_time_read_with(guest_time_monotonic, &monotonic);
    return realtime - monotonic;
}

bool guest_time_state_stop(GuestTimeState *s, const GuestTimeOps *ops,
                           RunState state)
{
    const char *untold;
    GuestTimeInfo *info;
    Error *err = NULL;

    guest_time_state_forget(s);
    /* Snapshots and paused VMs restore time as before */
    if (!guest_time_may_take() || state != RUN_STATE_FINISH_MIGRATE) {
        return false;
    }
    s->base = guest_time_base();
    s->before = get_clock();
    s->valid = ops->take(s, &err);
    s->after = get_clock();
    s->here = true;
    if (!s->valid) {
        guest_time_info_begin(false, error_get_pretty(err));
        error_free(err);
        return false;
    }
    if (migrate_mode() == MIG_MODE_CPR_TRANSFER) {
        s->asked_ns = s->base;
    } else {
        guest_time_since_asked(s->before, s->after, &s->asked_ns,
                               &s->answered_ns);
    }
    untold = guest_time_untold();
    s->told = !untold;
    info = guest_time_info_begin(s->told, untold);
    info->source = guest_time_info_host(&s->then);
    trace_guest_time_stop(s->after - s->before, s->told, untold ?: "");
    return s->told;
}

bool guest_time_state_start(GuestTimeState *s, const GuestTimeOps *ops)
{
    struct GuestTimeMigration *m = guest_time_current();
    bool done = false, warn = true;
    Error *err = NULL;

    s->begun = get_clock();
    if (s->valid && !m->info) {
        /* Another migration has begun since it was loaded, and has failed */
        guest_time_info_begin(true, NULL)->source =
            guest_time_info_host(&s->then);
    }
    /* From here on, and for restore(), there is a report if @valid or @err */
    if (s->valid) {
        done = ops->restore(s, &err);
    } else if (s->incoming && guest_time_may_take() &&
               runstate_is_live(global_state_get_runstate())) {
        error_setg(&err, "the source has not reported when it stopped the "
                   "guest");
        guest_time_info_begin(false, NULL);
        warn = guest_time_policy(s) != GUEST_TIME_POLICY_STOPPED;
    }
    if (err) {
        g_autofree char *what = g_strdup_printf("%s: %s", error_get_pretty(err),
                                                ops->fall_back(s));

        if (warn) {
            warn_report("guest-time: %s", what);
        }
        trace_guest_time_fall_back(what);
        m->info->instant = false;
        m->info->counted = 0;
        m->info->has_clock_error = false;
        guest_time_info_reason(m->info, what);
    } else if (done) {
        m->info->instant = true;
    }
    if (m->info && (s->valid || s->incoming)) {
        guest_time_info_end(s, m->info);
    }
    trace_guest_time_start(get_clock() - s->begun, done);
    m->last_ops = ops;
    m->last_moved = done || err;
    error_free(err);
    guest_time_state_forget(s);
    return done;
}

bool guest_time_now(GuestTimeNow *now)
{
    struct GuestTimeMigration *m = guest_time_current();

    *now = (GuestTimeNow) { .moved = m->last_moved };
    return m->last_ops && m->last_ops->now && m->last_ops->now(now);
}

void guest_time_state_drop(GuestTimeState *s, const char *why)
{
    GuestTimeInfo *info = guest_time_current()->info;

    if (s->valid && info) {
        info->instant = false;
        guest_time_info_reason(info, why);
        guest_time_info_end(s, info);
    }
    guest_time_state_forget(s);
}

bool guest_time_state_needed(const GuestTimeState *s)
{
    /* savevm has no thread: a snapshot contains no instant */
    if (!s->valid || !migrate_get_current()->migration_thread_running) {
        return false;
    }
    /*
     * This destination may not know an instant that was loaded.  cpr-transfer
     * needs an instant of this host, which a loaded one is not.
     */
    return s->incoming ? migrate_mode() == MIG_MODE_NORMAL &&
                         !guest_time_untold()
                       : s->told;
}

void guest_time_state_post_load(GuestTimeState *s)
{
    /* Not from a snapshot, whatever it contains */
    s->valid = s->told = s->incoming && guest_time_may_take();
    s->here = migrate_mode() == MIG_MODE_CPR_TRANSFER;
    s->base = s->asked_ns;
    if (s->valid) {
        guest_time_info_begin(true, NULL)->source =
            guest_time_info_host(&s->then);
    }
}

void guest_time_state_forget(GuestTimeState *s)
{
    *s = (GuestTimeState) {
        .incoming = runstate_check(RUN_STATE_INMIGRATE),
    };
}

GuestTimeOfDay guest_time_of_day(uint64_t realtime)
{
    GuestTimeOfDay time = { .realtime = realtime };
#ifdef CONFIG_LINUX
    struct timex t = { 0 };
    int state = adjtimex(&t);

    if (state >= 0) {
        time.tai_offset = t.tai;
        time.max_error_us = t.maxerror;
        time.synchronized = !(t.status & STA_UNSYNC);
        time.leap = state == TIME_OOP || state == TIME_WAIT;
        /* A tick is 10 ms, in units of us: one more is 100 ppm */
        time.rate = t.freq + (t.tick - 10000) * 100 * 65536LL;
    }
#endif
    return time;
}

/* Whether limits exist.  @now: CLOCK_MONOTONIC, read after the time of day */
static bool guest_time_find_limits(const GuestTimeState *s, int64_t now,
                                   GuestTimeLimits *limits)
{
    int64_t asked = guest_time_current()->asked_by_source;

    if (!s->incoming) {
        *limits = guest_time_limits(0, 0, s->begun - s->after, now - s->before);
        return true;
    }
    /* A peer's values are not trusted */
    if (!asked || !s->asked_ns || s->asked_ns > LONG_NS ||
        s->answered_ns > s->asked_ns) {
        return false;
    }
    *limits = guest_time_limits(s->asked_ns, s->answered_ns, s->begun - asked,
                                now - asked);
    return true;
}

int64_t guest_time_to_count(GuestTimeState *s, uint64_t realtime)
{
    GuestTimeInfo *info = guest_time_current()->info;
    GuestTimePolicy policy = guest_time_policy(s);
    GuestTimeOfDay now = guest_time_of_day(realtime), then = s->then;
    GuestTimeLimits limits;
    GuestTimeGap gap;
    bool limited = guest_time_find_limits(s, get_clock(), &limits);
    const char *why;

    info->destination = guest_time_info_host(&now);
    if (s->here) {
        /* A clock does not differ from itself, unless it was set */
        now.synchronized = then.synchronized = true;
        now.max_error_us = then.max_error_us = 0;
        if (s->base) {
            now.realtime -= guest_time_base() - s->base;
            now.tai_offset = then.tai_offset = 0;
        }
    }
    why = guest_time_gap(&then, &now, limited ? &limits : NULL,
                         guest_time_from_file(s) ? UINT64_MAX :
                         migrate_guest_time_max_gap(),
                         policy == GUEST_TIME_POLICY_CONTINUOUS, &gap);
    if (policy == GUEST_TIME_POLICY_STOPPED) {
        why = NULL;
    } else if (why) {
        warn_report("guest-time: the blackout of %" PRId64 " ms by the hosts' "
                    "time of day %s: it is not counted", gap.ns / SCALE_MS,
                    why);
    }
    trace_guest_time_gap(gap.ns, gap.error_ns, limited ? limits.least : 0,
                         limited ? limits.most : 0, why ?: "");
    info->has_gap = true;
    info->gap = gap.ns;
    info->has_error = gap.error_ns != UINT64_MAX;
    info->error = gap.error_ns;
    info->has_counted = true;
    info->counted = policy == GUEST_TIME_POLICY_STOPPED || why ? 0 : gap.ns;
    guest_time_info_reason(info, why);
    return info->counted;
}

void guest_time_is_off(int64_t error_ns)
{
    GuestTimeInfo *info = guest_time_current()->info;

    info->has_clock_error = true;
    info->clock_error = error_ns;
}

void guest_time_warn(const char *fmt, ...)
{
    g_autofree char *what = NULL;
    va_list ap;

    va_start(ap, fmt);
    what = g_strdup_vprintf(fmt, ap);
    va_end(ap);
    warn_report("guest-time: %s", what);
    guest_time_info_reason(guest_time_current()->info, what);
}

static int guest_time_pre_save(void *opaque)
{
    GuestTimeState *s = opaque;

    /* These are of this QEMU's source, not of the next destination's */
    if (s->incoming) {
        s->asked_ns = s->answered_ns = 0;
    }
    return 0;
}

const VMStateDescription vmstate_guest_time_state = {
    .name = "guest_time_state",
    .version_id = 1,
    .minimum_version_id = 1,
    .pre_save = guest_time_pre_save,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT64(then.realtime, GuestTimeState),
        VMSTATE_INT32(then.tai_offset, GuestTimeState),
        VMSTATE_UINT32(then.max_error_us, GuestTimeState),
        VMSTATE_BOOL(then.synchronized, GuestTimeState),
        VMSTATE_UINT64(asked_ns, GuestTimeState),
        VMSTATE_UINT64(answered_ns, GuestTimeState),
        VMSTATE_END_OF_LIST()
    }
};
