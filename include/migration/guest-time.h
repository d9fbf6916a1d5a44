/*
 * Guest time across a migration: the instant, and what of the blackout counts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_GUEST_TIME_H
#define MIGRATION_GUEST_TIME_H

#include "qapi/qapi-types-run-state.h"

/* A host's time of day */
typedef struct GuestTimeOfDay {
    uint64_t realtime;      /* CLOCK_REALTIME in ns */
    int32_t tai_offset;     /* TAI - UTC in seconds; 0: not known */
} GuestTimeOfDay;

/*
 * The state of the instant at which the guest was stopped.  Each architecture
 * embeds it in a struct with the instant itself.  Used with the BQL only.
 */
typedef struct GuestTimeState {
    bool valid;     /* taken here or loaded, and the guest has not run since */
    bool incoming;  /* a stream is loading, or was and the guest has not run */
} GuestTimeState;

/* take() takes the instant, restore() sets the guest's clocks by it */
typedef struct GuestTimeOps {
    bool (*take)(GuestTimeState *s, Error **errp);
    /* Traces why take() failed */
    void (*no_instant)(const char *why);
    bool (*restore)(GuestTimeState *s, Error **errp);
    /* There is none, or restore() failed.  Returns what the clocks do now. */
    const char *(*fall_back)(GuestTimeState *s);
} GuestTimeOps;

/*
 * The VM has stopped, and its state is now @state.  For a live migration, takes
 * the instant if that is @enabled.  Returns whether there is one.
 */
bool guest_time_state_stop(GuestTimeState *s, const GuestTimeOps *ops,
                           bool enabled, RunState state);

/*
 * The VM is about to run.  Restores the instant, if there is one, and forgets
 * it.  Warns if that fails, or if one is missing.  Returns whether it is done.
 */
bool guest_time_state_start(GuestTimeState *s, const GuestTimeOps *ops);

/* An instant was loaded */
void guest_time_state_post_load(GuestTimeState *s);

/* Another state is about to be loaded, or the guest begins anew */
void guest_time_state_forget(GuestTimeState *s);

/* TAI - UTC of this host in seconds; 0: not known */
int32_t guest_time_tai_offset(void);

/**
 * guest_time_gap: nanoseconds from @then to @now
 *
 * Uses TAI, which knows of leap seconds, if both hosts know it.  Returns NULL,
 * or why @gap_ns cannot be counted: it is negative, or longer than @max_ms.
 * No Error: unit tests compile this function without QEMU.
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
