/*
 * Postcopy: how much of the background may be on its way
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_WINDOW_H
#define MIGRATION_POSTCOPY_WINDOW_H

/* PINGs that have not been answered, at most; a power of two */
#define POSTCOPY_WINDOW_PINGS 64

/*
 * Bytes are what the owner counts.  Times are of one monotonic clock, in ns.
 * Nothing here is locked: the owner does.
 */
typedef struct PostcopyWindow {
    /*
     * Bytes: how many may be on their way; were sent, with a PING behind them,
     * since the window was made; and have been received of these
     */
    uint64_t size;
    uint64_t sent;
    uint64_t received;
    /* Bytes: how many are to be sent before the next PING, and have been */
    uint64_t slice;
    uint64_t unpinged;
    /* Numbers of the next PING and of the one that is answered next */
    uint32_t pinged;
    uint32_t answered;
    /* By number: when it was sent, and sent then */
    struct {
        int64_t ns;
        uint64_t sent;
    } pings[POSTCOPY_WINDOW_PINGS];
    /*
     * In a round, all that was on its way at its begin is received: received
     * and sent then, when it began, the least delay of an answer in it, and
     * whether the window has been full
     */
    uint64_t round_begin;
    uint64_t round_end;
    int64_t round_ns;
    int64_t round_delay;
    bool was_full;
    /* Rounds need not be short any more: the window was too large once */
    bool steady;
    /* Bytes per second: the most of a round, and those of one that starved */
    uint64_t most_rate;
    uint64_t starved_rate;
    /* The least delay of an answer, when it was seen, and that of a round */
    int64_t least_delay;
    int64_t least_ns;
    int64_t delay;
    /* Rounds until least_delay has been found by a small window; size then */
    unsigned probing;
    uint64_t size_after;
} PostcopyWindow;

/* At @now, nothing is on its way that will be answered */
void postcopy_window_begin(PostcopyWindow *w, int64_t now);

/* @bytes were sent.  Returns whether a PING should follow. */
bool postcopy_window_sent(PostcopyWindow *w, uint64_t bytes);

/*
 * A PING is sent at @now, whose number is returned in @number.  Returns false
 * if too many have not been answered: then none may be sent.
 */
bool postcopy_window_ping(PostcopyWindow *w, int64_t now, uint32_t *number);

/*
 * PING @number was answered at @now.  Returns false if that one is not the next
 * that can be.
 */
bool postcopy_window_pong(PostcopyWindow *w, int64_t now, uint32_t number);

/* Whether the next slice has to wait for an answer */
bool postcopy_window_full(PostcopyWindow *w);

#endif
