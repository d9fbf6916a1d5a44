/*
 * Unit test of migration/postcopy/request.c
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"

#define PAGES 512
#define VCPUS 8
#define ROUNDS 20

#include "postcopy-common.h"

/* Not atomic: see received_map */
static unsigned data[PAGES];
static unsigned asked[PAGES];
static unsigned sender_woken;
/* Of tests with several vCPUs */
static PostcopyWaiter waiters[VCPUS];

static PostcopyFaultStats stats(void)
{
    PostcopyFaultStats counts;

    postcopy_requests_stats(requests, &counts);
    return counts;
}

/* Called without the lock, and never while requests are being stopped */
static void test_deferred(void)
{
    stats();
    sender_woken++;
}

static void set_up(PostcopyWaiter *waiter, gconstpointer data)
{
    requests_start(test_deferred);
    postcopy_waiter_init(waiter);
}

static void tear_down(PostcopyWaiter *waiter, gconstpointer data)
{
    requests_end();
    postcopy_waiter_destroy(waiter);
}

static PostcopyPageState begin(unsigned page, PostcopyWaiter *waiter)
{
    static uint32_t others = 1000;

    /* Each vCPU has its thread; each other fault has another thread */
    return begin_by(page, waiter,
                    waiter ? (uintptr_t)waiter : qatomic_inc_fetch(&others));
}

/* How often the page is in the list of outstanding pages */
static unsigned listed(unsigned n)
{
    g_autoptr(GArray) list = postcopy_requests_list(requests);
    unsigned times = 0;

    for (guint i = 0; i < list->len; i++) {
        PostcopyPage *page = &g_array_index(list, PostcopyPage, i);

        check_page(page);
        times += page->start == n * PAGE;
    }
    return times;
}

/* Other threads have no outstanding pages */
static unsigned outstanding(PostcopyOldest *oldest)
{
    unsigned n = postcopy_requests_outstanding(requests, oldest);

    g_assert_cmpuint(postcopy_requests_number(requests), ==, n);
    return n;
}

static void test_once(PostcopyWaiter *waiter, gconstpointer data)
{
    PostcopyOldest oldest;

    g_assert_cmpuint(outstanding(&oldest), ==, 0);
    g_assert_cmpint(begin(1, NULL), ==, POSTCOPY_PAGE_REQUEST);
    g_assert_cmpint(begin(1, NULL), ==, POSTCOPY_PAGE_REQUESTED);
    g_assert_cmpint(begin(2, NULL), ==, POSTCOPY_PAGE_REQUEST);

    g_assert_cmpuint(listed(1), ==, 1);
    g_assert_cmpuint(listed(2), ==, 1);
    g_assert_cmpuint(listed(3), ==, 0);

    g_assert_cmpuint(outstanding(&oldest), ==, 2);
    g_assert_cmpuint(oldest.page.start, ==, PAGE);
    complete(1);
    g_assert_cmpuint(outstanding(&oldest), ==, 1);
    g_assert_cmpuint(oldest.page.start, ==, 2 * PAGE);
    g_assert_cmpint(begin(1, NULL), ==, POSTCOPY_PAGE_RECEIVED);
    g_assert_cmpuint(listed(1), ==, 0);
    g_assert_cmpuint(listed(2), ==, 1);

    /* A page is received without a request */
    complete(3);
    g_assert_cmpint(begin(3, NULL), ==, POSTCOPY_PAGE_RECEIVED);
    g_assert_false(postcopy_requests_wait_empty(requests, 1));
    complete(2);
    g_assert_true(postcopy_requests_wait_empty(requests, 0));

    g_assert_cmpuint(stats().uffd, ==, 5);
    g_assert_cmpuint(stats().uffd_spurious, ==, 2);
    g_assert_cmpuint(stats().requests, ==, 2);
    g_assert_cmpuint(stats().exits, ==, 0);
    /* Pages 1 and 2 had waiters; faults on 1 and 3 were read late */
    g_assert_cmpuint(stats().wakes, ==, 4);
    g_assert_cmpuint(stats().wakes_saved, ==, 1);
    g_assert_cmpuint(stats().copied_bytes, ==, 3 * PAGE);
}

enum { DROP = 1, UFFD = 2, VCPU = 4 };

/* The first @claimed of @n pages can be claimed, with @flags */
static void claim(unsigned first, unsigned n, bool zero, unsigned claimed,
                  unsigned flags)
{
    PostcopyClaim c;

    g_assert_cmpuint(postcopy_request_claim(requests, &pages[first], n, zero,
                                            &c), ==, claimed);
    g_assert_cmphex(c.drop ? DROP : c.uffd * UFFD + c.vcpu * VCPU, ==, flags);
}

/* One thread claims a page and fills it in place, once */
static void test_claim(PostcopyWaiter *waiter, gconstpointer data)
{
    claim(0, 1, false, 1, 0);
    claim(0, 1, false, 1, DROP);
    postcopy_requests_unclaim_all(requests);
    begin(0, NULL);
    claim(0, 1, false, 1, UFFD);
    postcopy_request_unclaim(requests, &pages[0]);
    begin(0, waiter);
    claim(0, 1, false, 1, UFFD | VCPU);
    complete(0);
    g_assert_true(postcopy_request_wait(requests, waiter));
    claim(0, 1, false, 1, DROP);

    g_assert_cmpuint(stats().duplicates, ==, 2);
}

/* A run of pages is claimed as far as its pages need the same treatment */
static void test_claim_run(PostcopyWaiter *waiter, gconstpointer data)
{
    for (unsigned page = 4; page < 10; page++) {
        begin(page, page == 6 ? waiter : NULL);
    }
    complete(8);

    claim(4, 6, false, 4, UFFD | VCPU);
    /* Another channel gets pages neither within nor around the claim */
    claim(5, 1, false, 1, DROP);
    claim(3, 7, false, 1, 0);
    complete(3);
    claim(8, 2, false, 1, DROP);

    g_assert_true(postcopy_request_complete(requests, &pages[4], 4,
                                            POSTCOPY_PLACE_COPY, true));
    g_assert_true(postcopy_request_wait(requests, waiter));
    for (unsigned page = 3; page < 9; page++) {
        g_assert_true(received_map[page]);
    }
    g_assert_false(received_map[9]);

    /* Zeros: a vCPU's page is claimed separately, since it must be writable */
    for (unsigned page = 20; page < 23; page++) {
        begin(page, page == 21 ? waiter : NULL);
    }
    claim(20, 3, true, 1, UFFD);
    claim(21, 2, true, 1, VCPU);

    g_assert_cmpuint(stats().duplicates, ==, 2);
    g_assert_cmpuint(stats().copied_bytes, ==, 6 * PAGE);
}

/* In a block of @length pages, @page is in a run of @n pages from @first on */
static void check_run(unsigned page, unsigned length, unsigned first,
                      unsigned n)
{
    PostcopyPage run = pages[page];

    postcopy_requests_run(requests, &run, length * PAGE, 16 * PAGE);
    g_assert_cmpuint(run.start, ==, first * PAGE);
    g_assert(run.host == host_memory + first * PAGE);
    g_assert_cmpuint(run.size, ==, n * PAGE);
}

/* Received pages are populated together, and a missing page ends the run */
static void test_run(PostcopyWaiter *waiter, gconstpointer data)
{
    for (int page = 0; page < PAGES; page++) {
        received_map[page] = page != 18 && page != 29;
    }
    check_run(20, PAGES, 19, 10);
    /* The ends of the window, and of the block, end a run */
    check_run(40, PAGES, 32, 16);
    check_run(40, 42, 32, 10);
    /* Received bits may be gone */
    postcopy_requests_stop(requests);
    check_run(40, PAGES, 40, 1);
}

/* The sender is woken once, and gets the pages that are still missing */
static void test_defer(PostcopyWaiter *waiter, gconstpointer data)
{
    PostcopyPage taken[3];

    sender_woken = 0;
    for (unsigned n = 0; n < 3; n++) {
        g_assert_cmpint(begin(n, NULL), ==, POSTCOPY_PAGE_REQUEST);
        postcopy_request_defer(requests, &pages[n]);
    }
    g_assert_cmpuint(sender_woken, ==, 1);
    complete(1);
    g_assert_cmpuint(postcopy_requests_take_deferred(requests, taken, 1), ==,
                     1);
    g_assert_cmpuint(taken[0].start, ==, 0);
    g_assert_cmpuint(postcopy_requests_take_deferred(requests, taken, 3), ==,
                     1);
    g_assert_cmpuint(taken[0].start, ==, 2 * PAGE);
    g_assert_cmpuint(postcopy_requests_take_deferred(requests, taken, 3), ==,
                     0);

    /* A request that is deferred after its page was received */
    begin(3, NULL);
    complete(3);
    postcopy_request_defer(requests, &pages[3]);
    g_assert_cmpuint(sender_woken, ==, 1);

    begin(4, NULL);
    postcopy_request_defer(requests, &pages[4]);
    g_assert_cmpuint(sender_woken, ==, 2);
    postcopy_requests_stop(requests);
    g_assert_cmpuint(postcopy_requests_take_deferred(requests, taken, 3), ==,
                     0);
}

/* An interrupted wait that begins again is one fault */
static void test_again(PostcopyWaiter *waiter, gconstpointer data)
{
    PostcopyMeter meter, next;

    for (int i = 0; i < 1000; i++) {
        begin_by(1, NULL, 77);
        begin_by(1, NULL, 78);
    }
    complete(1);
    g_assert_cmpuint(stats().uffd, ==, 2);
    g_assert_cmpuint(stats().requests, ==, 1);
    postcopy_requests_meter(requests, &meter);
    /* The next postcopy counts from 0, and earlier meters stay */
    postcopy_requests_stop(requests);
    postcopy_requests_start(requests);
    postcopy_requests_meter(requests, &next);
    g_assert_cmpuint(next.others.count, ==, 0);
    g_assert_cmpuint(meter.others.count, ==, 2);
    postcopy_meter_destroy(&next);
    postcopy_meter_destroy(&meter);
}

static void test_meter(void)
{
    PostcopyMeter meter;
    PostcopyLatency *vcpus;

    postcopy_meter_init(&meter);
    g_assert_cmpuint(postcopy_meter_mean(&meter), ==, 0);
    postcopy_meter_add(&meter, 2, 0);
    postcopy_meter_add(&meter, 2, 1999);
    postcopy_meter_add(&meter, -1, 2000);
    postcopy_meter_add(&meter, -1, UINT64_MAX / 8);
    g_assert_cmpuint(meter.dist[0], ==, 2);
    g_assert_cmpuint(meter.dist[1], ==, 1);
    g_assert_cmpuint(meter.dist[POSTCOPY_METER_BUCKETS - 1], ==, 1);
    g_assert_cmpuint(meter.vcpus->len, ==, 3);
    vcpus = (void *)meter.vcpus->data;
    g_assert_cmpuint(postcopy_latency_mean(&vcpus[1]), ==, 0);
    g_assert_cmpuint(postcopy_latency_mean(&vcpus[2]), ==, 999);
    postcopy_meter_destroy(&meter);
}

/* Returns whether the page was placed */
static void *wait_fn(void *waiter)
{
    return GINT_TO_POINTER(postcopy_request_wait(requests, waiter));
}

static void test_waiters(void)
{
    PostcopyMeter meter;
    QemuThread threads[VCPUS];

    requests_start(NULL);
    for (int i = 0; i < VCPUS; i++) {
        postcopy_waiter_init(&waiters[i]);
        g_assert_cmpint(begin(7, &waiters[i]), ==,
                        i ? POSTCOPY_PAGE_REQUESTED : POSTCOPY_PAGE_REQUEST);
        start_thread(&threads[i], wait_fn, &waiters[i]);
    }
    complete(7);
    for (int i = 0; i < VCPUS; i++) {
        g_assert_nonnull(qemu_thread_join(&threads[i]));
        postcopy_waiter_destroy(&waiters[i]);
    }

    g_assert_cmpuint(stats().exits, ==, VCPUS);
    g_assert_cmpuint(stats().requests, ==, 1);
    postcopy_requests_meter(requests, &meter);
    g_assert_cmpuint(g_array_index(meter.vcpus, PostcopyLatency, 0).count, ==,
                     VCPUS);
    postcopy_meter_destroy(&meter);
    requests_end();
}

/* Waiters of pages that will not be placed do not wait indefinitely */
static void test_stop_wakes(PostcopyWaiter *waiter, gconstpointer data)
{
    PostcopyOldest oldest;
    QemuThread thread;

    begin(1, waiter);
    start_thread(&thread, wait_fn, waiter);
    g_assert_false(postcopy_requests_wait_empty(requests, 1));
    postcopy_requests_stop(requests);
    g_assert_nonnull(qemu_thread_join(&thread));
    g_assert_true(postcopy_requests_wait_empty(requests, 0));
    g_assert_cmpuint(outstanding(&oldest), ==, 0);
    g_assert_cmpint(begin(0, waiter), ==, POSTCOPY_PAGE_RECEIVED);
    g_assert_cmpint(begin(0, NULL), ==, POSTCOPY_PAGE_RECEIVED);

    postcopy_requests_start(requests);
    g_assert_cmpint(begin(0, NULL), ==, POSTCOPY_PAGE_REQUEST);
}

/* Pages requested ahead are outstanding; they are requested anew last */
static void test_ahead(PostcopyWaiter *waiter, gconstpointer data)
{
    g_autoptr(GArray) list = NULL;
    PostcopyOldest oldest;

    complete(9);
    begin(11, NULL);
    g_assert_cmphex(postcopy_requests_ahead(requests, &pages[8], 5), ==, 0x15);
    g_assert_cmpuint(outstanding(&oldest), ==, 4);
    g_assert_cmpuint(oldest.page.start, ==, 11 * PAGE);

    g_assert_cmpint(begin(10, NULL), ==, POSTCOPY_PAGE_REQUESTED);
    list = postcopy_requests_list(requests);
    g_assert_cmpuint(list->len, ==, 4);
    for (guint i = 0; i < list->len; i++) {
        unsigned n = g_array_index(list, PostcopyPage, i).start / PAGE;

        g_assert_cmpint(i < 2, ==, n == 10 || n == 11);
    }
    g_assert_cmpuint(stats().requests, ==, 1);
    g_assert_cmpuint(stats().ahead, ==, 3);
    g_assert_cmpuint(stats().ahead_missed, ==, 1);

    complete(10);
    complete(11);
    g_assert_false(postcopy_requests_wait_empty(requests, 1));
    complete(8);
    complete(12);
    g_assert_true(postcopy_requests_wait_empty(requests, 0));
}

static bool stopped;

static void *stop_fn(void *opaque)
{
    postcopy_requests_stop(requests);
    qatomic_set(&stopped, true);
    return NULL;
}

/* stop() waits for a thread that places a page; no other thread may begin to */
static void test_stop_waits(PostcopyWaiter *waiter, gconstpointer data)
{
    QemuThread thread;

    begin(0, NULL);
    g_assert_true(postcopy_requests_enter(requests));
    claim(0, 1, false, 1, UFFD);
    start_thread(&thread, stop_fn, NULL);
    while (begin(1, NULL) != POSTCOPY_PAGE_RECEIVED) {
        /* not stopped yet */
    }
    g_assert_false(received_map[0]);
    g_assert_cmpuint(outstanding(&(PostcopyOldest) { }), >, 0);
    complete(0);
    g_assert_false(postcopy_requests_enter(requests));
    /* The thread still has to wake waiters */
    g_usleep(10 * 1000);
    g_assert_false(qatomic_read(&stopped));
    postcopy_requests_leave(requests);
    qemu_thread_join(&thread);
    g_assert_true(received_map[0]);
    claim(1, 1, false, 1, DROP);
}

static void *complete_fn(void *opaque)
{
    g_usleep(20 * 1000);
    complete(1);
    return NULL;
}

/* The last page ends the wait long before its timeout */
static void test_wait_empty(PostcopyWaiter *waiter, gconstpointer data)
{
    int64_t begun_us = g_get_monotonic_time();
    QemuThread thread;

    begin(1, NULL);
    start_thread(&thread, complete_fn, NULL);
    g_assert_true(postcopy_requests_wait_empty(requests, 60 * 1000));
    g_assert_cmpint(g_get_monotonic_time() - begun_us, <, 30 * G_USEC_PER_SEC);
    qemu_thread_join(&thread);
}

static void test_kick(PostcopyWaiter *waiter, gconstpointer data)
{
    QemuThread thread;

    /* begin() forgets an earlier kick, but not a later one */
    postcopy_waiter_kick(waiter);
    begin(1, waiter);
    start_thread(&thread, wait_fn, waiter);
    g_usleep(20 * 1000);
    postcopy_waiter_kick(waiter);
    g_assert_null(qemu_thread_join(&thread));

    /* The page is still outstanding, without a waiter */
    g_assert_cmpuint(listed(1), ==, 1);
    g_assert_cmpint(begin(1, waiter), ==, POSTCOPY_PAGE_REQUESTED);
    postcopy_waiter_kick(waiter);
    g_assert_false(postcopy_request_wait(requests, waiter));
    complete(1);
    g_assert_cmpint(begin(1, waiter), ==, POSTCOPY_PAGE_RECEIVED);

    g_assert_cmpuint(stats().exits, ==, 1);
    g_assert_cmpuint(stats().populated, ==, 1);
    g_assert_cmpuint(stats().requests, ==, 1);
}

/* @vcpus_left and @kicked are atomic */
static int vcpus_left;
static uint64_t kicked;

static void *stress_vcpu(void *opaque)
{
    PostcopyWaiter *waiter = opaque;
    g_autoptr(GRand) rand = g_rand_new_with_seed(waiter - waiters);

    for (unsigned i = 0; i < PAGES; i++) {
        /* Half of the touches hit the same pages at the same time */
        unsigned page = i & 1 ? i : g_rand_int_range(rand, 0, PAGES);
        PostcopyPageState state;

        while ((state = begin(page, waiter)) != POSTCOPY_PAGE_RECEIVED) {
            if (state == POSTCOPY_PAGE_REQUEST) {
                send_page(page);
            }
            if (!postcopy_request_wait(requests, waiter)) {
                qatomic_inc(&kicked);
            }
        }
        g_assert_cmpuint(data[page], ==, page + 1);
    }
    qatomic_dec(&vcpus_left);
    return NULL;
}

static void *stress_kick(void *opaque)
{
    for (unsigned i = 0; qatomic_read(&vcpus_left); i++) {
        PostcopyOldest oldest = { };

        postcopy_waiter_kick(&waiters[i % VCPUS]);
        if (postcopy_requests_outstanding(requests, &oldest)) {
            g_assert(oldest.page.rb == block);
        }
        if (i % 64 == 0) {
            g_usleep(50);
        }
    }
    return NULL;
}

static void *stress_source(void *opaque)
{
    unsigned page;

    while ((page = receive_page()) < PAGES) {
        g_assert_cmpuint(++asked[page], ==, 1);
        data[page] = page + 1;
        complete(page);
    }
    return NULL;
}

static void test_stress(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        QemuThread vcpus[VCPUS], kick, source;
        unsigned n_asked = 0;

        memset(data, 0, sizeof(data));
        memset(asked, 0, sizeof(asked));
        vcpus_left = VCPUS;
        requests_start(NULL);
        start_thread(&source, stress_source, NULL);
        for (int i = 0; i < VCPUS; i++) {
            postcopy_waiter_init(&waiters[i]);
            start_thread(&vcpus[i], stress_vcpu, &waiters[i]);
        }
        start_thread(&kick, stress_kick, NULL);
        for (int i = 0; i < VCPUS; i++) {
            qemu_thread_join(&vcpus[i]);
        }
        qemu_thread_join(&kick);
        while (!postcopy_requests_wait_empty(requests, 1000)) {
            /* Pages whose vCPU was kicked, and then touched another page */
        }
        send_page(PAGES);
        qemu_thread_join(&source);

        /* Each requested page was requested once, after a touch */
        for (unsigned page = 0; page < PAGES; page++) {
            n_asked += asked[page];
        }
        g_assert_cmpuint(stats().requests, ==, n_asked);
        for (int i = 0; i < VCPUS; i++) {
            postcopy_waiter_destroy(&waiters[i]);
        }
        requests_end();
    }
    /* Otherwise kicks were not tested */
    g_assert_cmpuint(kicked, >, 0);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
#define TEST(name, fn) \
    g_test_add("/postcopy-request/" name, PostcopyWaiter, NULL, set_up, fn, \
               tear_down)
    TEST("once", test_once);
    TEST("claim", test_claim);
    TEST("claim-run", test_claim_run);
    TEST("run", test_run);
    TEST("defer", test_defer);
    TEST("again", test_again);
    TEST("ahead", test_ahead);
    g_test_add_func("/postcopy-request/meter", test_meter);
    g_test_add_func("/postcopy-request/waiters", test_waiters);
    TEST("stop-wakes", test_stop_wakes);
    TEST("stop-waits", test_stop_waits);
    TEST("wait-empty", test_wait_empty);
    TEST("kick", test_kick);
    g_test_add_func("/postcopy-request/stress", test_stress);
    return g_test_run();
}
