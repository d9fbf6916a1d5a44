/*
 * Unit test of migration/postcopy/fetch-reader.c
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/lockable.h"
#include "../migration/postcopy/fetch-reader.h"

#define PAGES 512
#define END PAGES
#define VCPUS 4
#define ROUNDS 20
/* In the test of one turn after the other */
#define EXPECTED POSTCOPY_TURN_PAGES

#include "postcopy-common.h"

typedef struct Stress {
    PostcopyTurn turn;
    PostcopyRequests *r;
    PostcopyWaiter waiters[VCPUS];
    /* The destination's end, and the source's */
    int wire[2];
    /* Atomic */
    unsigned vcpus_left;
    unsigned kicked;
    bool ending;
    /*
     * Of whose turn it is.  Not atomic: ThreadSanitizer finds it if two have
     * the turn.
     */
    bool ended;
    unsigned read_by_vcpus;
    unsigned read_by_thread;
} Stress;

typedef struct VCPU {
    Stress *s;
    unsigned index;
} VCPU;

static unsigned stress_expected(PostcopyTurn *turn)
{
    Stress *s = container_of(turn, Stress, turn);

    return MAX(postcopy_requests_number_of(s->r, 0),
               qatomic_read(&s->ending));
}

static void place(Stress *s, unsigned n)
{
    PostcopyPage page = page_of(n);
    PostcopyClaim claim;

    postcopy_request_claim(s->r, &page, 1, false, &claim);
    if (!claim.drop) {
        complete(s->r, n);
    }
}

/* Whose turn it is */
static void stress_read(Stress *s)
{
    unsigned page = receive_page(s->wire[0]);

    if (page == END) {
        s->ended = true;
    } else {
        place(s, page);
    }
}

static void stress_wait(Stress *s, PostcopyWaiter *waiter)
{
    if (!postcopy_turn_take(&s->turn, waiter)) {
        return;
    }
    while (!postcopy_waiter_is_woken(waiter) && !s->ended &&
           postcopy_turn_sleep(&s->turn, waiter)) {
        stress_read(s);
        s->read_by_vcpus++;
    }
    postcopy_turn_pass(&s->turn, s->ended);
}

static void *stress_vcpu(void *opaque)
{
    VCPU *vcpu = opaque;
    Stress *s = vcpu->s;
    PostcopyWaiter *waiter = &s->waiters[vcpu->index];

    /* All walk through all pages, each in an order of its own */
    for (unsigned i = 0; i < PAGES; i++) {
        PostcopyPage page = page_of(i * (2 * vcpu->index + 1) % PAGES);
        PostcopyFault fault = {
            .cpu = vcpu->index, .tid = vcpu->index + 1, .waiter = waiter
        };
        PostcopyPageState state;

        while ((state = postcopy_request_begin(s->r, &page, &fault)) !=
               POSTCOPY_PAGE_RECEIVED) {
            if (state == POSTCOPY_PAGE_REQUEST) {
                send_page(s->wire[0], page.start / PAGE);
            }
            stress_wait(s, waiter);
            if (!postcopy_request_wait(s->r, waiter)) {
                qatomic_inc(&s->kicked);
            }
        }
    }
    qatomic_dec(&s->vcpus_left);
    return NULL;
}

/* Pages that no vCPU waits for, and others that come by another way */
static void *stress_others(void *opaque)
{
    Stress *s = opaque;
    PostcopyFault fault = { .cpu = -1, .tid = VCPUS + 1 };

    for (unsigned i = PAGES; i-- > 0; ) {
        PostcopyPage page = page_of(i);

        if (i % 16 == 0) {
            place(s, i);
        } else if (i % 4 == 0 && postcopy_request_begin(s->r, &page, &fault) ==
                                 POSTCOPY_PAGE_REQUEST) {
            send_page(s->wire[0], i);
            postcopy_turn_want(&s->turn);
        }
        g_usleep(10);
    }
    return NULL;
}

static void *stress_kick(void *opaque)
{
    Stress *s = opaque;

    for (unsigned i = 0; qatomic_read(&s->vcpus_left); i++) {
        postcopy_waiter_kick(&s->waiters[i % VCPUS]);
        g_usleep(50);
    }
    return NULL;
}

static void *stress_source(void *opaque)
{
    Stress *s = opaque;
    unsigned page;

    do {
        page = receive_page(s->wire[1]);
        send_page(s->wire[1], page);
    } while (page != END);
    return NULL;
}

static void *stress_thread(void *opaque)
{
    Stress *s = opaque;

    while (true) {
        while (!s->ended && postcopy_turn_offer(&s->turn)) {
            /* Others have had the turn */
        }
        if (s->ended) {
            return NULL;
        }
        stress_read(s);
        s->read_by_thread++;
    }
}

static void test_stress(void)
{
    unsigned by_vcpus = 0, by_thread = 0, kicked = 0;

    for (int round = 0; round < ROUNDS; round++) {
        Stress s = { .vcpus_left = VCPUS };
        QemuThread vcpus[VCPUS], source, thread, others, kick;
        VCPU args[VCPUS];

        s.r = requests_start(NULL);
        g_assert_cmpint(socketpair(AF_UNIX, SOCK_STREAM, 0, s.wire), ==, 0);
        postcopy_turn_init(&s.turn, stress_expected);
        postcopy_turn_start(&s.turn, s.wire[0]);
        for (int i = 0; i < VCPUS; i++) {
            postcopy_waiter_init(&s.waiters[i]);
            args[i] = (VCPU) { &s, i };
        }
        start_thread(&thread, stress_thread, &s);
        start_thread(&source, stress_source, &s);
        start_thread(&others, stress_others, &s);
        start_thread(&kick, stress_kick, &s);
        for (int i = 0; i < VCPUS; i++) {
            start_thread(&vcpus[i], stress_vcpu, &args[i]);
        }
        for (int i = 0; i < VCPUS; i++) {
            qemu_thread_join(&vcpus[i]);
        }
        qemu_thread_join(&others);
        qemu_thread_join(&kick);
        while (!postcopy_requests_wait_empty(s.r, 1000)) {
            /* What nobody waits for comes nevertheless */
        }
        send_page(s.wire[0], END);
        qatomic_set(&s.ending, true);
        postcopy_turn_want(&s.turn);
        qemu_thread_join(&thread);
        qemu_thread_join(&source);

        by_vcpus += s.read_by_vcpus;
        by_thread += s.read_by_thread;
        kicked += s.kicked;
        for (int i = 0; i < VCPUS; i++) {
            postcopy_waiter_destroy(&s.waiters[i]);
        }
        postcopy_turn_destroy(&s.turn);
        close(s.wire[0]);
        close(s.wire[1]);
        postcopy_requests_free(s.r);
    }
    /* Or nothing was tested */
    g_assert_cmpuint(by_vcpus, >, 0);
    g_assert_cmpuint(by_thread, >, 0);
    g_assert_cmpuint(kicked, >, 0);
}

static unsigned now_expected;

static unsigned order_expected(PostcopyTurn *turn)
{
    return now_expected;
}

typedef struct Order {
    PostcopyTurn turn;
    PostcopyWaiter waiter;
    bool taken;
} Order;

static void *order_take(void *opaque)
{
    Order *o = opaque;

    o->taken = postcopy_turn_take(&o->turn, &o->waiter);
    return NULL;
}

static void order_begin(Order *o, QemuThread *thread)
{
    qemu_event_reset(&o->waiter.woken);
    qatomic_set(&o->waiter.kicked, false);
    start_thread(thread, order_take, o);
    while (true) {
        QEMU_LOCK_GUARD(&o->turn.lock);
        if (!QTAILQ_EMPTY(&o->turn.waiting)) {
            return;
        }
    }
}

static void test_order(void)
{
    PostcopyWaiter first = { };
    Order o = { };
    QemuThread thread;

    postcopy_waiter_init(&first);
    postcopy_waiter_init(&o.waiter);
    postcopy_turn_init(&o.turn, order_expected);

    /* Without a file descriptor, it is always the thread's */
    now_expected = 0;
    g_assert_false(postcopy_turn_offer(&o.turn));
    g_assert(o.turn.reader == &o.turn.thread);

    /* Or as long as no vCPU has waited */
    postcopy_turn_start(&o.turn, STDIN_FILENO);
    g_assert_false(postcopy_turn_offer(&o.turn));
    g_assert(o.turn.reader == &o.turn.thread);

    postcopy_turn_pass(&o.turn, false);
    g_assert_null(o.turn.reader);

    /* Who comes first reads, and then who waits longest */
    g_assert_true(postcopy_turn_take(&o.turn, &first));
    order_begin(&o, &thread);
    now_expected = EXPECTED;
    postcopy_turn_pass(&o.turn, false);
    qemu_thread_join(&thread);
    g_assert_true(o.taken);

    /* Nobody waits, but something is to come */
    postcopy_turn_pass(&o.turn, false);
    g_assert(o.turn.reader == &o.turn.thread);

    /* Of much, the thread keeps the turn, and of little it does not */
    order_begin(&o, &thread);
    now_expected = POSTCOPY_TURN_PAGES + 1;
    g_assert_false(postcopy_turn_offer(&o.turn));
    now_expected = EXPECTED;
    postcopy_turn_pass(&o.turn, false);
    qemu_thread_join(&thread);
    g_assert_true(o.taken);

    /* One that is kicked does not get it, nor what only the thread can read */
    now_expected = 0;
    postcopy_turn_pass(&o.turn, false);
    g_assert_true(postcopy_turn_take(&o.turn, &first));
    order_begin(&o, &thread);
    postcopy_waiter_kick(&o.waiter);
    postcopy_turn_pass(&o.turn, false);
    qemu_thread_join(&thread);
    g_assert_false(o.taken);
    g_assert_null(o.turn.reader);
    g_assert_true(postcopy_turn_take(&o.turn, &first));
    order_begin(&o, &thread);
    postcopy_turn_pass(&o.turn, true);
    g_assert(o.turn.reader == &o.turn.thread);
    postcopy_waiter_kick(&o.waiter);
    qemu_thread_join(&thread);
    g_assert_false(o.taken);

    /* The thread is wanted, and has the turn if nobody has */
    postcopy_turn_pass(&o.turn, false);
    g_assert_null(o.turn.reader);
    postcopy_turn_want(&o.turn);
    g_assert(o.turn.reader == &o.turn.thread);

    postcopy_turn_destroy(&o.turn);
    postcopy_waiter_destroy(&o.waiter);
    postcopy_waiter_destroy(&first);
}

static void *sleep_run(void *opaque)
{
    Order *o = opaque;

    o->taken = postcopy_turn_sleep(&o->turn, &o->waiter);
    return NULL;
}

/* Nothing comes: only a kick ends the sleep of whose turn it is */
static void test_kick(void)
{
    QemuThread thread;
    Order o = { };
    int wire[2];

    g_assert_cmpint(socketpair(AF_UNIX, SOCK_STREAM, 0, wire), ==, 0);
    postcopy_waiter_init(&o.waiter);
    postcopy_turn_init(&o.turn, order_expected);
    postcopy_turn_start(&o.turn, wire[0]);
    now_expected = 0;
    postcopy_turn_pass(&o.turn, false);
    g_assert_true(postcopy_turn_take(&o.turn, &o.waiter));

    for (int i = 0; i < 100; i++) {
        qatomic_set(&o.waiter.kicked, false);
        start_thread(&thread, sleep_run, &o);
        if (i % 2) {
            g_usleep(100);
        }
        postcopy_waiter_kick(&o.waiter);
        qemu_thread_join(&thread);
        g_assert_false(o.taken);
    }
    qatomic_set(&o.waiter.kicked, false);
    send_page(wire[1], END);
    g_assert_true(postcopy_turn_sleep(&o.turn, &o.waiter));

    postcopy_turn_destroy(&o.turn);
    postcopy_waiter_destroy(&o.waiter);
    close(wire[0]);
    close(wire[1]);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/postcopy-turn/order", test_order);
    g_test_add_func("/postcopy-turn/kick", test_kick);
    g_test_add_func("/postcopy-turn/stress", test_stress);
    return g_test_run();
}
