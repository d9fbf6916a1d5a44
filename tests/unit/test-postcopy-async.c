/*
 * Unit test of migration/postcopy/async-tokens.c
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "../migration/postcopy/async-tokens.h"

#define PAGES 4096
#define VCPUS 4
#define ROUNDS 4

#include "postcopy-common.h"

static void count_kick(void *opaque)
{
    unsigned *kicks = opaque;

    qatomic_inc(kicks);
}

typedef struct Fixture {
    PostcopyAsyncVCPU *v;
    unsigned kicks;
} Fixture;

static void fixture_begin(Fixture *f, gconstpointer data)
{
    requests_start(NULL);
    f->v = postcopy_async_vcpus_new(1);
    f->kicks = 0;
    postcopy_async_attach(f->v, 0, count_kick, &f->kicks);
}

static void fixture_end(Fixture *f, gconstpointer data)
{
    /* No token was lost */
    g_assert_true(postcopy_async_idle(f->v));
    requests_end();
    /* vCPUs exist until QEMU exits; those of a test do not */
    g_free(f->v);
}

static PostcopyToken *ask(Fixture *f, unsigned page)
{
    PostcopyToken *t = postcopy_async_get(f->v);

    g_assert(t);
    g_assert_cmpint(begin_by(page, &t->waiter, 0), !=, POSTCOPY_PAGE_RECEIVED);
    return t;
}

static uint32_t announce(Fixture *f, unsigned page)
{
    PostcopyToken *t = ask(f, page);
    uint32_t number = t->number;

    postcopy_async_announced(t, true);
    return number;
}

static void no_token_is_sent(Fixture *f)
{
    g_assert_false(postcopy_async_pending(f->v));
    g_assert_cmpuint(postcopy_async_next(f->v), ==, 0);
}

/* Acts as the deliverer, and as a guest that takes the token at once */
static void send_and_take(Fixture *f, uint32_t number)
{
    g_assert_true(postcopy_async_pending(f->v));
    g_assert_cmpuint(postcopy_async_next(f->v), ==, number);
    postcopy_async_sent(f->v);
    g_assert_cmpuint(postcopy_async_next(f->v), !=, number);
    postcopy_async_taken(f->v);
}

static unsigned outstanding(PostcopyAsyncVCPU *v)
{
    PostcopyAsyncStats stats = { };

    postcopy_async_count(v, &stats);
    return stats.outstanding;
}

/* The guest is notified of the missing page, or not, before or after receipt */
static void test_announced(Fixture *f, gconstpointer data)
{
    for (unsigned page = 0; page < 4; page++) {
        bool told = page & 1, early = page & 2;
        PostcopyToken *t = ask(f, page);

        f->kicks = 0;
        /* All pages are placed, but a token is still being announced */
        g_assert_cmpuint(outstanding(f->v), ==, 0);
        g_assert_false(postcopy_async_idle(f->v));
        if (early) {
            /* The guest may have the exception already */
            complete(page);
            no_token_is_sent(f);
        }
        postcopy_async_announced(t, told);
        g_assert_cmpuint(outstanding(f->v), ==, told);
        if (!early) {
            no_token_is_sent(f);
            complete(page);
        }
        g_assert_cmpuint(f->kicks, ==, told && !early);
        if (told) {
            send_and_take(f, t->number);
        }
        no_token_is_sent(f);
        g_assert_cmpuint(outstanding(f->v), ==, 0);
        g_assert_true(postcopy_async_idle(f->v));
    }
}

static void test_withdraw(Fixture *f, gconstpointer data)
{
    uint32_t before = announce(f, 1), missing = announce(f, 2);
    uint32_t number = announce(f, 3);

    /* Its page was placed, and so was another token's page */
    complete(1);
    complete(3);
    g_assert_true(postcopy_async_withdraw(f->v, number));
    g_assert_false(postcopy_async_withdraw(f->v, number));
    send_and_take(f, before);
    no_token_is_sent(f);

    /* Its page was not placed */
    g_assert_true(postcopy_async_withdraw(f->v, missing));
    g_assert_cmpuint(outstanding(f->v), ==, 0);
    g_assert_false(postcopy_async_idle(f->v));
    number = announce(f, 2);
    complete(2);
    send_and_take(f, number);
    g_assert_true(postcopy_async_idle(f->v));

    /* The guest's slot has the token */
    number = announce(f, 4);
    complete(4);
    postcopy_async_sent(f->v);
    g_assert_false(postcopy_async_withdraw(f->v, number));
    postcopy_async_taken(f->v);
}

static void test_page_was_received(Fixture *f, gconstpointer data)
{
    PostcopyToken *t;

    complete(1);
    t = postcopy_async_get(f->v);
    g_assert_cmpint(begin_by(1, &t->waiter, 0), ==, POSTCOPY_PAGE_RECEIVED);
    postcopy_async_put(t);
}

static void test_order(Fixture *f, gconstpointer data)
{
    uint32_t a = announce(f, 1), b = announce(f, 2), c = announce(f, 3);

    complete(2);
    complete(3);
    complete(1);
    g_assert_cmpuint(postcopy_async_next(f->v), ==, b);
    postcopy_async_sent(f->v);
    /* While the slot is in use, the next token stays the same */
    g_assert_cmpuint(postcopy_async_next(f->v), ==, c);
    postcopy_async_slot_busy(f->v);
    g_assert_cmpuint(postcopy_async_next(f->v), ==, c);
    postcopy_async_taken(f->v);
    send_and_take(f, c);
    send_and_take(f, a);
}

/* Two tasks, or two faults of a task that was woken too early */
static void test_same_page(Fixture *f, gconstpointer data)
{
    uint32_t a = announce(f, 1), b = announce(f, 1);

    g_assert_cmpuint(a, !=, b);
    complete(1);
    send_and_take(f, a);
    send_and_take(f, b);
}

static void test_numbers(Fixture *f, gconstpointer data)
{
    g_autoptr(GHashTable) numbers = g_hash_table_new(NULL, NULL);
    uint32_t number;

    /* One token is in the guest's slot all the time */
    number = announce(f, 0);
    complete(0);
    postcopy_async_sent(f->v);

    for (unsigned i = 1; i < 1000; i++) {
        g_hash_table_remove_all(numbers);
        g_hash_table_add(numbers, GUINT_TO_POINTER(number));
        for (unsigned j = 1; j < POSTCOPY_ASYNC_TOKENS; j++) {
            uint32_t n = ask(f, j)->number;

            g_assert_cmphex(n & 0xfff, ==, 0xfff);
            g_assert_cmphex(n, !=, UINT32_MAX);
            g_assert_true(g_hash_table_add(numbers, GUINT_TO_POINTER(n)));
        }
        g_assert_null(postcopy_async_get(f->v));
        for (unsigned j = 0; j < POSTCOPY_ASYNC_TOKENS; j++) {
            PostcopyToken *t = &f->v->tokens[j];

            if (t->state == POSTCOPY_TOKEN_ASKED) {
                postcopy_async_announced(t, false);
            }
        }
        for (unsigned j = 1; j < POSTCOPY_ASYNC_TOKENS; j++) {
            complete(j);
            received_map[j] = false;
        }
    }
    postcopy_async_taken(f->v);
}

static void test_forget(Fixture *f, gconstpointer data)
{
    uint32_t number;

    announce(f, 1);
    announce(f, 2);
    announce(f, 3);
    complete(1);
    postcopy_async_sent(f->v);
    complete(2);
    postcopy_async_forget(f->v);
    no_token_is_sent(f);
    g_assert_cmpuint(outstanding(f->v), ==, 0);

    /* The guest starts anew */
    number = announce(f, 4);
    complete(3);
    no_token_is_sent(f);
    complete(4);
    /* The token in the slot was forgotten */
    postcopy_async_taken(f->v);
    send_and_take(f, number);
}

static void test_detach(Fixture *f, gconstpointer data)
{
    announce(f, 1);
    postcopy_async_detach(f->v);
    complete(1);
    g_assert_cmpuint(f->kicks, ==, 0);
    no_token_is_sent(f);
}

static PostcopyHalt *halt(Fixture *f, unsigned page, bool anew)
{
    bool is_anew;
    PostcopyHalt *h = postcopy_async_halt(f->v, pages[page].host, &is_anew);

    g_assert(h);
    g_assert(anew == is_anew);
    if (anew) {
        g_assert_cmpint(begin_by(page, &h->waiter, 0), !=,
                        POSTCOPY_PAGE_RECEIVED);
    }
    return h;
}

static void test_halt(Fixture *f, gconstpointer data)
{
    PostcopyHalt *h = halt(f, 1, true);

    g_assert_true(postcopy_async_halting(h));
    /* An interrupt handler misses another page, which is placed later */
    g_assert(halt(f, 1, false) == h);
    g_assert_true(postcopy_async_halting(halt(f, 2, true)));
    complete(1);
    g_assert_cmpuint(f->kicks, ==, 0);
    complete(2);
    g_assert_cmpuint(f->kicks, ==, 1);
    no_token_is_sent(f);

    /* The page is placed before the vCPU halts */
    h = halt(f, 3, true);
    complete(3);
    g_assert_false(postcopy_async_halting(h));

    /* A reset does not forget the pending kick */
    f->kicks = 0;
    g_assert_true(postcopy_async_halting(halt(f, 4, true)));
    postcopy_async_forget(f->v);
    complete(4);
    g_assert_cmpuint(f->kicks, ==, 1);
}

/* A halt takes no token, and its page can be announced later */
static void test_halt_and_tokens(Fixture *f, gconstpointer data)
{
    uint32_t number;
    bool anew;

    for (unsigned i = 0; i < POSTCOPY_ASYNC_TOKENS; i++) {
        announce(f, i);
    }
    g_assert_null(postcopy_async_get(f->v));
    g_assert_true(postcopy_async_halting(halt(f, 64, true)));
    for (unsigned i = 0; i < POSTCOPY_ASYNC_TOKENS; i++) {
        complete(i);
        send_and_take(f, postcopy_async_next(f->v));
    }
    g_assert_cmpuint(f->kicks, ==, POSTCOPY_ASYNC_TOKENS);
    number = announce(f, 64);
    g_assert_false(postcopy_async_idle(f->v));
    complete(64);
    send_and_take(f, number);

    /* The number of halts has a limit */
    for (unsigned i = 0; i < POSTCOPY_ASYNC_HALTS; i++) {
        halt(f, 100 + i, true);
    }
    g_assert_null(postcopy_async_halt(f->v, host_memory, &anew));
    for (unsigned i = 0; i < POSTCOPY_ASYNC_HALTS; i++) {
        complete(100 + i);
    }
}

/*
 * Threads: vCPUs with a guest each, which may be reset at any time, and a
 * thread that places the pages.
 */
typedef struct Guest {
    QemuThread thread;
    PostcopyAsyncVCPU *v;
    QemuEvent kicked;
    /* Tokens for which tasks sleep */
    GHashTable *sleeping;
    uint32_t slot;
    unsigned announced, woken, lost_by_reset, halts;
} Guest;

static void kick_guest(void *opaque)
{
    Guest *g = opaque;

    qemu_event_set(&g->kicked);
}

static void run_guest(Guest *g)
{
    if (postcopy_async_pending(g->v)) {
        if (g->slot) {
            postcopy_async_slot_busy(g->v);
        } else {
            g->slot = postcopy_async_next(g->v);
            g_assert(g->slot);
            postcopy_async_sent(g->v);
        }
    }
    if (g->slot && g_random_boolean()) {
        /* The guest must have this token */
        g_assert_true(g_hash_table_remove(g->sleeping,
                                          GUINT_TO_POINTER(g->slot)));
        g->slot = 0;
        g->woken++;
        postcopy_async_taken(g->v);
    }
}

static void *guest_thread(void *opaque)
{
    Guest *g = opaque;

    for (unsigned i = 0; i < PAGES / 2; i++) {
        unsigned page = (i * 7 + g->v->id * 1021) % PAGES;
        PostcopyPageState state;
        PostcopyToken *t = NULL;
        PostcopyHalt *h = NULL;
        bool halt = i % 5 == 0, anew;

        run_guest(g);
        if (i % 97 == 96) {
            g->lost_by_reset += g_hash_table_size(g->sleeping);
            g_hash_table_remove_all(g->sleeping);
            g->slot = 0;
            postcopy_async_forget(g->v);
        }
        if (halt) {
            qemu_event_reset(&g->kicked);
            h = postcopy_async_halt(g->v, pages[page].host, &anew);
            g_assert_true(h && anew);
        } else {
            t = postcopy_async_get(g->v);
        }
        if (!t && !h) {
            g_usleep(10);
            continue;
        }
        state = begin_by(page, h ? &h->waiter : &t->waiter, 0);
        if (state == POSTCOPY_PAGE_RECEIVED) {
            if (h) {
                postcopy_async_halt_put(h);
            } else {
                postcopy_async_put(t);
            }
            continue;
        }
        if (state == POSTCOPY_PAGE_REQUEST) {
            send_page(page);
        }
        if (halt) {
            if (postcopy_async_halting(h)) {
                g->halts++;
                qemu_event_wait(&g->kicked);
            }
            continue;
        }
        g_assert_true(g_hash_table_add(g->sleeping,
                                       GUINT_TO_POINTER(t->number)));
        g->announced++;
        postcopy_async_announced(t, true);
    }
    /* All tasks must be woken */
    while (g_hash_table_size(g->sleeping)) {
        run_guest(g);
        g_usleep(1);
    }
    return NULL;
}

static void *source_thread(void *opaque)
{
    unsigned page;

    while ((page = receive_page()) < PAGES) {
        complete(page);
    }
    return NULL;
}

static void test_threads(void)
{
    for (unsigned round = 0; round < ROUNDS; round++) {
        PostcopyAsyncVCPU *vcpus = postcopy_async_vcpus_new(VCPUS);
        Guest guests[VCPUS] = { };
        unsigned announced = 0;
        QemuThread source;

        requests_start(NULL);
        start_thread(&source, source_thread, NULL);
        for (unsigned i = 0; i < VCPUS; i++) {
            Guest *g = &guests[i];

            g->v = &vcpus[i];
            g->sleeping = g_hash_table_new(NULL, NULL);
            qemu_event_init(&g->kicked, false);
            postcopy_async_attach(g->v, i, kick_guest, g);
            start_thread(&g->thread, guest_thread, g);
        }
        for (unsigned i = 0; i < VCPUS; i++) {
            qemu_thread_join(&guests[i].thread);
        }
        /* Pages of halts that a token has ended are still outstanding */
        send_page(PAGES);
        qemu_thread_join(&source);
        for (unsigned i = 0; i < VCPUS; i++) {
            Guest *g = &guests[i];
            PostcopyAsyncStats counts = { };

            postcopy_async_count(g->v, &counts);
            g_assert_cmpuint(counts.announced, ==, g->announced);
            g_assert_cmpuint(counts.halted, ==, g->halts);
            g_assert_cmpuint(g->announced, ==, g->woken + g->lost_by_reset);
            announced += g->announced;
            g_hash_table_unref(g->sleeping);
            qemu_event_destroy(&g->kicked);
        }
        g_assert_cmpuint(announced, >, PAGES / 20);
        requests_end();
        g_free(vcpus);
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
#define TEST(name, fn) \
    g_test_add("/postcopy-async/" name, Fixture, NULL, fixture_begin, fn, \
               fixture_end)
    TEST("announced", test_announced);
    TEST("withdraw", test_withdraw);
    TEST("page-was-received", test_page_was_received);
    TEST("order", test_order);
    TEST("same-page", test_same_page);
    TEST("numbers", test_numbers);
    TEST("forget", test_forget);
    TEST("detach", test_detach);
    TEST("halt", test_halt);
    TEST("halt-and-tokens", test_halt_and_tokens);
    g_test_add_func("/postcopy-async/threads", test_threads);
    return g_test_run();
}
