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

static inline PostcopyPage page_of(unsigned page)
{
    return (PostcopyPage) {
        block, page * PAGE, host_memory + page * PAGE, PAGE
    };
}

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
static inline PostcopyRequests *requests_start(void (*deferred)(void))
{
    static PostcopyRequestOps ops = {
        .received = test_received,
        .set_received = test_set_received,
    };
    PostcopyRequests *r;

    ops.deferred = deferred;
    r = postcopy_requests_new(&ops);
    memset(received_map, 0, sizeof(received_map));
    postcopy_requests_start(r);
    return r;
}

G_DEFINE_AUTOPTR_CLEANUP_FUNC(PostcopyRequests, postcopy_requests_free)

static inline void complete(PostcopyRequests *r, unsigned n)
{
    PostcopyPage page = page_of(n);

    postcopy_request_complete(r, &page, 1, POSTCOPY_PLACE_COPY, false);
}

/* Page numbers, by a pipe or socket, whose order ThreadSanitizer understands */
static inline void send_page(int fd, unsigned page)
{
    g_assert_cmpint(write(fd, &page, sizeof(page)), ==, sizeof(page));
}

static inline unsigned receive_page(int fd)
{
    unsigned page;

    g_assert_cmpint(read(fd, &page, sizeof(page)), ==, sizeof(page));
    return page;
}

static inline void start_thread(QemuThread *thread, void *(*fn)(void *),
                                void *opaque)
{
    qemu_thread_create(thread, "test", fn, opaque, QEMU_THREAD_JOINABLE);
}

#endif
