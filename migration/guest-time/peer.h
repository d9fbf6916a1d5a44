/*
 * Guest time: whether the destination knows of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_GUEST_TIME_PEER_H
#define MIGRATION_GUEST_TIME_PEER_H

#include "qapi/qapi-types-migration.h"
#include "migration/guest-time.h"

typedef enum GuestTimePeer {
    GUEST_TIME_PEER_NOT_ASKED,
    GUEST_TIME_PEER_ASKED,
    GUEST_TIME_PEER_KNOWS,
    GUEST_TIME_PEER_DOES_NOT,
} GuestTimePeer;

/* MigrationState.guest_time */
struct GuestTimeMigration {
    /* What query-migrate tells, or NULL; BQL */
    GuestTimeInfo *info;
    /*
     * Source: when the destination was asked whether it knows guest time, and
     * when it answered: CLOCK_MONOTONIC in ns.  The former is written before
     * the PING is sent, the latter before the answer is in peer, which is
     * atomic.
     */
    int64_t asked;
    int64_t answered;
    GuestTimePeer peer;
    /*
     * Destination: when the source asked it: CLOCK_MONOTONIC in ns, or 0.  BQL;
     * written until LISTEN.
     */
    int64_t asked_by_source;
    /* Of the last start of the guest; BQL */
    const GuestTimeOps *last_ops;
    bool last_moved;
};

/* Make and free @ms->guest_time: with @ms itself */
void guest_time_init(MigrationState *ms);
void guest_time_destroy(MigrationState *ms);

/* An outgoing migration begins: nothing is known of it.  BQL. */
void guest_time_begin(MigrationState *ms);

/* Source, return path: it has ended, and no PONG will come */
void guest_time_no_pong(MigrationState *ms);

/* Source, migration thread: the destination was not asked, or has answered */
bool guest_time_answered(MigrationState *ms);

/* Whether the machine's guest-time lets this QEMU take part */
bool guest_time_may_take(void);

/*
 * Source, BQL: why the destination is not told the instant, or NULL.  Does not
 * change from guest_time_answered() on.
 */
const char *guest_time_untold(void);

/*
 * How long before an instant the source asked and had its answer, in ns; 0 if
 * it has not.  The instant was taken between @before and @after,
 * CLOCK_MONOTONIC in ns.
 */
void guest_time_since_asked(int64_t before, int64_t after, uint64_t *asked_ns,
                            uint64_t *answered_ns);

/* For query-migrate.  BQL. */
void guest_time_fill_info(MigrationInfo *info);

#endif
