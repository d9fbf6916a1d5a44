/*
 * Guest time across a migration: the length of a blackout, and its ticks
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/host-utils.h"
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

uint64_t guest_time_ticks(int64_t ns, uint64_t hz)
{
    uint64_t low, high, rest;

    mulu64(&low, &high, ns < 0 ? -(uint64_t)ns : ns, hz);
    rest = divu128(&low, &high, NS_PER_S);
    low += rest >= NS_PER_S / 2;
    return ns < 0 ? -low : low;
}
