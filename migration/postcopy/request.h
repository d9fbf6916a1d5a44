/*
 * Postcopy: outstanding page requests of the destination
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_REQUEST_H
#define MIGRATION_POSTCOPY_REQUEST_H

#include "qapi/qapi-types-migration.h"
#include "qemu/queue.h"
#include "qemu/thread.h"
#include "exec/cpu-common.h"

/*
 * One entry per host page that was requested and not received.  Any thread may
 * call all functions, with or without the BQL.
 *
 * The user defines "received", as PostcopyRequestOps.  Its functions, except
 * .deferred, are called with the lock of the PostcopyRequests held, hence
 *
 *     data placed -> received bit set -> waiters woken
 *
 * and a thread that checks the bit before it sleeps cannot miss its page.
 */
typedef struct PostcopyRequests PostcopyRequests;

/* A host page of the guest's memory */
typedef struct PostcopyPage {
    RAMBlock *rb;
    /* Byte offset in @rb, a multiple of @size */
    ram_addr_t start;
    /* Its address in this process */
    void *host;
    /* In bytes: the page size of @rb */
    size_t size;
    /* The connection on which it is requested, if there are several */
    unsigned channel;
} PostcopyPage;

typedef struct PostcopyRequestOps {
    bool (*received)(const PostcopyPage *page);
    void (*set_received)(const PostcopyPage *page);
    /* Or NULL.  Thread @tid begins to wait for only this page */
    void (*missed)(const PostcopyPage *page, uint32_t tid);
    /* Or NULL.  A page that threads have missed was received */
    void (*delivered)(const PostcopyPage *page);
    /*
     * Wake the sender.  A system call, so called without the lock, but before
     * postcopy_requests_stop() ends.  NULL if no request is deferred.
     */
    void (*deferred)(void);
} PostcopyRequestOps;

/*
 * A thread that can wait for one host page at a time.  Waiters are not freed
 * before their PostcopyRequests.
 */
typedef struct PostcopyWaiter {
    /*
     * NULL, or called in place of waking a thread once the page was received:
     * by the thread that has placed it, without the lock.  Constant.
     */
    void (*on_received)(struct PostcopyWaiter *waiter);
    /* Set when the page was received, or the waiter was kicked */
    QemuEvent woken;
    /* Host page that the thread waits for, or NULL.  Under the lock. */
    void *page;
    /* Page received: store-release by the waker, load-acquire by the waiter */
    bool done;
    /* Atomic; set before @woken */
    bool kicked;
    /* Link in the list of waiters to wake; the waker's until @done is set */
    QSLIST_ENTRY(PostcopyWaiter) next_woken;
} PostcopyWaiter;

/* A fault, as an exit or userfaultfd reports it */
typedef struct PostcopyFault {
    /* cpu_index of the vCPU that waits; -1 for any other thread */
    int cpu;
    /*
     * The kernel's ID of the thread; 0 if it is not known.  A thread that was
     * interrupted and repeats the same fault is not counted again.
     */
    uint32_t tid;
    /*
     * Waiter of a vCPU that has left KVM_RUN.  The vCPU then calls
     * postcopy_request_wait(), unless the page was received or the waiter has
     * on_received().  NULL for userfaultfd, whose threads wait in the kernel:
     * if the page was received, the caller must wake them.
     */
    PostcopyWaiter *waiter;
    /* For userfaultfd: the page is in the file, but not mapped */
    bool minor;
    /* For userfaultfd: the first fault that a read() returned */
    bool first;
    /* The caller has more faults, and flushes requests after the last one */
    bool flush_later;
} PostcopyFault;

typedef enum PostcopyPlaceMethod {
    POSTCOPY_PLACE_COPY,
    POSTCOPY_PLACE_ZERO,
    POSTCOPY_PLACE_CONTINUE,
} PostcopyPlaceMethod;

/* Bucket n counts waits of [2^n, 2^(n+1)) us; first and last are open-ended */
#define POSTCOPY_METER_BUCKETS 24

typedef struct PostcopyLatency {
    uint64_t count;
    uint64_t total_ns;
} PostcopyLatency;

/* How long threads waited for pages */
typedef struct PostcopyMeter {
    uint64_t dist[POSTCOPY_METER_BUCKETS];
    /* PostcopyLatency by cpu_index, up to the highest vCPU that has waited */
    GArray *vcpus;
    /* Waits of all other threads */
    PostcopyLatency others;
} PostcopyMeter;

typedef enum PostcopyPageState {
    /* The page was received, or postcopy is over */
    POSTCOPY_PAGE_RECEIVED,
    /* The caller is the first to miss the page and has to request it */
    POSTCOPY_PAGE_REQUEST,
    /* The page was requested already */
    POSTCOPY_PAGE_REQUESTED,
} PostcopyPageState;

PostcopyRequests *postcopy_requests_new(const PostcopyRequestOps *ops);
/* No thread may use @r any more */
void postcopy_requests_free(PostcopyRequests *r);

/* From here on pages may be missing; counts start at 0 */
void postcopy_requests_start(PostcopyRequests *r);

/*
 * All pages were received, or will never be.  Then no function of
 * PostcopyRequestOps is called, postcopy_request_begin() returns
 * POSTCOPY_PAGE_RECEIVED, no page can be claimed or placed, and no vCPU waits.
 * Called after channels have ended.
 */
void postcopy_requests_stop(PostcopyRequests *r);

/*
 * Bracket the placement of a page by a thread that is not a channel's.
 * postcopy_requests_stop() waits for the thread to leave, so that the data it
 * uses stays.  postcopy_requests_enter() returns false if postcopy is over.
 */
bool postcopy_requests_enter(PostcopyRequests *r);
void postcopy_requests_leave(PostcopyRequests *r);

/**
 * postcopy_request_begin: a page was missed
 *
 * With POSTCOPY_PAGE_REQUEST, the caller must send the request; if that fails,
 * the entry stays, and recovery sends it (postcopy_requests_list()).
 */
PostcopyPageState postcopy_request_begin(PostcopyRequests *r,
                                         const PostcopyPage *page,
                                         const PostcopyFault *fault);

/**
 * postcopy_requests_ahead: pages are likely to be missed soon
 *
 * @page: the first one
 * @n: number of neighbouring pages in the same block, up to 64
 *
 * Returns which pages the caller has to request, as after
 * POSTCOPY_PAGE_REQUEST: bit 0 for @page, bit 1 for the next one.
 */
uint64_t postcopy_requests_ahead(PostcopyRequests *r, const PostcopyPage *page,
                                 unsigned n);

/* The page @n pages behind @page, or before it if @n is negative */
PostcopyPage postcopy_page_at(const PostcopyPage *page, int64_t n);

/*
 * vCPU @cpu has missed a page, and has placed it in @ns nanoseconds without
 * postcopy_request_begin(): count that.  Returns false if the page was not
 * received: another thread has claimed it.
 */
bool postcopy_requests_served(PostcopyRequests *r, const PostcopyPage *page,
                              int cpu, uint64_t ns);

/* After POSTCOPY_PAGE_REQUEST: the sender, not the caller, sends the request */
void postcopy_request_defer(PostcopyRequests *r, const PostcopyPage *page);
/* For the sender: take up to @most deferred requests.  Returns how many. */
unsigned postcopy_requests_take_deferred(PostcopyRequests *r,
                                         PostcopyPage *pages, unsigned most);

/**
 * postcopy_request_wait: sleep until the page is received
 *
 * Returns false if the waiter was kicked first.
 */
bool postcopy_request_wait(PostcopyRequests *r, PostcopyWaiter *waiter);

/**
 * postcopy_request_complete: pages were placed
 *
 * @page: the first one
 * @n: number of neighbouring pages; claimed together
 * @method: how they were placed
 * @woke: the placement has woken userfaultfd waiters
 *
 * Marks the pages as received and wakes the waiters of vCPUs.  Returns whether
 * a userfaultfd waiter is known, which the caller has to wake by a system call
 * unless the placement did.
 *
 * No other thread has to be woken.  A fault that is reported to
 * postcopy_request_begin() before this is known here.  If it is reported later,
 * postcopy_request_begin() returns POSTCOPY_PAGE_RECEIVED, and its caller wakes
 * the thread.  A thread whose fault is never reported has found the page.
 */
bool postcopy_request_complete(PostcopyRequests *r, const PostcopyPage *page,
                               unsigned n, PostcopyPlaceMethod method,
                               bool woke);

typedef struct PostcopyClaim {
    /*
     * The pages are not to be placed: they were received, so that the guest may
     * use them, or another thread has claimed them, or postcopy is over.  @uffd
     * and @vcpu are not set then.
     */
    bool drop;
    /*
     * A userfaultfd waiter waits for one of the pages: the placement has to
     * wake it.  postcopy_request_complete() reports waiters that are added
     * later.
     */
    bool uffd;
    /*
     * A vCPU that has left KVM_RUN waits for one of the pages: it exits once
     * more unless the page is writable
     */
    bool vcpu;
} PostcopyClaim;

/**
 * postcopy_request_claim: become the only thread that places pages
 *
 * @page: the first one
 * @n: number of neighbouring pages; at least 1
 * @zero: they are all zeros; a page that a vCPU waits for is claimed alone
 *
 * Returns the number of pages, from @page on, that @claim describes.
 * postcopy_request_complete() or postcopy_request_unclaim() of the same pages
 * ends the claim.
 */
unsigned postcopy_request_claim(PostcopyRequests *r, const PostcopyPage *page,
                                unsigned n, bool zero, PostcopyClaim *claim);

/* The thread that has claimed pages, from @page on, could not place them */
void postcopy_request_unclaim(PostcopyRequests *r, const PostcopyPage *page);

/* Wait until threads have left (postcopy_requests_leave()); drop all claims */
void postcopy_requests_unclaim_all(PostcopyRequests *r);

/*
 * All outstanding pages as PostcopyPage, beginning with those that a thread has
 * missed; the caller unrefs the array
 */
GArray *postcopy_requests_list(PostcopyRequests *r);

/* Sleep until no page is outstanding, or @ms; returns whether none is */
bool postcopy_requests_wait_empty(PostcopyRequests *r, int ms);

/*
 * Whether the page was received, or postcopy is over.  Takes the lock, since
 * received bits are freed when postcopy is over.
 */
bool postcopy_requests_received(PostcopyRequests *r, const PostcopyPage *page);

/**
 * postcopy_requests_run: extend a received page to the received ones around it
 *
 * @page: changed to the run; @page->size to the size of all its pages
 * @length: of its RAMBlock in bytes, 0 if the block takes no part in postcopy
 * @window: the run stays in an aligned window of so many bytes, a power of two
 */
void postcopy_requests_run(PostcopyRequests *r, PostcopyPage *page,
                           ram_addr_t length, ram_addr_t window);

/* Sets all of @stats but .awaited and .oldest */
void postcopy_requests_stats(PostcopyRequests *r, PostcopyFaultStats *stats);

/* @meter: set to a copy, which the caller passes to postcopy_meter_destroy() */
void postcopy_requests_meter(PostcopyRequests *r, PostcopyMeter *meter);

void postcopy_meter_init(PostcopyMeter *meter);
void postcopy_meter_destroy(PostcopyMeter *meter);
/* Count a wait of @ns.  @cpu: cpu_index of the vCPU that waited, or -1 */
void postcopy_meter_add(PostcopyMeter *meter, int cpu, uint64_t ns);

/* In ns; 0 if there was no wait */
uint64_t postcopy_latency_mean(const PostcopyLatency *latency);

/* Mean of all waits in ns; 0 if there was none */
uint64_t postcopy_meter_mean(const PostcopyMeter *meter);

typedef struct PostcopyOldest {
    PostcopyPage page;
    /* Time since it was first missed, or requested ahead */
    uint64_t age_ns;
} PostcopyOldest;

/* Returns the number of outstanding pages; sets @oldest unless it is 0 */
unsigned postcopy_requests_outstanding(PostcopyRequests *r,
                                       PostcopyOldest *oldest);

/* The approximate number of outstanding pages; takes no lock */
unsigned postcopy_requests_number(PostcopyRequests *r);

void postcopy_waiter_init(PostcopyWaiter *waiter);
void postcopy_waiter_destroy(PostcopyWaiter *waiter);

/*
 * End the wait of the last postcopy_request_begin().  Takes no lock.
 * postcopy_request_begin() forgets earlier kicks, so its caller must check
 * once, after that call, for what the kicker wants.
 */
void postcopy_waiter_kick(PostcopyWaiter *waiter);

#endif
