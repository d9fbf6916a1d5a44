/*
 * Common code of unit tests of postcopy: a RAMBlock of PAGES pages, with
 * received bits only, and requests for its pages
 *
 * The test defines PAGES; tests with real memory also PAGE and host_memory.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TESTS_UNIT_POSTCOPY_COMMON_H
#define TESTS_UNIT_POSTCOPY_COMMON_H

#include <glib-unix.h>
#include "qemu/thread.h"
#include "../migration/postcopy/request.h"

#ifndef PAGE
#define PAGE 4096
/* Serves as distinct addresses only */
static char host_memory[PAGES * PAGE];
#endif

/*
 * Under the lock of the requests.  Not atomic, so that ThreadSanitizer finds a
 * violation of the order "placed, received, woken".
 */
static bool received_map[PAGES];
static RAMBlock *const block = (RAMBlock *)received_map;
static PostcopyPage pages[PAGES];
static PostcopyRequests *requests;
/* A pipe of page numbers, whose order ThreadSanitizer understands */
static int wire[2];

static inline void check_page(const PostcopyPage *page)
{
    g_assert(page->rb == block);
    g_assert_cmpuint((char *)page->host - host_memory, ==, page->start);
    g_assert_cmpuint(page->size, ==, PAGE);
}

static inline bool test_received(const PostcopyPage *page)
{
    check_page(page);
    return received_map[page->start / PAGE];
}

static inline void test_set_received(const PostcopyPage *page)
{
    received_map[page->start / PAGE] = true;
}

/* @deferred: NULL if the test defers no request */
static inline void requests_start(void (*deferred)(void))
{
    static PostcopyRequestOps ops = {
        .received = test_received,
        .set_received = test_set_received,
    };

    ops.deferred = deferred;
    requests = postcopy_requests_new(&ops);
    memset(received_map, 0, sizeof(received_map));
    for (unsigned n = 0; n < PAGES; n++) {
        pages[n] = (PostcopyPage) {
            block, n * PAGE, host_memory + n * PAGE, PAGE
        };
    }
    postcopy_requests_start(requests);
    g_assert_true(g_unix_open_pipe(wire, FD_CLOEXEC, NULL));
}

static inline void requests_end(void)
{
    close(wire[0]);
    close(wire[1]);
    postcopy_requests_free(requests);
}

/* A fault of thread @tid, which is a vCPU's thread if it has a waiter */
static inline PostcopyPageState begin_by(unsigned page, PostcopyWaiter *waiter,
                                         uint32_t tid)
{
    PostcopyFault fault = {
        .cpu = waiter ? 0 : -1, .tid = tid, .waiter = waiter
    };

    return postcopy_request_begin(requests, &pages[page], &fault);
}

static inline void complete(unsigned page)
{
    postcopy_request_complete(requests, &pages[page], 1, POSTCOPY_PLACE_COPY,
                              false);
}

static inline void send_page(unsigned page)
{
    g_assert_cmpint(write(wire[1], &page, sizeof(page)), ==, sizeof(page));
}

static inline unsigned receive_page(void)
{
    unsigned page;

    g_assert_cmpint(read(wire[0], &page, sizeof(page)), ==, sizeof(page));
    return page;
}

static inline void start_thread(QemuThread *thread, void *(*fn)(void *),
                                void *opaque)
{
    qemu_thread_create(thread, "test", fn, opaque, QEMU_THREAD_JOINABLE);
}

#endif
