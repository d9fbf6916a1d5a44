/*
 * Postcopy's window, over a simulated link
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "../migration/postcopy/window.h"

#define PAGE    (4 * KiB)
/* The destination may be descheduled for a part of each PERIOD, in ns */
#define PERIOD  (10 * SCALE_MS)

typedef struct Link {
    /* @rate: bytes per second; @delay: ns from one end to the other */
    uint64_t rate;
    int64_t delay;
    /* @off: ns of each PERIOD in which the destination places no page */
    int64_t off;
    /* @late: ns by which the answer to a PING is late, at most */
    int64_t late;
    /* @others: ns that other traffic occupies of the queue, independently */
    int64_t others;
    /* @proxy: a proxy acknowledges at once, and the link is behind it */
    bool proxy;
    /* @work: ns of processor time that the source needs for each slice */
    int64_t work;
} Link;

/* More than are ever in flight */
#define SLICES  (64 * KiB)

typedef struct Source {
    PostcopyWindow window;
    const Link *link;
    int64_t now;
    /* @left: when all sent bytes have left the queue */
    int64_t left;
    /* @answers: by number, when a PING will have been answered */
    int64_t answers[POSTCOPY_WINDOW_PINGS];
    /* @acks: by slice, when it is acknowledged, and all bytes up to it */
    struct {
        int64_t ns;
        uint64_t total;
    } acks[SLICES];
    unsigned next_ack;
    unsigned next_slice;
    uint64_t total;
    uint64_t acked;
    /* In this run: @bytes sent; sum of a request's @waits after each slice */
    uint64_t bytes;
    int64_t waits;
    unsigned slices;
    GRand *rand;
} Source;

static Source *source_new(const Link *link)
{
    Source *s = g_new0(Source, 1);

    s->link = link;
    s->rand = g_rand_new_with_seed(1);
    postcopy_window_begin(&s->window, 0, 0, 100 * SCALE_US);
    return s;
}

static void source_free(Source *s)
{
    g_rand_free(s->rand);
    g_free(s);
}
G_DEFINE_AUTOPTR_CLEANUP_FUNC(Source, source_free)

static void send_slice(Source *s)
{
    const Link *link = s->link;
    int64_t start = MAX(s->now + link->others, s->left);
    uint64_t bytes = ROUND_UP(s->window.slice, PAGE);
    uint32_t number;
    int64_t phase, placed;

    s->bytes += bytes;
    s->waits += start - s->now;
    s->slices++;
    s->left = start + bytes * NANOSECONDS_PER_SECOND / link->rate;
    placed = s->left + link->delay;
    s->total += bytes;
    s->acks[s->next_slice % SLICES].ns = placed + link->delay;
    s->acks[s->next_slice++ % SLICES].total = s->total;
    phase = placed % PERIOD;
    if (phase < link->off) {
        placed += link->off - phase;
    }
    if (link->late) {
        placed += g_rand_int_range(s->rand, 0, link->late);
    }
    if (postcopy_window_ping(&s->window, s->now, bytes, &number)) {
        s->answers[number % POSTCOPY_WINDOW_PINGS] = placed + link->delay;
    }
}

static void look(Source *s)
{
    while (s->next_ack != s->next_slice &&
           s->acks[s->next_ack % SLICES].ns <= s->now) {
        s->acked = s->acks[s->next_ack++ % SLICES].total;
    }
    if (postcopy_window_stale(&s->window, s->now, s->total)) {
        postcopy_window_look(&s->window, s->now, s->total,
                             s->link->proxy ? 0 : s->total - s->acked);
    }
}

static bool is_answered(const Source *s)
{
    const PostcopyWindow *w = &s->window;

    return w->answered != w->pinged &&
           s->now >= s->answers[w->answered % POSTCOPY_WINDOW_PINGS];
}

/* Returns the share of the link that was used */
static double run_until(Source *s, int64_t end)
{
    PostcopyWindow *w = &s->window;
    int64_t begin = s->now;

    s->bytes = s->waits = s->slices = 0;
    while (s->now < end) {
        int64_t next = INT64_MAX;

        look(s);
        while (!postcopy_window_full(w) && s->now < end && !is_answered(s)) {
            send_slice(s);
            s->now += s->link->work;
            look(s);
        }
        if (w->answered != w->pinged) {
            next = s->answers[w->answered % POSTCOPY_WINDOW_PINGS];
        }
        if (!w->path_full) {
            next = MIN(next, s->now + 250 * SCALE_US);
        }
        g_assert_cmpint(next, !=, INT64_MAX);
        if (!s->link->work || postcopy_window_full(w)) {
            s->now = MAX(s->now, next);
        }
        if (is_answered(s)) {
            g_assert_true(postcopy_window_pong(w, s->now, w->answered));
        }
    }
    return (double)s->bytes * NANOSECONDS_PER_SECOND / (s->now - begin) /
        s->link->rate;
}

static int64_t wait_ns(const Source *s)
{
    return s->waits / s->slices;
}

/*
 * After half a second, the link is used, and a requested page waits little
 * longer than its travel time
 */
static void test_links(void)
{
    static const unsigned mbit[] = { 100, 300, 1000, 10000, 25000 };
    static const unsigned us[] = { 20, 50, 500, 2000, 20000 };

    for (unsigned i = 0; i < ARRAY_SIZE(mbit); i++) {
        for (unsigned j = 0; j < ARRAY_SIZE(us); j++) {
            Link link = {
                .rate = mbit[i] * 125000ull,
                .delay = us[j] * (int64_t)SCALE_US,
            };
            g_autoptr(Source) s = source_new(&link);
            uint64_t product = link.rate / 1000 * us[j] / 1000;
            double first, used;

            if (product > 8 * MiB) {
                continue;
            }
            first = run_until(s, NANOSECONDS_PER_SECOND / 2);
            used = run_until(s, 5 * NANOSECONDS_PER_SECOND);
            g_test_message("%u Mbit/s, %u us: used %.3f, then %.3f, window %"
                           PRIu64 ", waits %" PRId64 " us", mbit[i], us[j],
                           first, used, s->window.link.limit,
                           wait_ns(s) / SCALE_US);
            g_assert_cmpfloat(first, >=, 0.4);
            g_assert_cmpfloat(used, >=, 0.95);
            /* A few hundred us, or the smallest window */
            g_assert_cmpint(wait_ns(s), <=, link.delay + 400 * SCALE_US +
                            100 * KiB * NANOSECONDS_PER_SECOND / link.rate);
        }
    }
}

/*
 * The source's processor is the limit, so that the queue is never full: the
 * source must learn that larger slices are faster
 */
static void test_busy_source(void)
{
    static const Link link = {
        .rate = 1500000000, .delay = 20 * SCALE_US, .proxy = true,
        .work = 60 * SCALE_US,
    };
    g_autoptr(Source) s = source_new(&link);

    g_test_message("used %.2f", run_until(s, NANOSECONDS_PER_SECOND));
    g_assert_cmpfloat(run_until(s, 2 * NANOSECONDS_PER_SECOND), >=, 0.6);
}

/* The destination is descheduled, which must not look like a queue */
static void test_busy_destination(void)
{
    static const Link link = {
        .rate = 125000000, .delay = 500 * SCALE_US, .off = 2 * SCALE_MS,
    };
    g_autoptr(Source) s = source_new(&link);

    run_until(s, NANOSECONDS_PER_SECOND / 2);
    g_assert_cmpfloat(run_until(s, 5 * NANOSECONDS_PER_SECOND), >=, 0.9);
    g_assert_cmpint(wait_ns(s), <=, 2 * SCALE_MS);
}

/* Threads of both sides wait for processors: a small window does not help */
static void test_busy_processors(void)
{
    Link link = { .rate = 125000000, .delay = 500 * SCALE_US };
    g_autoptr(Source) s = source_new(&link);

    run_until(s, NANOSECONDS_PER_SECOND);
    link.late = 40 * SCALE_MS;
    run_until(s, 2 * NANOSECONDS_PER_SECOND);
    g_assert_cmpfloat(run_until(s, 5 * NANOSECONDS_PER_SECOND), >=, 0.12);
}

/* Other traffic keeps a queue full: the background still gets its share */
static void test_other_traffic(void)
{
    Link link = { .rate = 125000000, .delay = 500 * SCALE_US };
    g_autoptr(Source) s = source_new(&link);

    run_until(s, NANOSECONDS_PER_SECOND);
    link.others = 50 * SCALE_MS;
    run_until(s, 4 * NANOSECONDS_PER_SECOND);
    g_assert_cmpfloat(run_until(s, 6 * NANOSECONDS_PER_SECOND), >=, 0.2);
    /* The traffic ends: after a new measurement, the delay is right again */
    link.others = 0;
    run_until(s, 9 * NANOSECONDS_PER_SECOND);
    g_assert_cmpfloat(run_until(s, 11 * NANOSECONDS_PER_SECOND), >=, 0.93);
    g_assert_cmpint(wait_ns(s), <=, 2 * SCALE_MS);
}

/* Answers of an earlier connection, and answers without a PING */
static void test_answers(void)
{
    PostcopyWindow w = { 0 };
    uint32_t first, second;

    postcopy_window_begin(&w, 0, 0, SCALE_MS);
    g_assert_false(postcopy_window_pong(&w, 1, 0));
    g_assert_true(postcopy_window_ping(&w, 1, MiB, &first));
    g_assert_true(postcopy_window_full(&w));

    postcopy_window_begin(&w, 2, 0, SCALE_MS);
    g_assert_false(postcopy_window_full(&w));
    g_assert_false(postcopy_window_pong(&w, 3, first));
    g_assert_true(postcopy_window_ping(&w, 3, MiB, &second));
    g_assert_false(postcopy_window_pong(&w, 4, first));
    g_assert_false(postcopy_window_pong(&w, 4, second + 1));
    g_assert_true(postcopy_window_full(&w));
    g_assert_true(postcopy_window_pong(&w, 4, second));
    g_assert_false(postcopy_window_full(&w));
    g_assert_false(postcopy_window_pong(&w, 5, second));
}

/* Several connections answer: in any order, each PING once */
static void test_any_order(void)
{
    PostcopyWindow w = { 0 };
    uint32_t n[3];

    postcopy_window_begin(&w, 0, 0, SCALE_MS);
    for (unsigned i = 0; i < ARRAY_SIZE(n); i++) {
        g_assert_true(postcopy_window_ping(&w, i, MiB, &n[i]));
    }
    g_assert_true(postcopy_window_pong(&w, 10, n[1]));
    g_assert_false(postcopy_window_pong(&w, 11, n[1]));
    g_assert_cmpuint(w.path.left, ==, MiB);
    g_assert_true(postcopy_window_pong(&w, 12, n[2]));
    g_assert_cmpuint(w.answered, ==, n[0]);
    g_assert_true(postcopy_window_pong(&w, 13, n[0]));
    g_assert_cmpuint(w.answered, ==, w.pinged);
    g_assert_cmpuint(w.path.left, ==, 3 * MiB);
}

/* A PING beyond the table's size is not sent, and its bytes still count */
static void test_many_pings(void)
{
    PostcopyWindow w = { 0 };
    uint32_t number;

    postcopy_window_begin(&w, 0, 0, SCALE_MS);
    for (unsigned i = 0; i < POSTCOPY_WINDOW_PINGS; i++) {
        g_assert_true(postcopy_window_ping(&w, i, MiB, &number));
    }
    g_assert_false(postcopy_window_ping(&w, 100, MiB, &number));
    for (unsigned i = 0; i < POSTCOPY_WINDOW_PINGS; i++) {
        g_assert_true(postcopy_window_pong(&w, 200, i));
    }
    g_assert_cmpuint(w.path.left, ==, POSTCOPY_WINDOW_PINGS * MiB);
    g_assert_true(postcopy_window_ping(&w, 300, 0, &number));
    g_assert_cmpuint(w.sent - w.path.left, ==, MiB);
    /* A single page gets no PING either */
    g_assert_false(postcopy_window_ping(&w, 400, PAGE, &number));
}

/* The link is measured anew when it may be full by now, and each ms */
static void test_stale(void)
{
    PostcopyWindow w = { 0 };

    postcopy_window_begin(&w, 0, 0, 100 * SCALE_US);
    g_assert_true(postcopy_window_stale(&w, 0, 0));
    postcopy_window_look(&w, 0, MiB, 0);
    g_assert_false(postcopy_window_stale(&w, 1, MiB + PAGE));
    g_assert_true(postcopy_window_stale(&w, 1, MiB + w.link.limit));
    g_assert_true(postcopy_window_stale(&w, SCALE_MS, MiB + PAGE));
    postcopy_window_look(&w, 1, MiB, w.link.limit);
    g_assert_true(postcopy_window_stale(&w, 1, MiB));
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/postcopy-window/links", test_links);
    g_test_add_func("/postcopy-window/busy-source", test_busy_source);
    g_test_add_func("/postcopy-window/busy-destination", test_busy_destination);
    g_test_add_func("/postcopy-window/busy-processors", test_busy_processors);
    g_test_add_func("/postcopy-window/other-traffic", test_other_traffic);
    g_test_add_func("/postcopy-window/answers", test_answers);
    g_test_add_func("/postcopy-window/any-order", test_any_order);
    g_test_add_func("/postcopy-window/many-pings", test_many_pings);
    g_test_add_func("/postcopy-window/stale", test_stale);
    return g_test_run();
}
