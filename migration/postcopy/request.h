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
 * One entry per host page that was requested and not received.  All functions
 * may be called by any thread, with or without the BQL.
 *
 * What "received" means belongs to the user, as PostcopyRequestOps; its
 * functions are called under the lock of the PostcopyRequests, hence
 *
 *     data placed -> received bit set -> waiters woken
 *
 * and who looks at the bit before it sleeps cannot miss its page.
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
    /* By which of several connections it is requested */
    unsigned channel;
} PostcopyPage;

typedef struct PostcopyRequestOps {
    bool (*received)(const PostcopyPage *page);
    void (*set_received)(const PostcopyPage *page);
    /* Or NULL.  Thread @tid waits for the page and nothing else */
    void (*missed)(const PostcopyPage *page, uint32_t tid);
    /* Or NULL.  A page has come that threads wait for */
    void (*come)(const PostcopyPage *page);
    /*
     * Wake the sender: a system call, so without the lock, but before
     * postcopy_requests_stop() ends.  NULL if no request is deferred.
     */
    void (*deferred)(void);
} PostcopyRequestOps;

/*
 * A thread that can wait for one host page at a time.  Waiters are never
 * freed while their PostcopyRequests lives.
 */
typedef struct PostcopyWaiter {
    /*
     * In place of a thread that waits: called once the page has come, by the
     * thread that has placed it, without the lock; or NULL.  Constant.
     */
    void (*come)(struct PostcopyWaiter *waiter);
    /* Set when the page has come, or the waiter was kicked */
    QemuEvent woken;
    /* Host page that is awaited, or NULL.  Under the lock. */
    void *page;
    /* It has come.  Release by who took it out of the list, acquire by us. */
    bool done;
    /* Atomic: set before @woken is */
    bool kicked;
    /* In the list of those to wake: belongs to who wakes, until done is set */
    QSLIST_ENTRY(PostcopyWaiter) next_woken;
} PostcopyWaiter;

/* A fault, as one of the two front ends learned of it */
typedef struct PostcopyFault {
    /* cpu_index of the vCPU that waits; -1 for any other thread */
    int cpu;
    /*
     * The kernel's ID of the thread; 0 if it is not known.  One that was
     * interrupted and comes back with the same fault is not counted again.
     */
    uint32_t tid;
    /*
     * Of a vCPU that has left KVM_RUN, which goes on to
     * postcopy_request_wait() unless the page has been received; NULL for
     * userfaultfd, whose threads wait in the kernel: if the page has been
     * received, the caller must wake them.
     */
    PostcopyWaiter *waiter;
    /* For userfaultfd: the page is in the file, but not mapped */
    bool minor;
    /* For userfaultfd: the first one that a read() returned */
    bool first;
    /* The caller has more of them, and flushes the requests after the last */
    bool more;
} PostcopyFault;

typedef enum PostcopyPlaceMethod {
    POSTCOPY_PLACE_COPY,
    POSTCOPY_PLACE_ZERO,
    POSTCOPY_PLACE_CONTINUE,
} PostcopyPlaceMethod;

/* Bucket n counts waits of [2^n, 2^(n+1)) us; the first and last take more */
#define POSTCOPY_METER_BUCKETS 24

typedef struct PostcopyLatency {
    uint64_t count;
    uint64_t total_ns;
} PostcopyLatency;

/* How long threads waited for pages */
typedef struct PostcopyMeter {
    uint64_t dist[POSTCOPY_METER_BUCKETS];
    /* PostcopyLatency by cpu_index, as far as there were any */
    GArray *vcpus;
    /* Of all other threads */
    PostcopyLatency others;
} PostcopyMeter;

typedef enum PostcopyPageState {
    /* The page is there, or postcopy is over */
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
 * All pages are there, or will never be.  After it returns, PostcopyRequestOps
 * are not called, postcopy_request_begin() says POSTCOPY_PAGE_RECEIVED, no page
 * can be claimed, nobody places one, and no vCPU waits.  Channels have ended.
 */
void postcopy_requests_stop(PostcopyRequests *r);

/*
 * A thread that is not a channel's places a page, and wakes who waits for it:
 * postcopy_requests_stop() waits for it to leave, so that what it uses stays.
 * Returns false if postcopy is over.
 */
bool postcopy_requests_enter(PostcopyRequests *r);
void postcopy_requests_leave(PostcopyRequests *r);

/**
 * postcopy_request_begin: a page was missed
 *
 * With POSTCOPY_PAGE_REQUEST, the request must be sent; if that fails, the
 * entry stays, and recovery sends it (postcopy_requests_list()).
 */
PostcopyPageState postcopy_request_begin(PostcopyRequests *r,
                                         const PostcopyPage *page,
                                         const PostcopyFault *fault);

/**
 * postcopy_requests_ahead: pages are likely to be missed soon
 *
 * @page: the first one
 * @n: how many there are, side by side, up to 64, all in the same block
 *
 * Returns which of them the caller has to request, as it does after
 * POSTCOPY_PAGE_REQUEST: bit 0 for @page, bit 1 for the next one.
 */
uint64_t postcopy_requests_ahead(PostcopyRequests *r, const PostcopyPage *page,
                                 unsigned n);

/* The page @n pages behind @page, or before it */
PostcopyPage postcopy_page_at(const PostcopyPage *page, int64_t n);

/*
 * vCPU @cpu has missed a page, and has placed it within @ns without
 * postcopy_request_begin(): count that.  Returns false if it has not: another
 * thread has claimed the page.
 */
bool postcopy_requests_served(PostcopyRequests *r, const PostcopyPage *page,
                              int cpu, uint64_t ns);

/* After POSTCOPY_PAGE_REQUEST: let the sender send it, not the caller */
void postcopy_request_defer(PostcopyRequests *r, const PostcopyPage *page);
/* Of the sender: take @most of these at most.  Returns how many there were. */
unsigned postcopy_requests_take_deferred(PostcopyRequests *r,
                                         PostcopyPage *pages, unsigned most);

/**
 * postcopy_request_wait: sleep until the page has come
 *
 * Returns false if the waiter was kicked before that.
 */
bool postcopy_request_wait(PostcopyRequests *r, PostcopyWaiter *waiter);

/**
 * postcopy_request_complete: pages were placed
 *
 * @page: the first one
 * @n: how many there are, side by side; claimed together
 * @method: how
 * @woke: the placement has woken userfaultfd waiters
 *
 * Marks the pages as received and wakes the waiters of vCPUs.  Returns whether
 * a userfaultfd waiter is known, which the caller has to wake with the kernel
 * unless the placement did.
 *
 * That is all who have to be woken: a thread whose fault is reported to
 * postcopy_request_begin() before this is known here; of one that is reported
 * later, postcopy_request_begin() says POSTCOPY_PAGE_RECEIVED, and who
 * reported it wakes it.  A fault that is never reported found the page.
 */
bool postcopy_request_complete(PostcopyRequests *r, const PostcopyPage *page,
                               unsigned n, PostcopyPlaceMethod method,
                               bool woke);

typedef struct PostcopyClaim {
    /*
     * The pages are not to be placed: they have been received, so that the
     * guest may use them, or somebody else has claimed them, or postcopy is
     * over.  The rest is not set then.
     */
    bool drop;
    /*
     * A userfaultfd waiter waits for one of them: if so, let the placement
     * wake.  Waiters that come after the answer are told by
     * postcopy_request_complete().
     */
    bool uffd;
    /*
     * A vCPU waits that has left KVM_RUN: it leaves once more unless its page
     * can be written to
     */
    bool vcpu;
} PostcopyClaim;

/**
 * postcopy_request_claim: become the only one to place pages
 *
 * @page: the first one
 * @n: how many there are, side by side; at least 1
 * @zero: they are all zeros; one that a vCPU waits for is claimed alone
 *
 * Returns of how many pages, from the first on, @claim tells.
 * postcopy_request_complete() or postcopy_request_unclaim() of the same pages
 * ends the claim.
 */
unsigned postcopy_request_claim(PostcopyRequests *r, const PostcopyPage *page,
                                unsigned n, bool zero, PostcopyClaim *claim);

/* Who has claimed pages, of which @page is the first, could not place them */
void postcopy_request_unclaim(PostcopyRequests *r, const PostcopyPage *page);

/* Who had claims has given up; waits for threads that place pages themselves */
void postcopy_requests_unclaim_all(PostcopyRequests *r);

/*
 * All outstanding pages, as PostcopyPage, and first those that are missed; the
 * caller unrefs the array
 */
GArray *postcopy_requests_list(PostcopyRequests *r);

/* Sleep until no page is outstanding, or for @ms; returns whether none is */
bool postcopy_requests_wait_empty(PostcopyRequests *r, int ms);

/*
 * Whether the page was received, or postcopy is over.  With the lock, since
 * received bits are freed when it is.
 */
bool postcopy_requests_received(PostcopyRequests *r, const PostcopyPage *page);

/**
 * postcopy_requests_run: extend a received page to the received ones around it
 *
 * @page: changed to the run, whose size is that of all its pages
 * @length: of its RAMBlock in bytes, 0 if that takes no part in postcopy
 * @window: the run stays within this aligned number of bytes, a power of two
 */
void postcopy_requests_run(PostcopyRequests *r, PostcopyPage *page,
                           ram_addr_t length, ram_addr_t window);

/* Sets all of @stats but .awaited and .oldest */
void postcopy_requests_stats(PostcopyRequests *r, PostcopyFaultStats *stats);

/* @meter: set to a copy, for postcopy_meter_destroy() */
void postcopy_requests_meter(PostcopyRequests *r, PostcopyMeter *meter);

void postcopy_meter_init(PostcopyMeter *meter);
void postcopy_meter_destroy(PostcopyMeter *meter);
/* A wait has ended.  @cpu: cpu_index of the vCPU that waited, or -1 */
void postcopy_meter_add(PostcopyMeter *meter, int cpu, uint64_t ns);

/* In ns; 0 if there was no wait */
uint64_t postcopy_latency_mean(const PostcopyLatency *latency);

/* Mean of all waits in ns; 0 if there was none */
uint64_t postcopy_meter_mean(const PostcopyMeter *meter);

typedef struct PostcopyOldest {
    PostcopyPage page;
    /* How long ago it was missed for the first time, or requested ahead */
    uint64_t age_ns;
} PostcopyOldest;

/* Returns how many pages are outstanding; @oldest is set unless it is 0 */
unsigned postcopy_requests_outstanding(PostcopyRequests *r,
                                       PostcopyOldest *oldest);

/* The same, about: takes no lock */
unsigned postcopy_requests_number(PostcopyRequests *r);

void postcopy_waiter_init(PostcopyWaiter *waiter);
void postcopy_waiter_destroy(PostcopyWaiter *waiter);

/*
 * End the wait of the last postcopy_request_begin().  Takes no lock.  A kick
 * from before it is forgotten, so its caller must look once, after
 * postcopy_request_begin(), for what the kicker wants.
 */
void postcopy_waiter_kick(PostcopyWaiter *waiter);

#endif
