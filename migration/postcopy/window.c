/*
 * Postcopy: how much of the background may be in flight
 *
 * The background is sent in slices, with a PING now and then.  A slice is held
 * back while more is in flight than a round trip needs: the rest would only
 * fill a queue, and all later bytes would wait behind it.
 *
 * A round trip takes as long as the fastest answer.  The highest rate at which
 * bytes have left a queue converts this time to bytes.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "window.h"

/* Limits of a queue, in bytes */
#define QUEUE_LEAST     (64 * KiB)
#define QUEUE_FIRST     (128 * KiB)
#define QUEUE_MOST      (256 * MiB)
/* A slice is this part of the link's limit, or slice_ns: the larger one */
#define SLICES          8
/*
 * A PING follows each ms.  But at least PINGS_LEAST are in flight, so that
 * answers are received steadily, and the bytes in between acknowledge those of
 * a peer that has Nagle's algorithm; and at most PINGS_MOST
 */
#define PINGS_PER_S     1000
#define PINGS_LEAST     4
#define PINGS_MOST      (POSTCOPY_WINDOW_PINGS / 2)

/*
 * A queue may hold the bytes that leave it in this part of a round trip, and in
 * so many ns.  Requested pages wait for the link's, which is looked at each ms.
 * Only those without a channel of their own wait for the path's, and a thread
 * has to read and to answer before its bytes are seen to have left it.
 */
#define SHARE           4
#define LINK_SLACK_NS   (350 * SCALE_US)
#define PATH_SLACK_NS   (8 * SCALE_MS)

/* A round takes so many ns, or a round trip, whichever is longer */
#define ROUND_NS        (10 * SCALE_MS)
/* ... while the link's rate grows, until STALE_ROUNDS without growth */
#define SHORT_ROUND_NS  (1 * SCALE_MS)
/* Maximum ns between two looks at the link, which tell rounds apart */
#define LOOK_NS         SHORT_ROUND_NS
#define STALE_ROUNDS    3

/*
 * Findings are forgotten after so many ns, or so many times the delay of the
 * fastest answer: other traffic or another path may have changed them
 */
#define SPAN_NS         (2 * NANOSECONDS_PER_SECOND)
#define SPAN_DELAYS     100

/*
 * Steps, counted down, to find the fastest answer: as much as before is in
 * flight; from PROBE_LITTLE on little, first until earlier bytes are answered
 */
#define PROBE_FIRST     3
#define PROBE_LITTLE    2
/*
 * A round trip of so many ns is long.  At the beginning, each step would leave
 * the link idle for most of it, only to detect a queue of some ms
 */
#define LONG_NS         (10 * SCALE_MS)

static int64_t window_span_ns(const PostcopyWindow *w)
{
    return w->least_delay == INT64_MAX ? SPAN_NS :
        MAX(SPAN_NS, w->least_delay * SPAN_DELAYS);
}

static bool window_little(const PostcopyWindow *w)
{
    return w->probing && w->probing <= PROBE_LITTLE;
}

static uint64_t queue_rate(const PostcopyQueue *q)
{
    return MAX(q->rate, q->last_rate);
}

static void queue_set_limit(const PostcopyWindow *w, PostcopyQueue *q)
{
    uint64_t rate = queue_rate(q);
    int64_t ns = w->least_delay;

    if (window_little(w)) {
        q->limit = POSTCOPY_SLICE_LEAST;
    } else if (ns == INT64_MAX || !rate) {
        q->limit = QUEUE_FIRST;
    } else {
        if (q->growing) {
            /* A limit takes effect a round trip later: grow as TCP does */
            ns *= q->growing == STALE_ROUNDS && ns >= LONG_NS ? 4 : 2;
        }
        ns += w->least_delay / SHARE + q->slack;
        rate = rate * (ns / SCALE_US) / 1000000;
        rate = MAX(rate, q->growing ? QUEUE_FIRST : QUEUE_LEAST);
        q->limit = MIN(rate, QUEUE_MOST);
    }
}

static void window_set_limits(PostcopyWindow *w)
{
    queue_set_limit(w, &w->link);
    queue_set_limit(w, &w->path);
    w->stretch = queue_rate(&w->path) / PINGS_PER_S;
    w->stretch = MAX(w->stretch, w->path.limit / PINGS_MOST);
    w->stretch = MIN(w->stretch, w->path.limit / PINGS_LEAST);
    w->stretch = MAX(w->stretch, POSTCOPY_SLICE_LEAST);
    w->slice = postcopy_window_rate(w) * (w->slice_ns / SCALE_US) / 1000000;
    if (queue_rate(&w->link)) {
        w->slice = MAX(w->slice, w->link.limit / SLICES);
    }
    w->slice = MIN(MAX(w->slice, POSTCOPY_SLICE_LEAST), w->stretch);
}

static void queue_begin_round(PostcopyQueue *q, int64_t now)
{
    q->round_ns = now;
    q->round_left = q->left;
    q->was_full = false;
}

static void queue_begin(PostcopyQueue *q, int64_t now, int64_t slack)
{
    q->rate = q->last_rate = 0;
    q->slack = slack;
    q->span_ns = now;
    q->growing = STALE_ROUNDS - 1;
    queue_begin_round(q, now);
}

void postcopy_window_begin(PostcopyWindow *w, int64_t now, uint64_t left,
                           int64_t slice_ns)
{
    w->answered = w->pinged;
    w->path.left = w->sent;
    w->step_end = w->pinged;
    w->link.left = left;
    w->look_ns = now - LOOK_NS;
    w->in_link = w->unpinged = 0;
    w->slice_ns = slice_ns;
    w->least_delay = INT64_MAX;
    w->probing = PROBE_FIRST;
    queue_begin(&w->link, now, LINK_SLACK_NS);
    queue_begin(&w->path, now, PATH_SLACK_NS);
    window_set_limits(w);
}

bool postcopy_window_ping(PostcopyWindow *w, int64_t now, uint64_t bytes,
                          uint32_t *number)
{
    unsigned n = w->pinged % POSTCOPY_WINDOW_PINGS;

    w->unpinged += bytes;
    if (w->unpinged < w->stretch ||
        w->pinged - w->answered == POSTCOPY_WINDOW_PINGS) {
        return false;
    }
    w->pings[n].ns = now;
    w->pings[n].bytes = w->unpinged;
    w->sent += w->unpinged;
    w->unpinged = 0;
    *number = w->pinged++;
    return true;
}

/* At @now, @left bytes in all have left @q */
static void queue_look(PostcopyWindow *w, PostcopyQueue *q, int64_t now,
                       uint64_t left)
{
    /* Answers come in bursts: a thread reads all that it can */
    int64_t least = q->growing && q == &w->link ? SHORT_ROUND_NS : ROUND_NS;
    int64_t ns = now - q->round_ns;
    uint64_t before = queue_rate(q), rate;

    q->left = left;
    if (window_little(w)) {
        return;
    }
    if (w->least_delay != INT64_MAX) {
        least = MAX(least, w->least_delay);
    }
    if (ns < least) {
        return;
    }
    rate = (left - q->round_left) * 1000000 / (ns / SCALE_US);
    /* The path may never be full, as kernels hold less: a higher rate counts */
    if (q->was_full || (q == &w->path && rate > before)) {
        /* The first rate has not grown from another one */
        if (before && q->growing) {
            q->growing = rate > before / 4 * 5 ? STALE_ROUNDS : q->growing - 1;
        }
        q->rate = MAX(q->rate, rate);
        if (now - q->span_ns >= window_span_ns(w)) {
            q->last_rate = q->rate;
            q->rate = 0;
            q->span_ns = now;
        }
        window_set_limits(w);
    }
    queue_begin_round(q, now);
}

/* All bytes in flight at the begin of this step are answered */
static void window_end_step(PostcopyWindow *w, int64_t now)
{
    if (w->probing-- > PROBE_LITTLE) {
        w->least_delay = INT64_MAX;
    }
    w->step_end = w->pinged;
    if (!w->probing) {
        queue_begin_round(&w->link, now);
        queue_begin_round(&w->path, now);
    }
    window_set_limits(w);
}

bool postcopy_window_pong(PostcopyWindow *w, int64_t now, uint32_t number)
{
    unsigned n = number % POSTCOPY_WINDOW_PINGS;
    uint64_t bytes = w->pings[n].bytes;

    if (number - w->answered >= w->pinged - w->answered || !bytes) {
        return false;
    }
    w->pings[n].bytes = 0;
    while (w->answered != w->pinged &&
           !w->pings[w->answered % POSTCOPY_WINDOW_PINGS].bytes) {
        w->answered++;
    }
    w->delay = now - w->pings[n].ns;
    if (w->delay <= w->least_delay) {
        w->least_delay = w->delay;
        w->least_ns = now;
    }
    queue_look(w, &w->path, now, w->path.left + bytes);
    if (w->probing == PROBE_FIRST && w->delay >= LONG_NS) {
        w->probing = 0;
        window_set_limits(w);
    } else if (w->probing && (int32_t)(w->answered - w->step_end) >= 0) {
        window_end_step(w, now);
    } else if (!w->probing && now - w->least_ns >= window_span_ns(w)) {
        w->probing = PROBE_LITTLE;
        w->least_delay = INT64_MAX;
        w->step_end = w->pinged;
        window_set_limits(w);
    }
    return true;
}

void postcopy_window_look(PostcopyWindow *w, int64_t now, uint64_t bytes,
                          uint64_t in_link)
{
    uint64_t left = bytes - in_link;

    w->look_ns = now;
    w->look_bytes = bytes;
    w->in_link = in_link;
    /* Other threads count bytes only after they have sent them */
    if ((int64_t)(left - w->link.left) < 0) {
        left = w->link.left;
    }
    queue_look(w, &w->link, now, left);
}

/* Whether @bytes fill @q; the last slice may be larger than the space left */
static bool queue_full(const PostcopyWindow *w, const PostcopyQueue *q,
                       uint64_t bytes)
{
    return bytes + MIN(w->slice, q->limit / SLICES) > q->limit;
}

bool postcopy_window_stale(const PostcopyWindow *w, int64_t now, uint64_t bytes)
{
    return now - w->look_ns >= LOOK_NS ||
        queue_full(w, &w->link, w->in_link + bytes - w->look_bytes);
}

bool postcopy_window_full(PostcopyWindow *w)
{
    uint64_t away = w->sent - w->path.left;
    bool link_full = w->in_link && queue_full(w, &w->link, w->in_link);

    w->path_full = away && queue_full(w, &w->path, away + w->unpinged);
    w->link.was_full |= link_full;
    w->path.was_full |= link_full || w->path_full;
    return link_full || w->path_full;
}

uint64_t postcopy_window_rate(const PostcopyWindow *w)
{
    uint64_t link = queue_rate(&w->link), path = queue_rate(&w->path);

    return link ? MIN(link, path) : path;
}
