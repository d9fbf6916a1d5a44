/*
 * Guest time across a migration: the length of a blackout
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "migration/guest-time.h"

#define NS_PER_S    1000000000LL
#define NS_PER_MS   1000000

const char *guest_time_gap(GuestTimeOfDay then, GuestTimeOfDay now,
                           uint64_t max_ms, int64_t *gap_ns)
{
    *gap_ns = now.realtime - then.realtime;
    if (then.tai_offset && now.tai_offset) {
        *gap_ns += (now.tai_offset - then.tai_offset) * NS_PER_S;
    }
    if (*gap_ns < 0) {
        return "is negative";
    }
    if (*gap_ns / NS_PER_MS > max_ms) {
        return "is longer than guest-time-max-gap";
    }
    return NULL;
}
