/*
 * Guest time across a migration: how much of the blackout counts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_GUEST_TIME_H
#define MIGRATION_GUEST_TIME_H

/* A host's time of day */
typedef struct GuestTimeOfDay {
    uint64_t realtime;      /* CLOCK_REALTIME in ns */
    int32_t tai_offset;     /* TAI - UTC in seconds; 0: not known */
} GuestTimeOfDay;

/* TAI - UTC of this host in seconds; 0: not known */
int32_t guest_time_tai_offset(void);

/**
 * guest_time_gap: nanoseconds from @then to @now
 *
 * By TAI, which knows of leap seconds, if both hosts know it.  Returns NULL, or
 * why @gap_ns cannot be counted: it is negative, or longer than @max_ms.
 */
const char *guest_time_gap(GuestTimeOfDay then, GuestTimeOfDay now,
                           uint64_t max_ms, int64_t *gap_ns);

/* Ticks of a counter of @hz in @ns, which may be negative, to the nearest */
uint64_t guest_time_ticks(int64_t ns, uint64_t hz);

/**
 * guest_time_to_count: nanoseconds of guest time that pass in a blackout
 *
 * To be called on the destination; @then is when the source stopped the guest.
 * Follows the migration parameters; warns if it cannot.
 */
int64_t guest_time_to_count(GuestTimeOfDay then, GuestTimeOfDay now);

#endif
