/*
 * Postcopy: how much of the background may be in flight
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_WINDOW_H
#define MIGRATION_POSTCOPY_WINDOW_H

/* Maximum number of unanswered PINGs; a power of two */
#define POSTCOPY_WINDOW_PINGS 64

/* Minimum size of a slice, in bytes */
#define POSTCOPY_SLICE_LEAST (16 * 1024)

/* One of the two queues that hold the bytes in flight */
typedef struct PostcopyQueue {
    /* Bytes that may be in it, and that have left it since it was made */
    uint64_t limit;
    uint64_t left;
    /* ns: it may also hold the bytes that leave it in this time */
    int64_t slack;
    /*
     * Bytes per second: the most of a round in this span of seconds, and in the
     * last span; and when this span began
     */
    uint64_t rate;
    uint64_t last_rate;
    int64_t span_ns;
    /* When this round, of some ms, began, and @left at that time */
    int64_t round_ns;
    uint64_t round_left;
    /* It held the background back in this round; the path's: or @link did */
    bool was_full;
    /* Rounds for which its rate still counts as growing with its limit; or 0 */
    unsigned growing;
} PostcopyQueue;

/*
 * The owner decides which bytes it counts.  Times are of one monotonic clock,
 * in ns.  The owner does all locking.
 */
typedef struct PostcopyWindow {
    /*
     * @link: bytes that the source's kernel has sent or will send,
     * unacknowledged by the peer of its socket; @path: those that the
     * destination's QEMU has not read
     */
    PostcopyQueue link;
    PostcopyQueue path;
    /* The last look at @link: when, all bytes until then, and those in @link */
    int64_t look_ns;
    uint64_t look_bytes;
    uint64_t in_link;
    /*
     * Bytes that were sent with a PING behind them since the window was made;
     * @path.left of them were answered
     */
    uint64_t sent;
    /* Bytes of a slice, and the ns that it may take */
    uint64_t slice;
    int64_t slice_ns;
    /* Bytes to send before the next PING, and those sent since the last one */
    uint64_t stretch;
    uint64_t unpinged;
    /*
     * Numbers of the next PING and of the first unanswered one: PINGs of
     * several connections are answered in any order
     */
    uint32_t pinged;
    uint32_t answered;
    /* By number: when it was sent, bytes since the PING before; 0: answered */
    struct {
        int64_t ns;
        uint64_t bytes;
    } pings[POSTCOPY_WINDOW_PINGS];
    /* Delay of the fastest answer, and when it was received */
    int64_t least_delay;
    int64_t least_ns;
    /* Delay of the last answer */
    int64_t delay;
    /* In the last postcopy_window_full(), the path held the background back */
    bool path_full;
    /*
     * Steps until @least_delay is found with little in flight, and @pinged at
     * the begin of this step: it ends when all earlier PINGs are answered
     */
    unsigned probing;
    uint32_t step_end;
} PostcopyWindow;

/*
 * At @now, no bytes in flight will be answered, and the peer of the socket has
 * acknowledged @left bytes: see postcopy_window_look().  A slice may take
 * @slice_ns.
 */
void postcopy_window_begin(PostcopyWindow *w, int64_t now, uint64_t left,
                           int64_t slice_ns);

/*
 * At @now, @bytes more were sent.  Returns whether to send a PING, with the
 * number in @number: not if there was one recently, or too many are unanswered.
 */
bool postcopy_window_ping(PostcopyWindow *w, int64_t now, uint64_t bytes,
                          uint32_t *number);

/* PING @number was answered at @now.  Returns false if it was not awaited. */
bool postcopy_window_pong(PostcopyWindow *w, int64_t now, uint32_t number);

/*
 * Whether postcopy_window_full() needs a new look at the link at @now: the last
 * look was 1 ms ago, or with @bytes in all the link may be full by now.
 */
bool postcopy_window_stale(const PostcopyWindow *w, int64_t now,
                           uint64_t bytes);

/*
 * At @now, the source's kernel was given @bytes in all, of which the peer of
 * its socket has not acknowledged @in_link; 0 where that is not known.
 */
void postcopy_window_look(PostcopyWindow *w, int64_t now, uint64_t bytes,
                          uint64_t in_link);

/*
 * Whether the next slice has to wait: for an answer if w->path_full, else for
 * the link
 */
bool postcopy_window_full(PostcopyWindow *w);

/* Bytes per second that leave the slower queue; 0: not known */
uint64_t postcopy_window_rate(const PostcopyWindow *w);

#endif
