/*
 * Guest time across a migration: the instant, and how the blackout counts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_GUEST_TIME_H
#define MIGRATION_GUEST_TIME_H

#include "qapi/qapi-types-guest-time.h"
#include "qapi/qapi-types-run-state.h"

/* A host's time of day, and the error that the host reports */
typedef struct GuestTimeOfDay {
    uint64_t realtime;      /* CLOCK_REALTIME in ns */
    int32_t tai_offset;     /* TAI - UTC in seconds; 0: not known */
    uint32_t max_error_us;
    bool synchronized;      /* by NTP or PTP; if not, max_error_us is void */
    /* Not in the stream: */
    bool leap;              /* a leap second was just inserted */
    int64_t rate;           /* less that of the host's counter; 2^-16 ppm */
} GuestTimeOfDay;

/* The guest's counter at a time of day */
typedef struct GuestTimeNow {
    uint64_t counter;       /* of all vCPUs */
    uint64_t hz;
    GuestTimeOfDay time;
    bool moved;             /* an instant has set it at the last start */
} GuestTimeNow;

/*
 * State of the instant at which the guest was stopped.  Each architecture
 * embeds it in a struct with the instant itself.  Used only with the BQL.
 */
typedef struct GuestTimeState {
    bool valid;     /* taken here or loaded, and the guest has not run since */
    bool incoming;  /* a stream loads or has loaded; guest has not run */
    bool told;      /* the stream contains, or contained it */
    bool here;      /* it was taken on this host */
    GuestTimeOfDay then;
    /*
     * How long before the instant the source asked the destination, and
     * received its answer: ns of the source's CLOCK_MONOTONIC; 0: it has not
     * asked.  cpr-transfer does not ask: @asked_ns is @base.
     */
    uint64_t asked_ns, answered_ns;
    /* If taken here: CLOCK_MONOTONIC before and after, in ns */
    int64_t before, after;
    int64_t base;   /* of this host at @then: see guest_time_base() */
    int64_t begun;  /* CLOCK_MONOTONIC at guest_time_state_start() */
} GuestTimeState;

extern const VMStateDescription vmstate_guest_time_state;

/* take() takes the instant, restore() sets the guest's clocks by it */
typedef struct GuestTimeOps {
    bool (*take)(GuestTimeState *s, Error **errp);
    bool (*restore)(GuestTimeState *s, Error **errp);
    /* No instant, or restore() failed.  Returns what the clocks do instead. */
    const char *(*fall_back)(GuestTimeState *s);
    /* Optional: sets all of @now but @moved; false if it is not known */
    bool (*now)(GuestTimeNow *now);
} GuestTimeOps;

/*
 * The VM has stopped, and its state is now @state.  For a live migration, takes
 * the instant.  Returns whether the stream will contain it; if not, only this
 * QEMU uses it, if the migration fails.
 */
bool guest_time_state_stop(GuestTimeState *s, const GuestTimeOps *ops,
                           RunState state);

/*
 * The VM is about to run.  Restores the instant, if there is one, and forgets
 * it.  Warns if that fails, or if an instant is missing that is needed.
 * Returns whether it was restored.
 */
bool guest_time_state_start(GuestTimeState *s, const GuestTimeOps *ops);

/* Whether the stream that is being written contains the instant */
bool guest_time_state_needed(const GuestTimeState *s);

/* An instant was loaded */
void guest_time_state_post_load(GuestTimeState *s);

/* For older names of the machine's property guest-time: on or off */
void guest_time_set_switch(bool on);

/*
 * The value of the guest's counter.  Called when the guest is about to run, by
 * handlers of a lower priority, or while all vCPUs are paused.  BQL.  Returns
 * false if it is not known.
 */
bool guest_time_now(GuestTimeNow *now);

/* The VM is about to run, and its clocks do not follow the instant: @why */
void guest_time_state_drop(GuestTimeState *s, const char *why);

/* Another state is about to be loaded, or the guest starts anew */
void guest_time_state_forget(GuestTimeState *s);

/*
 * Returns this host's CLOCK_REALTIME in ns, and in @at what @count, which
 * counts evenly, was at that time: the quickest of several readings
 */
uint64_t guest_time_read_with(uint64_t (*count)(void), uint64_t *at);

/* This host's time of day; @realtime is its CLOCK_REALTIME in ns */
GuestTimeOfDay guest_time_of_day(uint64_t realtime);

/* The shortest and the longest that a blackout can have been, in ns */
typedef struct GuestTimeLimits {
    int64_t least, most;
} GuestTimeLimits;

/* Length of a blackout, and its maximum error, both in ns */
typedef struct GuestTimeGap {
    int64_t ns;
    uint64_t error_ns;      /* UINT64_MAX: not known */
} GuestTimeGap;

/**
 * guest_time_limits: limits of a blackout, from how long both ends have waited
 *
 * The source asked @asked_ns before the guest stopped, and had the answer
 * @answered_ns before the stop.  The destination, which was asked in between,
 * lets the guest run @least_waited_ns to @most_waited_ns after the question.
 * Monotonic clocks run at equal rates, except for what adjtimex() allows.
 */
GuestTimeLimits guest_time_limits(uint64_t asked_ns, uint64_t answered_ns,
                                  int64_t least_waited_ns,
                                  int64_t most_waited_ns);

/**
 * guest_time_gap: nanoseconds from @then to @now
 *
 * Uses TAI if both hosts know it and a leap second was just inserted; at other
 * times TAI differs only if one host is wrong.  @limits is NULL if there are
 * none.  Returns NULL, or why @gap cannot be counted: it is negative or longer
 * than @max_ms or, if @check, the hosts' clocks are not known to be right.
 * No Error: unit tests compile this function without QEMU.
 */
const char *guest_time_gap(const GuestTimeOfDay *then,
                           const GuestTimeOfDay *now,
                           const GuestTimeLimits *limits, uint64_t max_ms,
                           bool check, GuestTimeGap *gap);

/*
 * restore() has set the guest's clocks, all together, @error_ns later than
 * intended, and does not try again.
 */
void guest_time_is_off(int64_t error_ns);

/*
 * restore() cannot set one of the guest's clocks: warns, and query-migrate
 * reports it as the reason.
 */
void guest_time_warn(const char *fmt, ...) G_GNUC_PRINTF(1, 2);

/* Ticks of a counter of @hz in @ns, which may be negative, rounded */
uint64_t guest_time_ticks(int64_t ns, uint64_t hz);

/*
 * For the guest that is about to run: parameter guest-time, or
 * guest-time-restore if @s was loaded from a file
 */
GuestTimePolicy guest_time_policy(const GuestTimeState *s);

/**
 * guest_time_to_count: nanoseconds of guest time that pass in a blackout
 *
 * Called by restore(); this host's time of day is @realtime, in ns.  Follows
 * the migration parameters; warns if it cannot.
 */
int64_t guest_time_to_count(GuestTimeState *s, uint64_t realtime);

#endif
