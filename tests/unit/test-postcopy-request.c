/*
 * Unit test of migration/postcopy/request.c
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <glib-unix.h>
#include <sys/resource.h>
#include "qemu/atomic.h"
#include "qemu/bitmap.h"
#include "qemu/timer.h"

#define PAGES 512
#define VCPUS 8
#define ROUNDS 20

#include "postcopy-common.h"

/* Not atomic: see received_map */
static unsigned data[PAGES];
static unsigned asked[PAGES];
static unsigned sender_woken;
static PostcopyRequests *requests;

/* Called without the lock, and never while requests are being stopped */
static void test_deferred(void)
{
    PostcopyFaultStats stats;

    postcopy_requests_stats(requests, &stats);
    sender_woken++;
}

static PostcopyRequests *setup(void)
{
    memset(data, 0, sizeof(data));
    memset(asked, 0, sizeof(asked));
    requests = requests_start(test_deferred);
    return requests;
}

/* A fault of thread @tid, which is a vCPU's thread if it has a waiter */
static PostcopyPageState begin_by(PostcopyRequests *r, unsigned n,
                                  PostcopyWaiter *waiter, uint32_t tid)
{
    PostcopyPage page = page_of(n);
    PostcopyFault fault = {
        .cpu = waiter ? 0 : -1, .tid = tid, .waiter = waiter
    };

    return postcopy_request_begin(r, &page, &fault);
}

static PostcopyPageState begin(PostcopyRequests *r, unsigned page,
                               PostcopyWaiter *waiter)
{
    static uint32_t others = 1000;

    /* Each vCPU has its thread; each other fault has another thread */
    return begin_by(r, page, waiter,
                    waiter ? (uintptr_t)waiter : qatomic_inc_fetch(&others));
}

/* Counts how often each page is in the list of outstanding pages */
static void count(PostcopyRequests *r, unsigned *pages)
{
    g_autoptr(GArray) list = postcopy_requests_list(r);

    memset(pages, 0, PAGES * sizeof(*pages));
    for (guint i = 0; i < list->len; i++) {
        PostcopyPage *page = &g_array_index(list, PostcopyPage, i);

        check_page(page);
        pages[page->start / PAGE]++;
    }
}

/* Other threads have no outstanding pages */
static unsigned outstanding(PostcopyRequests *r, PostcopyOldest *oldest)
{
    unsigned n = postcopy_requests_outstanding(r, oldest);

    g_assert_cmpuint(postcopy_requests_number(r), ==, n);
    return n;
}

static void test_once(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyFaultStats counts;
    PostcopyOldest oldest;
    unsigned pages[PAGES];

    g_assert_cmpuint(outstanding(r, &oldest), ==, 0);
    g_assert_cmpint(begin(r, 1, NULL), ==, POSTCOPY_PAGE_REQUEST);
    g_assert_cmpint(begin(r, 1, NULL), ==, POSTCOPY_PAGE_REQUESTED);
    g_assert_cmpint(begin(r, 2, NULL), ==, POSTCOPY_PAGE_REQUEST);

    count(r, pages);
    g_assert_cmpuint(pages[1], ==, 1);
    g_assert_cmpuint(pages[2], ==, 1);
    g_assert_cmpuint(pages[3], ==, 0);

    g_assert_cmpuint(outstanding(r, &oldest), ==, 2);
    g_assert_cmpuint(oldest.page.start, ==, PAGE);
    complete(r, 1);
    g_assert_cmpuint(outstanding(r, &oldest), ==, 1);
    g_assert_cmpuint(oldest.page.start, ==, 2 * PAGE);
    g_assert_cmpint(begin(r, 1, NULL), ==, POSTCOPY_PAGE_RECEIVED);
    count(r, pages);
    g_assert_cmpuint(pages[1], ==, 0);
    g_assert_cmpuint(pages[2], ==, 1);

    /* A page is received without a request */
    complete(r, 3);
    g_assert_cmpint(begin(r, 3, NULL), ==, POSTCOPY_PAGE_RECEIVED);
    g_assert_false(postcopy_requests_wait_empty(r, 1));
    complete(r, 2);
    g_assert_true(postcopy_requests_wait_empty(r, 0));

    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.uffd, ==, 5);
    g_assert_cmpuint(counts.uffd_spurious, ==, 2);
    g_assert_cmpuint(counts.requests, ==, 2);
    g_assert_cmpuint(counts.exits, ==, 0);
    /* Pages 1 and 2 had waiters; faults on 1 and 3 were read late */
    g_assert_cmpuint(counts.wakes, ==, 4);
    g_assert_cmpuint(counts.wakes_saved, ==, 1);
    g_assert_cmpuint(counts.copied_bytes, ==, 3 * PAGE);
}

enum { DROP = 1, UFFD = 2, VCPU = 4 };

/* The first @claimed of @n pages can be claimed, with @flags */
static void claim(PostcopyRequests *r, unsigned first, unsigned n, bool zero,
                  unsigned claimed, unsigned flags)
{
    PostcopyPage page = page_of(first);
    PostcopyClaim c;

    g_assert_cmpuint(postcopy_request_claim(r, &page, n, zero, &c), ==,
                     claimed);
    g_assert_cmphex(c.drop ? DROP : c.uffd * UFFD + c.vcpu * VCPU, ==, flags);
}

/* One thread claims a page and fills it in place, once */
static void test_claim(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyPage page = page_of(0);
    PostcopyFaultStats counts;
    PostcopyWaiter waiter;

    postcopy_waiter_init(&waiter);
    claim(r, 0, 1, false, 1, 0);
    claim(r, 0, 1, false, 1, DROP);
    postcopy_requests_unclaim_all(r);
    begin(r, 0, NULL);
    claim(r, 0, 1, false, 1, UFFD);
    postcopy_request_unclaim(r, &page);
    begin(r, 0, &waiter);
    claim(r, 0, 1, false, 1, UFFD | VCPU);
    complete(r, 0);
    g_assert_true(postcopy_request_wait(r, &waiter));
    claim(r, 0, 1, false, 1, DROP);

    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.duplicates, ==, 2);
    postcopy_waiter_destroy(&waiter);
}

/* A run of pages is claimed as far as its pages need the same treatment */
static void test_claim_run(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyPage first = page_of(4);
    PostcopyFaultStats counts;
    PostcopyWaiter waiter;

    postcopy_waiter_init(&waiter);
    for (unsigned page = 4; page < 10; page++) {
        begin(r, page, page == 6 ? &waiter : NULL);
    }
    complete(r, 8);

    claim(r, 4, 6, false, 4, UFFD | VCPU);
    /* Another channel gets pages neither within nor around the claim */
    claim(r, 5, 1, false, 1, DROP);
    claim(r, 3, 7, false, 1, 0);
    complete(r, 3);
    claim(r, 8, 2, false, 1, DROP);

    g_assert_true(postcopy_request_complete(r, &first, 4, POSTCOPY_PLACE_COPY,
                                            true));
    g_assert_true(postcopy_request_wait(r, &waiter));
    for (unsigned page = 3; page < 9; page++) {
        g_assert_true(received_map[page]);
    }
    g_assert_false(received_map[9]);

    /* Zeros: a vCPU's page is claimed separately, since it must be writable */
    for (unsigned page = 20; page < 23; page++) {
        begin(r, page, page == 21 ? &waiter : NULL);
    }
    claim(r, 20, 3, true, 1, UFFD);
    claim(r, 21, 2, true, 1, VCPU);

    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.duplicates, ==, 2);
    g_assert_cmpuint(counts.copied_bytes, ==, 6 * PAGE);
    postcopy_requests_stop(r);
    postcopy_waiter_destroy(&waiter);
}

/* Received pages are populated together, and a missing page ends the run */
static void test_run(void)
{
    enum { WINDOW = 16 * PAGE };
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyPage run = page_of(20);

    for (int page = 0; page < PAGES; page++) {
        received_map[page] = page != 18 && page != 29;
    }
    postcopy_requests_run(r, &run, PAGES * PAGE, WINDOW);
    g_assert_cmpuint(run.start, ==, 19 * PAGE);
    g_assert(run.host == host_memory + 19 * PAGE);
    g_assert_cmpuint(run.size, ==, 10 * PAGE);

    /* The ends of the window, and of the block, end a run */
    run = page_of(40);
    postcopy_requests_run(r, &run, PAGES * PAGE, WINDOW);
    g_assert_cmpuint(run.start, ==, 32 * PAGE);
    g_assert_cmpuint(run.size, ==, WINDOW);
    run = page_of(40);
    postcopy_requests_run(r, &run, 42 * PAGE, WINDOW);
    g_assert_cmpuint(run.start, ==, 32 * PAGE);
    g_assert_cmpuint(run.size, ==, 10 * PAGE);

    /* Received bits may be gone */
    postcopy_requests_stop(r);
    run = page_of(40);
    postcopy_requests_run(r, &run, PAGES * PAGE, WINDOW);
    g_assert_cmpuint(run.start, ==, 40 * PAGE);
    g_assert_cmpuint(run.size, ==, PAGE);
}

/* The sender is woken once, and gets the pages that are still missing */
static void test_defer(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyPage page, pages[3];

    sender_woken = 0;
    for (unsigned n = 0; n < 3; n++) {
        page = page_of(n);
        g_assert_cmpint(begin(r, n, NULL), ==, POSTCOPY_PAGE_REQUEST);
        postcopy_request_defer(r, &page);
    }
    g_assert_cmpuint(sender_woken, ==, 1);
    complete(r, 1);
    g_assert_cmpuint(postcopy_requests_take_deferred(r, pages, 1), ==, 1);
    g_assert_cmpuint(pages[0].start, ==, 0);
    g_assert_cmpuint(postcopy_requests_take_deferred(r, pages, 3), ==, 1);
    g_assert_cmpuint(pages[0].start, ==, 2 * PAGE);
    g_assert_cmpuint(postcopy_requests_take_deferred(r, pages, 3), ==, 0);

    /* A request that is deferred after its page was received */
    begin(r, 3, NULL);
    complete(r, 3);
    page = page_of(3);
    postcopy_request_defer(r, &page);
    g_assert_cmpuint(sender_woken, ==, 1);

    begin(r, 4, NULL);
    page = page_of(4);
    postcopy_request_defer(r, &page);
    g_assert_cmpuint(sender_woken, ==, 2);
    postcopy_requests_stop(r);
    g_assert_cmpuint(postcopy_requests_take_deferred(r, pages, 3), ==, 0);
}

/* An interrupted wait that begins again is one fault */
static void test_again(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyFaultStats counts;
    PostcopyMeter meter, next;

    for (int i = 0; i < 1000; i++) {
        begin_by(r, 1, NULL, 77);
        begin_by(r, 1, NULL, 78);
    }
    complete(r, 1);
    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.uffd, ==, 2);
    g_assert_cmpuint(counts.requests, ==, 1);
    postcopy_requests_meter(r, &meter);
    /* The next postcopy counts from 0, and earlier meters stay */
    postcopy_requests_stop(r);
    postcopy_requests_start(r);
    postcopy_requests_meter(r, &next);
    g_assert_cmpuint(next.others.count, ==, 0);
    g_assert_cmpuint(meter.others.count, ==, 2);
    postcopy_meter_destroy(&next);
    postcopy_meter_destroy(&meter);
}

static void test_meter(void)
{
    PostcopyMeter meter;

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
    g_assert_cmpuint(postcopy_latency_mean(&g_array_index(meter.vcpus,
                                                          PostcopyLatency, 1)),
                     ==, 0);
    g_assert_cmpuint(postcopy_latency_mean(&g_array_index(meter.vcpus,
                                                          PostcopyLatency, 2)),
                     ==, 999);
    postcopy_meter_destroy(&meter);
}

static void test_stopped(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyWaiter waiter;

    postcopy_waiter_init(&waiter);
    postcopy_requests_stop(r);
    g_assert_cmpint(begin(r, 0, &waiter), ==, POSTCOPY_PAGE_RECEIVED);
    g_assert_cmpint(begin(r, 0, NULL), ==, POSTCOPY_PAGE_RECEIVED);

    postcopy_requests_start(r);
    g_assert_cmpint(begin(r, 0, NULL), ==, POSTCOPY_PAGE_REQUEST);
    postcopy_waiter_destroy(&waiter);
}

typedef struct Wait {
    PostcopyRequests *r;
    PostcopyWaiter waiter;
    bool placed;
} Wait;

static void *wait_fn(void *opaque)
{
    Wait *w = opaque;

    w->placed = postcopy_request_wait(w->r, &w->waiter);
    return NULL;
}

static void test_waiters(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyFaultStats counts;
    PostcopyMeter meter;
    QemuThread threads[VCPUS];
    Wait waits[VCPUS];

    for (int i = 0; i < VCPUS; i++) {
        waits[i].r = r;
        postcopy_waiter_init(&waits[i].waiter);
        g_assert_cmpint(begin(r, 7, &waits[i].waiter), ==,
                        i ? POSTCOPY_PAGE_REQUESTED : POSTCOPY_PAGE_REQUEST);
        start_thread(&threads[i], wait_fn, &waits[i]);
    }
    complete(r, 7);
    for (int i = 0; i < VCPUS; i++) {
        qemu_thread_join(&threads[i]);
        g_assert_true(waits[i].placed);
        postcopy_waiter_destroy(&waits[i].waiter);
    }

    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.exits, ==, VCPUS);
    g_assert_cmpuint(counts.requests, ==, 1);
    postcopy_requests_meter(r, &meter);
    g_assert_cmpuint(g_array_index(meter.vcpus, PostcopyLatency, 0).count, ==,
                     VCPUS);
    postcopy_meter_destroy(&meter);
}

/* Waiters of pages that will not be placed do not wait indefinitely */
static void test_stop_wakes(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyOldest oldest;
    QemuThread thread;
    Wait w = { .r = r };

    postcopy_waiter_init(&w.waiter);
    begin(r, 1, &w.waiter);
    start_thread(&thread, wait_fn, &w);
    g_assert_false(postcopy_requests_wait_empty(r, 1));
    postcopy_requests_stop(r);
    qemu_thread_join(&thread);
    g_assert_true(w.placed);
    g_assert_true(postcopy_requests_wait_empty(r, 0));
    g_assert_cmpuint(outstanding(r, &oldest), ==, 0);
    postcopy_waiter_destroy(&w.waiter);
}

/* Pages requested ahead are outstanding; they are requested anew last */
static void test_ahead(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyPage first = page_of(8);
    PostcopyFaultStats counts;
    g_autoptr(GArray) list = NULL;
    PostcopyOldest oldest;

    complete(r, 9);
    begin(r, 11, NULL);
    g_assert_cmphex(postcopy_requests_ahead(r, &first, 5), ==, 0x15);
    g_assert_cmpuint(outstanding(r, &oldest), ==, 4);
    g_assert_cmpuint(oldest.page.start, ==, 11 * PAGE);

    g_assert_cmpint(begin(r, 10, NULL), ==, POSTCOPY_PAGE_REQUESTED);
    list = postcopy_requests_list(r);
    g_assert_cmpuint(list->len, ==, 4);
    for (guint i = 0; i < list->len; i++) {
        unsigned n = g_array_index(list, PostcopyPage, i).start / PAGE;

        g_assert_cmpint(i < 2, ==, n == 10 || n == 11);
    }
    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.requests, ==, 1);
    g_assert_cmpuint(counts.ahead, ==, 3);
    g_assert_cmpuint(counts.ahead_missed, ==, 1);

    complete(r, 10);
    complete(r, 11);
    g_assert_false(postcopy_requests_wait_empty(r, 1));
    complete(r, 8);
    complete(r, 12);
    g_assert_true(postcopy_requests_wait_empty(r, 0));
}

static bool stopped;

static void *stop_fn(void *opaque)
{
    postcopy_requests_stop(opaque);
    qatomic_set(&stopped, true);
    return NULL;
}

/* stop() waits for a thread that places a page; no other thread may begin to */
static void test_stop_waits(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    QemuThread thread;

    begin(r, 0, NULL);
    g_assert_true(postcopy_requests_enter(r));
    claim(r, 0, 1, false, 1, UFFD);
    start_thread(&thread, stop_fn, r);
    while (begin(r, 1, NULL) != POSTCOPY_PAGE_RECEIVED) {
        /* not stopped yet */
    }
    g_assert_false(received_map[0]);
    g_assert_cmpuint(postcopy_requests_outstanding(r, &(PostcopyOldest) { }),
                     >, 0);
    complete(r, 0);
    g_assert_false(postcopy_requests_enter(r));
    /* The thread still has to wake waiters */
    g_usleep(10 * 1000);
    g_assert_false(qatomic_read(&stopped));
    postcopy_requests_leave(r);
    qemu_thread_join(&thread);
    g_assert_true(received_map[0]);
    claim(r, 1, 1, false, 1, DROP);
}

static void *complete_fn(void *opaque)
{
    g_usleep(20 * 1000);
    complete(opaque, 1);
    return NULL;
}

/* The last page ends the wait long before its timeout */
static void test_wait_empty(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    int64_t begun_us = g_get_monotonic_time();
    QemuThread thread;

    begin(r, 1, NULL);
    start_thread(&thread, complete_fn, r);
    g_assert_true(postcopy_requests_wait_empty(r, 60 * 1000));
    g_assert_cmpint(g_get_monotonic_time() - begun_us, <, 30 * G_USEC_PER_SEC);
    qemu_thread_join(&thread);
}

static void test_kick(void)
{
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyFaultStats counts;
    QemuThread thread;
    Wait w = { .r = r };
    unsigned pages[PAGES];

    postcopy_waiter_init(&w.waiter);

    /* begin() forgets an earlier kick, but not a later one */
    postcopy_waiter_kick(&w.waiter);
    begin(r, 1, &w.waiter);
    start_thread(&thread, wait_fn, &w);
    g_usleep(20 * 1000);
    postcopy_waiter_kick(&w.waiter);
    qemu_thread_join(&thread);
    g_assert_false(w.placed);

    /* The page is still outstanding, without a waiter */
    count(r, pages);
    g_assert_cmpuint(pages[1], ==, 1);
    g_assert_cmpint(begin(r, 1, &w.waiter), ==, POSTCOPY_PAGE_REQUESTED);
    postcopy_waiter_kick(&w.waiter);
    g_assert_false(postcopy_request_wait(r, &w.waiter));
    complete(r, 1);
    g_assert_cmpint(begin(r, 1, &w.waiter), ==, POSTCOPY_PAGE_RECEIVED);

    postcopy_requests_stats(r, &counts);
    g_assert_cmpuint(counts.exits, ==, 1);
    g_assert_cmpuint(counts.populated, ==, 1);
    g_assert_cmpuint(counts.requests, ==, 1);
    postcopy_waiter_destroy(&w.waiter);
}

/* The cost of a fault in this code; with "-m perf" */
static void test_perf(void)
{
    enum { FAULTS = 1000 * 1000 };
    g_autoptr(PostcopyRequests) r = setup();
    PostcopyMeter meter;
    int64_t begun = get_clock();
    double ns;

    for (unsigned i = 0; i < FAULTS; i++) {
        received_map[1] = false;
        begin(r, 1, NULL);
        complete(r, 1);
    }
    ns = (double)(get_clock() - begun) / FAULTS;
    g_test_minimized_result(ns, "%.0f ns: a fault in the request core", ns);

    postcopy_meter_init(&meter);
    begun = get_clock();
    for (unsigned i = 0; i < FAULTS; i++) {
        int64_t since = get_clock();

        postcopy_meter_add(&meter, i % VCPUS, get_clock() - since);
    }
    ns = (double)(get_clock() - begun) / FAULTS;
    g_test_minimized_result(ns, "%.0f ns: of which the meter", ns);
    postcopy_meter_destroy(&meter);
}

/*
 * Statistics of the lock of the requests, which protects them.  No other
 * QemuMutex is used while perf_metered is set.
 */
static struct {
    unsigned locks, contended;
    int64_t waited_ns, held_ns, since;
} perf_lock;
static bool perf_metered;

static void perf_lock_fn(QemuMutex *mutex, const char *file, int line)
{
    int64_t begun = get_clock();
    bool contended = qemu_mutex_trylock_impl(mutex, file, line);

    if (contended) {
        qemu_mutex_lock_impl(mutex, file, line);
    }
    perf_lock.since = get_clock();
    perf_lock.locks++;
    perf_lock.contended += contended;
    perf_lock.waited_ns += contended ? perf_lock.since - begun : 0;
}

/* Replaced by the linker's --wrap */
typeof(qemu_mutex_unlock_impl) __real_qemu_mutex_unlock_impl;
typeof(qemu_mutex_unlock_impl) __wrap_qemu_mutex_unlock_impl;

void __wrap_qemu_mutex_unlock_impl(QemuMutex *mutex, const char *file,
                                   const int line)
{
    if (qatomic_read(&perf_metered)) {
        perf_lock.held_ns += get_clock() - perf_lock.since;
    }
    __real_qemu_mutex_unlock_impl(mutex, file, line);
}

enum { PERF_FAULTS = 200 * 1000, PERF_THREADS = PAGES / 2 };

typedef struct Perf {
    PostcopyRequests *r;
    QemuEvent go;
    unsigned threads;
    /* The background's run of pages, or 0 */
    unsigned run;
    /* @vcpus and @vcpus_left are atomic */
    unsigned vcpus, vcpus_left;
    unsigned runs;
} Perf;

/* Acts as a vCPU that reads its own page: no other thread has to wake it */
static void *perf_vcpu(void *opaque)
{
    Perf *p = opaque;
    unsigned n = qatomic_fetch_inc(&p->vcpus);
    PostcopyPage page = page_of(n);
    PostcopyWaiter waiter;
    PostcopyClaim claimed;

    postcopy_waiter_init(&waiter);
    qemu_event_wait(&p->go);
    for (unsigned i = 0; i < PERF_FAULTS / p->threads; i++) {
        received_map[n] = false;
        begin(p->r, n, &waiter);
        postcopy_request_claim(p->r, &page, 1, false, &claimed);
        complete(p->r, n);
        postcopy_request_wait(p->r, &waiter);
    }
    postcopy_waiter_destroy(&waiter);
    qatomic_dec(&p->vcpus_left);
    return NULL;
}

static void *perf_background(void *opaque)
{
    Perf *p = opaque;
    PostcopyPage page = page_of(PERF_THREADS);
    PostcopyClaim claimed;

    qemu_event_wait(&p->go);
    while (p->run && qatomic_read(&p->vcpus_left)) {
        memset(received_map + PERF_THREADS, false, p->run);
        postcopy_request_claim(p->r, &page, p->run, false, &claimed);
        postcopy_request_complete(p->r, &page, p->run, POSTCOPY_PLACE_COPY,
                                  false);
        p->runs++;
    }
    return NULL;
}

/* Returns the duration in ns */
static int64_t perf_run(Perf *p)
{
    QemuThread vcpus[PERF_THREADS], background;
    int64_t begun;

    p->vcpus = p->runs = 0;
    p->vcpus_left = p->threads;
    qemu_event_reset(&p->go);
    for (unsigned i = 0; i < p->threads; i++) {
        start_thread(&vcpus[i], perf_vcpu, p);
    }
    start_thread(&background, perf_background, p);
    begun = get_clock();
    qemu_event_set(&p->go);
    for (unsigned i = 0; i < p->threads; i++) {
        qemu_thread_join(&vcpus[i]);
    }
    qemu_thread_join(&background);
    return get_clock() - begun;
}

/* The cost of threads for each other: they share the lock, but no page */
static void test_perf_threads(void)
{
    static const unsigned runs[] = { 0, 1, 8, 64 };
    Perf p = { };

    qemu_event_init(&p.go, false);
    for (p.threads = 1; p.threads <= PERF_THREADS; p.threads *= 4) {
        for (unsigned i = 0; i < ARRAY_SIZE(runs); i++) {
            g_autoptr(PostcopyRequests) r = p.r = setup();
            unsigned faults = PERF_FAULTS / p.threads * p.threads;
            struct rusage before, after;
            double ns, locks;

            p.run = runs[i];
            getrusage(RUSAGE_SELF, &before);
            ns = (double)perf_run(&p) / faults;
            getrusage(RUSAGE_SELF, &after);

            memset(&perf_lock, 0, sizeof(perf_lock));
            qemu_mutex_lock_func = perf_lock_fn;
            qatomic_set(&perf_metered, true);
            perf_run(&p);
            qatomic_set(&perf_metered, false);
            qemu_mutex_lock_func = qemu_mutex_lock_impl;

            locks = perf_lock.locks;
            g_test_minimized_result(ns, "%.0f ns a fault, %u threads, runs of "
                                    "%u pages: %.4f sleeps a fault; %.2f "
                                    "locks a fault, one is held for %.0f ns, "
                                    "%.2f %% are waited for, for %.0f ns",
                                    ns, p.threads, p.run,
                                    (double)(after.ru_nvcsw - before.ru_nvcsw) /
                                    faults,
                                    (locks - 2 * p.runs) / faults,
                                    perf_lock.held_ns / locks,
                                    100 * perf_lock.contended / locks,
                                    (double)perf_lock.waited_ns /
                                    MAX(1, perf_lock.contended));
        }
    }
    qemu_event_destroy(&p.go);
}

typedef struct Stress {
    PostcopyRequests *r;
    PostcopyWaiter waiters[VCPUS];
    int wire[2];
    int vcpus_left;
    uint64_t kicked;
} Stress;

typedef struct StressVCPU {
    Stress *s;
    unsigned index;
} StressVCPU;

static void *stress_vcpu(void *opaque)
{
    StressVCPU *vcpu = opaque;
    Stress *s = vcpu->s;
    PostcopyWaiter *waiter = &s->waiters[vcpu->index];
    g_autoptr(GRand) rand = g_rand_new_with_seed(vcpu->index);

    for (unsigned i = 0; i < PAGES; i++) {
        /* Half of the touches hit the same pages at the same time */
        unsigned page = i & 1 ? i : g_rand_int_range(rand, 0, PAGES);
        PostcopyPageState state;

        while ((state = begin(s->r, page, waiter)) != POSTCOPY_PAGE_RECEIVED) {
            if (state == POSTCOPY_PAGE_REQUEST) {
                send_page(s->wire[1], page);
            }
            if (!postcopy_request_wait(s->r, waiter)) {
                qatomic_inc(&s->kicked);
            }
        }
        g_assert_cmpuint(data[page], ==, page + 1);
    }
    qatomic_dec(&s->vcpus_left);
    return NULL;
}

static void *stress_kick(void *opaque)
{
    Stress *s = opaque;

    for (unsigned i = 0; qatomic_read(&s->vcpus_left); i++) {
        PostcopyOldest oldest = { };

        postcopy_waiter_kick(&s->waiters[i % VCPUS]);
        if (postcopy_requests_outstanding(s->r, &oldest)) {
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
    Stress *s = opaque;
    unsigned page;

    while ((page = receive_page(s->wire[0])) < PAGES) {
        g_assert_cmpuint(++asked[page], ==, 1);
        data[page] = page + 1;
        complete(s->r, page);
    }
    return NULL;
}

static void test_stress(void)
{
    uint64_t kicked = 0;

    for (int round = 0; round < ROUNDS; round++) {
        Stress s = { .r = setup(), .vcpus_left = VCPUS };
        QemuThread vcpus[VCPUS], kick, source;
        StressVCPU args[VCPUS];
        PostcopyFaultStats counts;
        unsigned n_asked = 0;

        g_assert_true(g_unix_open_pipe(s.wire, FD_CLOEXEC, NULL));
        for (int i = 0; i < VCPUS; i++) {
            postcopy_waiter_init(&s.waiters[i]);
            args[i] = (StressVCPU) { &s, i };
        }
        start_thread(&source, stress_source, &s);
        start_thread(&kick, stress_kick, &s);
        for (int i = 0; i < VCPUS; i++) {
            start_thread(&vcpus[i], stress_vcpu, &args[i]);
        }
        for (int i = 0; i < VCPUS; i++) {
            qemu_thread_join(&vcpus[i]);
        }
        qemu_thread_join(&kick);
        while (!postcopy_requests_wait_empty(s.r, 1000)) {
            /* Pages whose vCPU was kicked, and then touched another page */
        }
        send_page(s.wire[1], PAGES);
        qemu_thread_join(&source);

        postcopy_requests_stats(s.r, &counts);
        /* Each requested page was requested once, after a touch */
        for (unsigned page = 0; page < PAGES; page++) {
            n_asked += asked[page];
        }
        g_assert_cmpuint(counts.requests, ==, n_asked);
        kicked += s.kicked;
        for (int i = 0; i < VCPUS; i++) {
            postcopy_waiter_destroy(&s.waiters[i]);
        }
        close(s.wire[0]);
        close(s.wire[1]);
        postcopy_requests_free(s.r);
    }
    /* Otherwise kicks were not tested */
    g_assert_cmpuint(kicked, >, 0);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/postcopy-request/once", test_once);
    g_test_add_func("/postcopy-request/claim", test_claim);
    g_test_add_func("/postcopy-request/claim-run", test_claim_run);
    g_test_add_func("/postcopy-request/run", test_run);
    g_test_add_func("/postcopy-request/defer", test_defer);
    g_test_add_func("/postcopy-request/again", test_again);
    g_test_add_func("/postcopy-request/ahead", test_ahead);
    g_test_add_func("/postcopy-request/meter", test_meter);
    g_test_add_func("/postcopy-request/stopped", test_stopped);
    g_test_add_func("/postcopy-request/waiters", test_waiters);
    g_test_add_func("/postcopy-request/stop-wakes", test_stop_wakes);
    g_test_add_func("/postcopy-request/stop-waits", test_stop_waits);
    g_test_add_func("/postcopy-request/wait-empty", test_wait_empty);
    g_test_add_func("/postcopy-request/kick", test_kick);
    g_test_add_func("/postcopy-request/stress", test_stress);
    if (g_test_perf()) {
        g_test_add_func("/postcopy-request/perf", test_perf);
        g_test_add_func("/postcopy-request/perf-threads", test_perf_threads);
    }
    return g_test_run();
}
