/*
 * Guest time: whether the destination supports it
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
    /* The report for query-migrate, or NULL; BQL */
    GuestTimeInfo *info;
    /*
     * Source: when the destination was asked whether it supports guest time,
     * and when it answered: CLOCK_MONOTONIC in ns.  @asked is written before
     * the PING is sent, @answered before the answer is in @peer, which is
     * atomic.
     */
    int64_t asked;
    int64_t answered;
    GuestTimePeer peer;
    /*
     * Destination: when the source asked, CLOCK_MONOTONIC in ns, or 0.  BQL;
     * written until LISTEN.
     */
    int64_t asked_by_source;
    /* Of the last start of the guest; BQL */
    const GuestTimeOps *last_ops;
    bool last_moved;
};

/* Make and free @ms->guest_time, together with @ms */
void guest_time_init(MigrationState *ms);
void guest_time_destroy(MigrationState *ms);

/* An outgoing migration begins: nothing is known of its peer.  BQL. */
void guest_time_begin(MigrationState *ms);

/* Source, return path thread: it has ended, and receives no PONG */
void guest_time_no_pong(MigrationState *ms);

/* Source, migration thread: the destination was not asked, or has answered */
bool guest_time_answered(MigrationState *ms);

/* Whether the machine's guest-time allows this QEMU to take part */
bool guest_time_may_take(void);

/*
 * Source, BQL: why the instant is not sent to the destination, or NULL.  Does
 * not change from guest_time_answered() on.
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
