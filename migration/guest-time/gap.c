/*
 * Guest time across a migration: the length of a blackout, and its ticks
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/host-utils.h"
#include "qemu/timer.h"
#include "migration/guest-time.h"

/* NTP steers the rate of a host's clock by at most 500 ppm; there are two */
#define RATES_DIFFER    1000

GuestTimeLimits guest_time_limits(uint64_t asked_ns, uint64_t answered_ns,
                                  int64_t least_waited_ns,
                                  int64_t most_waited_ns)
{
    return (GuestTimeLimits) {
        .least = least_waited_ns - least_waited_ns / RATES_DIFFER - asked_ns,
        .most = most_waited_ns + most_waited_ns / RATES_DIFFER - answered_ns,
    };
}

/* By how much two hosts that report to be synchronized may differ, in ns */
static uint64_t guest_time_may_differ(const GuestTimeOfDay *then,
                                      const GuestTimeOfDay *now)
{
    if (!then->synchronized || !now->synchronized) {
        return UINT64_MAX;
    }
    return ((uint64_t)then->max_error_us + now->max_error_us) * SCALE_US;
}

/*
 * By how much two hosts with working NTP may differ: their kernels' error grows
 * by 500 us a second between polls, which are 1024 s apart at most by default.
 * A shorter blackout is counted nevertheless.
 */
#define NTP_ERROR_NS    (1200LL * SCALE_MS)

/* Why a gap that may be counted should not be, or NULL */
static const char *guest_time_doubt(const GuestTimeOfDay *then,
                                    const GuestTimeOfDay *now,
                                    const GuestTimeLimits *limits,
                                    const GuestTimeGap *gap)
{
    int64_t differ = MIN(guest_time_may_differ(then, now), INT64_MAX / 2);

    if (!then->synchronized) {
        return "is not certain: the source's clock is not synchronized";
    }
    if (!now->synchronized) {
        return "is not certain: this host's clock is not synchronized";
    }
    if (then->tai_offset && now->tai_offset &&
        then->tai_offset != now->tai_offset && !now->leap) {
        return "is not certain: the hosts do not agree on TAI - UTC";
    }
    if (limits && (gap->ns < limits->least - differ ||
                   gap->ns > limits->most + differ)) {
        return "does not agree with how long both ends have waited";
    }
    if (gap->error_ns > gap->ns && gap->error_ns > NTP_ERROR_NS) {
        return "is shorter than the hosts' clocks may be wrong";
    }
    return NULL;
}

const char *guest_time_gap(const GuestTimeOfDay *then,
                           const GuestTimeOfDay *now,
                           const GuestTimeLimits *limits, uint64_t max_ms,
                           bool check, GuestTimeGap *gap)
{
    uint64_t ns = now->realtime - then->realtime;

    if (now->leap && then->tai_offset && now->tai_offset) {
        ns += ((int64_t)now->tai_offset - then->tai_offset) *
              NANOSECONDS_PER_SECOND;
    }
    gap->ns = ns;
    gap->error_ns = guest_time_may_differ(then, now);
    if (limits && gap->ns >= limits->least && gap->ns <= limits->most) {
        gap->error_ns = MIN(gap->error_ns, MAX(limits->most - gap->ns,
                                               gap->ns - limits->least));
    }
    if (gap->ns < 0) {
        return "is negative";
    }
    if (gap->ns / SCALE_MS > max_ms) {
        return "is longer than guest-time-max-gap";
    }
    return check ? guest_time_doubt(then, now, limits, gap) : NULL;
}

uint64_t guest_time_ticks(int64_t ns, uint64_t hz)
{
    uint64_t low, high, rest;

    mulu64(&low, &high, ns < 0 ? -(uint64_t)ns : ns, hz);
    rest = divu128(&low, &high, NANOSECONDS_PER_SECOND);
    low += rest >= NANOSECONDS_PER_SECOND / 2;
    return ns < 0 ? -low : low;
}
