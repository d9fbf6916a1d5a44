/*
 * Postcopy: how much of the background may be on its way
 *
 * The background is sent in slices with a PING behind each, and a slice is held
 * back while answers take longer than the fastest one by some share: then what
 * is on its way lies in a queue, and whatever is sent now would wait behind it.
 *
 * A thread of either side that is off its processor for some ms delays answers,
 * too, though nothing lies in a queue.  So the fastest answer of a round tells,
 * and a round has some ms: only a queue is never empty for so long.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "window.h"

/* Limits of a slice and of the window, in bytes */
#define SLICE_LEAST     (8 * KiB)
#define SLICE_MOST      (4 * MiB)
#define WINDOW_PROBE    SLICE_LEAST
/*
 * Where answers take long for another reason, other traffic or processors that
 * have more to do, a smaller window would not make them faster
 */
#define WINDOW_LEAST    (128 * KiB)
#define WINDOW_FIRST    (256 * KiB)
#define WINDOW_MOST     (256 * MiB)
/*
 * The window has so many slices, so that answers come steadily, and what is
 * sent in between acknowledges the answers of a peer that has Nagle's algorithm
 */
#define SLICES          4

/*
 * An answer may take longer than the fastest one by this share, since it waits
 * until its slice has left, and by so many ns
 */
#define DELAY_SHARE     2
#define DELAY_NS        (500 * SCALE_US)

/* The most bytes per second of any round are forgotten in so many rounds */
#define RATE_ROUNDS     256

/* A round takes so many ns, once the window has been found */
#define ROUND_NS        (10 * SCALE_MS)

/*
 * The fastest answer is looked for anew after so many ns, or so many times its
 * delay: other traffic or another path may have made all slower for good
 */
#define LEAST_NS        (2 * NANOSECONDS_PER_SECOND)
#define LEAST_DELAYS    100

/*
 * Rounds: one as before, one in which that is received, and one that has little
 * on its way
 */
#define PROBE_AFTER     3

static void window_set_size(PostcopyWindow *w, uint64_t size)
{
    w->size = MIN(size, WINDOW_MOST);
    w->slice = MIN(MAX(w->size / SLICES, SLICE_LEAST), SLICE_MOST);
}

static void window_begin_round(PostcopyWindow *w, int64_t now)
{
    w->round_begin = w->received;
    w->round_end = w->sent;
    w->round_ns = now;
    w->round_delay = INT64_MAX;
    w->was_full = false;
}

void postcopy_window_begin(PostcopyWindow *w, int64_t now)
{
    w->answered = w->pinged;
    w->received = w->sent;
    w->unpinged = 0;
    w->steady = false;
    w->most_rate = w->starved_rate = 0;
    /* The first answer waits until the destination has loaded its devices */
    w->probing = PROBE_AFTER;
    w->size_after = WINDOW_FIRST;
    w->least_delay = INT64_MAX;
    window_set_size(w, WINDOW_FIRST);
    window_begin_round(w, now);
}

bool postcopy_window_sent(PostcopyWindow *w, uint64_t bytes)
{
    w->unpinged += bytes;
    return w->unpinged >= w->slice;
}

bool postcopy_window_ping(PostcopyWindow *w, int64_t now, uint32_t *number)
{
    unsigned n = w->pinged % POSTCOPY_WINDOW_PINGS;

    if (w->pinged - w->answered == POSTCOPY_WINDOW_PINGS) {
        return false;
    }
    w->sent += w->unpinged;
    w->unpinged = 0;
    w->pings[n].ns = now;
    w->pings[n].sent = w->sent;
    *number = w->pinged++;
    return true;
}

/*
 * A window that is as small as answers ask for, but leaves most of the link
 * idle, is too small: they take long for another reason, since a thread waits
 * for its processor or since other traffic fills a queue.  Returns whether to
 * try a larger one.
 */
static bool window_starves(PostcopyWindow *w, int64_t now)
{
    uint64_t rate = (w->received - w->round_begin) * SCALE_MS /
        MAX((now - w->round_ns) / 1000, 1);
    bool starves = w->was_full && rate < w->most_rate / 2;

    if (starves && w->starved_rate && rate < w->starved_rate / 4 * 5) {
        /* A larger one has brought nothing: there is not more to be had */
        w->most_rate = rate;
        starves = false;
    }
    w->starved_rate = starves ? rate : 0;
    w->most_rate = MAX(rate, w->most_rate - w->most_rate / RATE_ROUNDS);
    return starves;
}

static void window_end_round(PostcopyWindow *w, int64_t now)
{
    int64_t least = w->least_delay;
    int64_t most = least + least / DELAY_SHARE + DELAY_NS;
    uint64_t size = w->size;

    w->delay = w->round_delay;
    if (w->steady && !w->probing && window_starves(w, now)) {
        window_set_size(w, size * 2);
        window_begin_round(w, now);
        return;
    }
    if (!w->probing &&
        now - w->least_ns >= MAX(LEAST_NS, LEAST_DELAYS * least)) {
        w->probing = PROBE_AFTER;
        w->size_after = size;
    }
    if (w->probing == PROBE_AFTER) {
        w->probing--;
        w->least_delay = INT64_MAX;
        size = WINDOW_PROBE;
    } else if (w->probing) {
        size = --w->probing ? size : w->size_after;
    } else {
        size = size * (most / SCALE_US) / (w->round_delay / SCALE_US + 1);
        w->steady |= size < w->size;
        /* Answers are as fast as ever: nothing is in a queue */
        if (w->round_delay - least < (most - least) / 4) {
            size = w->size * 2;
        }
        /* A window that was not full need not be larger */
        size = MAX(size, MAX(w->size / 2, WINDOW_LEAST));
        size = MIN(size, w->was_full ? w->size * 2 : w->size);
    }
    window_set_size(w, size);
    window_begin_round(w, now);
}

bool postcopy_window_pong(PostcopyWindow *w, int64_t now, uint32_t number)
{
    unsigned n = w->answered % POSTCOPY_WINDOW_PINGS;
    int64_t delay;

    if (w->answered == w->pinged || number != w->answered) {
        return false;
    }
    w->answered++;
    w->received = w->pings[n].sent;
    delay = now - w->pings[n].ns;
    w->round_delay = MIN(w->round_delay, delay);
    if (delay <= w->least_delay) {
        w->least_delay = delay;
        w->least_ns = now;
    }
    if (w->received >= w->round_end &&
        (!w->steady || w->probing || now - w->round_ns >= ROUND_NS)) {
        window_end_round(w, now);
    }
    return true;
}

bool postcopy_window_full(PostcopyWindow *w)
{
    uint64_t away = w->sent - w->received;
    bool full = away && away + w->slice > w->size;

    w->was_full |= full;
    return full;
}
