/*
 * Which pages are asked for ahead in postcopy
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "../migration/postcopy/stride.h"

#define PAGES 100000

/* A guest that misses all that was not asked for */
typedef struct Guest {
    PostcopyStreams streams;
    bool come[PAGES];
    unsigned faults;
    unsigned ahead;
    unsigned touched;
    unsigned most;
} Guest;

static Guest *guest_new(void)
{
    Guest *guest = g_new0(Guest, 1);

    guest->most = POSTCOPY_STREAM_WINDOW;
    return guest;
}

static void touch(Guest *guest, uint64_t page)
{
    uint64_t first;
    int64_t step;
    unsigned n;
    bool near;

    g_assert_cmpuint(page, <, PAGES);
    guest->touched++;
    if (guest->come[page]) {
        return;
    }
    guest->come[page] = true;
    guest->faults++;
    n = postcopy_streams_fault(&guest->streams, page, guest->most, &first,
                               &step, &near);
    g_assert_cmpuint(n, <=, guest->most);
    for (unsigned i = 0; i < n; i++) {
        uint64_t at = first + i * step;

        if (at < PAGES && !guest->come[at]) {
            guest->come[at] = true;
            guest->ahead++;
        }
    }
}

static void touch_steps(Guest *guest, uint64_t page, int64_t step, unsigned n)
{
    for (; n; n--, page += step) {
        touch(guest, page);
    }
}

/* Up, down, and with larger steps: a fault for each window */
static void test_steps(void)
{
    static const int64_t steps[] = { 1, -1, 2, 16, -16, 256 };

    for (unsigned i = 0; i < ARRAY_SIZE(steps); i++) {
        g_autofree Guest *guest = guest_new();

        touch_steps(guest, steps[i] > 0 ? 0 : PAGES - 1, steps[i], 390);
        /* Four; windows of 8, 16, 32; then a fault for each of the largest */
        g_assert_cmpuint(guest->faults, <=, 4 + 3 +
                         390 / (POSTCOPY_STREAM_WINDOW + 1));
        /* Nothing but what is touched, and the last window */
        g_assert_cmpuint(guest->faults + guest->ahead, <=,
                         390 + POSTCOPY_STREAM_WINDOW);
    }
}

/* memcpy() */
static void test_interleaved(void)
{
    g_autofree Guest *guest = guest_new();

    for (unsigned page = 0; page < 1000; page++) {
        touch(guest, 10000 + page);
        touch(guest, 50000 + page);
        touch(guest, 90000 - page);
    }
    g_assert_cmpuint(guest->faults, <, 3000 / 25);
}

/* The background has sent some of the pages */
static void test_gaps(void)
{
    g_autofree Guest *guest = guest_new();

    for (unsigned page = 100; page < PAGES; page += 40) {
        for (unsigned i = 0; i < 6; i++) {
            guest->come[page + i] = true;
        }
    }
    touch_steps(guest, 0, 1, 2000);
    g_assert_cmpuint(guest->faults, <, 2000 / 20);
}

/* No step: the window stays closed */
static void test_random(void)
{
    g_autofree Guest *guest = guest_new();

    for (unsigned i = 0; i < 10000; i++) {
        touch(guest, g_test_rand_int_range(0, 20000));
    }
    g_assert_cmpuint(guest->ahead, <, guest->faults / 200);
}

/* It ends within the window, and goes on elsewhere: the window is closed */
static void test_ends(void)
{
    g_autofree Guest *guest = guest_new();
    unsigned ahead;

    touch_steps(guest, 0, 1, 300);
    ahead = guest->ahead;
    touch_steps(guest, 40000, 1000, 50);
    g_assert_cmpuint(guest->ahead, ==, ahead);
    touch_steps(guest, 20000, 1, 8);
    g_assert_cmpuint(guest->ahead, ==, ahead + POSTCOPY_STREAM_FIRST_WINDOW);
}

/* @page is missed: @n pages are asked for ahead, from @from on */
static void assert_ahead(PostcopyStreams *s, uint64_t page, unsigned most,
                         unsigned n, uint64_t from)
{
    uint64_t first;
    int64_t step;
    bool near;

    g_assert_cmpuint(postcopy_streams_fault(s, page, most, &first, &step,
                                            &near), ==, n);
    if (n) {
        g_assert_cmpuint(first, ==, from);
        g_assert_cmpint(step, ==, 1);
    }
}

/* While pages are on their way, the thread waits for one of them */
static void test_on_the_way(void)
{
    PostcopyStreams s = { };

    assert_ahead(&s, 0, 32, 0, 0);
    assert_ahead(&s, 1, 32, 0, 0);
    assert_ahead(&s, 2, 32, 0, 0);
    assert_ahead(&s, 3, 32, 8, 4);
    /* Interrupted, and back; and the first of them has not come */
    assert_ahead(&s, 3, 32, 0, 0);
    assert_ahead(&s, 4, 32, 0, 0);
    /* Half of them are behind it */
    assert_ahead(&s, 7, 32, 8, 12);
    /* Used up; and not more than there is room for */
    assert_ahead(&s, 20, 2, 2, 21);
    assert_ahead(&s, 23, 0, 0, 0);
}

/* So that no page comes behind the second one of a stream, or a later one */
static void test_near(void)
{
    static const struct {
        uint64_t page;
        bool near;
    } faults[] = {
        { 1000, false }, { 1000 + POSTCOPY_STREAM_NEAR, true },
        { 3000, false }, { 3000 - POSTCOPY_STREAM_NEAR, true },
        { 6000, false }, { 6000 + POSTCOPY_STREAM_NEAR + 1, false },
        /* The step is known */
        { 6000 + 2 * (POSTCOPY_STREAM_NEAR + 1), true },
    };
    PostcopyStreams s = { };
    uint64_t first;
    int64_t step;
    bool near;

    for (unsigned i = 0; i < ARRAY_SIZE(faults); i++) {
        postcopy_streams_fault(&s, faults[i].page, POSTCOPY_STREAM_WINDOW,
                               &first, &step, &near);
        g_assert_cmpint(near, ==, faults[i].near);
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/postcopy-stream/steps", test_steps);
    g_test_add_func("/postcopy-stream/interleaved", test_interleaved);
    g_test_add_func("/postcopy-stream/gaps", test_gaps);
    g_test_add_func("/postcopy-stream/random", test_random);
    g_test_add_func("/postcopy-stream/ends", test_ends);
    g_test_add_func("/postcopy-stream/on-the-way", test_on_the_way);
    g_test_add_func("/postcopy-stream/near", test_near);
    return g_test_run();
}
