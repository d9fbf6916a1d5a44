/*
 * Postcopy: how much of the background may be on its way
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_WINDOW_H
#define MIGRATION_POSTCOPY_WINDOW_H

/* PINGs that have not been answered, at most; a power of two */
#define POSTCOPY_WINDOW_PINGS 64

/* Bytes of a slice, at least */
#define POSTCOPY_SLICE_LEAST (16 * 1024)

/* One of the two queues that hold what is on its way */
typedef struct PostcopyQueue {
    /* Bytes: that may be in it, and that have left it since it was made */
    uint64_t limit;
    uint64_t left;
    /* ns: what leaves it in these it may hold for no round trip */
    int64_t slack;
    /*
     * Bytes per second: the most of a round in this span of seconds, and in the
     * last one; and when this one began
     */
    uint64_t rate;
    uint64_t last_rate;
    int64_t span_ns;
    /* In a round, which has some ms: when it began, and left then */
    int64_t round_ns;
    uint64_t round_left;
    /* It held the background back in this round; the path's: or link did */
    bool was_full;
    /* Rounds until its rate no longer counts as growing with its limit; or 0 */
    unsigned growing;
} PostcopyQueue;

/*
 * Bytes are what the owner counts.  Times are of one monotonic clock, in ns.
 * Nothing here is locked: the owner does.
 */
typedef struct PostcopyWindow {
    /*
     * What the source's kernel has sent or will, and the peer of its socket has
     * not acknowledged; and what the destination's QEMU has not read
     */
    PostcopyQueue link;
    PostcopyQueue path;
    /* When link was looked at: the time, bytes in all, and those in it */
    int64_t look_ns;
    uint64_t look_bytes;
    uint64_t in_link;
    /*
     * Bytes that were sent with a PING behind them since the window was made;
     * path.left of them have been answered
     */
    uint64_t sent;
    /* Bytes of a slice, and the ns that it may take */
    uint64_t slice;
    int64_t slice_ns;
    /* Bytes that are to be sent before the next PING, and have been */
    uint64_t stretch;
    uint64_t unpinged;
    /*
     * Numbers of the next PING and of the first one that has not been answered:
     * those of several connections are answered in any order
     */
    uint32_t pinged;
    uint32_t answered;
    /* By number: when it was sent, how many bytes before it; 0: answered */
    struct {
        int64_t ns;
        uint64_t bytes;
    } pings[POSTCOPY_WINDOW_PINGS];
    /* The least delay of an answer, and when it was seen */
    int64_t least_delay;
    int64_t least_ns;
    /* That of the last answer */
    int64_t delay;
    /*
     * The path held the background back when postcopy_window_full() was asked
     */
    bool path_full;
    /*
     * Steps until least_delay has been found with little on the way, and pinged
     * at the begin of this step: it ends when all before that are answered
     */
    unsigned probing;
    uint32_t step_end;
} PostcopyWindow;

/*
 * At @now, nothing is on its way that will be answered, and @left bytes have
 * been acknowledged by the peer of the socket: see postcopy_window_look().
 * A slice may take @slice_ns.
 */
void postcopy_window_begin(PostcopyWindow *w, int64_t now, uint64_t left,
                           int64_t slice_ns);

/*
 * At @now, @bytes more have been sent.  Returns whether a PING is
 * to be sent, with the number in @number: unless there was one lately, or too
 * many have not been answered.
 */
bool postcopy_window_ping(PostcopyWindow *w, int64_t now, uint64_t bytes,
                          uint32_t *number);

/*
 * PING @number was answered at @now.  Returns false if that one is not awaited.
 */
bool postcopy_window_pong(PostcopyWindow *w, int64_t now, uint32_t number);

/*
 * Whether postcopy_window_full() needs a new look at the link at @now: by the
 * last one, @bytes in all may fill it, or that one was 1 ms ago.
 */
bool postcopy_window_stale(const PostcopyWindow *w, int64_t now,
                           uint64_t bytes);

/*
 * At @now, the source's kernel has been given @bytes in all, of which the peer
 * of its socket has not acknowledged @in_link; 0 where that is not known.
 */
void postcopy_window_look(PostcopyWindow *w, int64_t now, uint64_t bytes,
                          uint64_t in_link);

/*
 * Whether the next slice has to wait: with w->path_full for an answer, else for
 * the link
 */
bool postcopy_window_full(PostcopyWindow *w);

/* What leaves the slower queue, in bytes per second; 0: not known */
uint64_t postcopy_window_rate(const PostcopyWindow *w);

#endif
