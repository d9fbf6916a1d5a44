/*
 * Postcopy: outstanding page requests of the destination
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/host-utils.h"
#include "qemu/lockable.h"
#include "qemu/queue.h"
#include "qemu/timer.h"
#include "request.h"

/* One thread that misses a page */
typedef struct PostcopyMiss {
    QSLIST_ENTRY(PostcopyMiss) next;
    int cpu;
    uint32_t tid;
    int64_t since;
    /* The vCPU's, in postcopy_request_wait() or about to call it; or NULL */
    PostcopyWaiter *waiter;
} PostcopyMiss;

typedef struct PostcopyRequest {
    QSLIST_ENTRY(PostcopyRequest) next_free;
    PostcopyPage page;
    /* To be sent; in the list PostcopyRequests.deferred */
    bool deferred;
    QTAILQ_ENTRY(PostcopyRequest) next_deferred;
    /* When it was first missed; before that, when it was requested ahead */
    int64_t since;
    QSLIST_HEAD(, PostcopyMiss) misses;
    /* A thread waits in userfaultfd */
    bool uffd;
    /* It was requested before any thread missed it */
    bool ahead;
} PostcopyRequest;

/* Addresses of pages claimed together: of the first, and behind the last */
typedef struct PostcopyClaimed {
    void *start;
    void *end;
} PostcopyClaimed;

struct PostcopyRequests {
    const PostcopyRequestOps *ops;

    /* Protects @active to @meter, and received bits of pages while @active */
    QemuMutex lock;
    bool active;
    /* Address of a host page -> PostcopyRequest */
    GHashTable *pages;
    /* Number of entries in @pages: atomic, read without @lock */
    unsigned number;
    /* Entries that the sender is to send */
    QTAILQ_HEAD(, PostcopyRequest) deferred;
    /* PostcopyClaimed of pages that are being placed, one for each thread */
    GArray *claims;
    /* Threads between postcopy_requests_enter() and _leave() */
    unsigned inside;
    /* @pages has become empty, or @inside 0 */
    QemuCond empty;
    /*
     * @free_requests and @free_misses: a fault allocates no memory.  A request
     * is not part of its first miss: its vCPU may be kicked and miss another
     * page.
     */
    QSLIST_HEAD(, PostcopyRequest) free_requests;
    QSLIST_HEAD(, PostcopyMiss) free_misses;
    PostcopyFaultStats stats;
    PostcopyMeter meter;
};

typedef QSLIST_HEAD(, PostcopyWaiter) PostcopyWaiterList;

void postcopy_meter_init(PostcopyMeter *meter)
{
    *meter = (PostcopyMeter) {
        .vcpus = g_array_new(false, true, sizeof(PostcopyLatency)),
    };
}

void postcopy_meter_destroy(PostcopyMeter *meter)
{
    g_array_unref(meter->vcpus);
}

void postcopy_meter_add(PostcopyMeter *meter, int cpu, uint64_t ns)
{
    uint64_t us = ns / SCALE_US;
    PostcopyLatency *latency = &meter->others;

    if (cpu >= 0) {
        if (cpu >= meter->vcpus->len) {
            g_array_set_size(meter->vcpus, cpu + 1);
        }
        latency = &g_array_index(meter->vcpus, PostcopyLatency, cpu);
    }
    latency->count++;
    latency->total_ns += ns;
    meter->dist[MIN(us ? 63 - clz64(us) : 0, POSTCOPY_METER_BUCKETS - 1)]++;
}

uint64_t postcopy_latency_mean(const PostcopyLatency *latency)
{
    return latency->count ? latency->total_ns / latency->count : 0;
}

uint64_t postcopy_meter_mean(const PostcopyMeter *meter)
{
    PostcopyLatency all = meter->others;

    for (guint i = 0; i < meter->vcpus->len; i++) {
        PostcopyLatency *l = &g_array_index(meter->vcpus, PostcopyLatency, i);

        all.count += l->count;
        all.total_ns += l->total_ns;
    }
    return postcopy_latency_mean(&all);
}

static PostcopyRequest *postcopy_request_new(PostcopyRequests *r,
                                    const PostcopyPage *page)
{
    PostcopyRequest *req = QSLIST_FIRST(&r->free_requests);

    if (req) {
        QSLIST_REMOVE_HEAD(&r->free_requests, next_free);
    } else {
        req = g_new(PostcopyRequest, 1);
    }
    *req = (PostcopyRequest) { .page = *page };
    req->since = get_clock();
    g_hash_table_insert(r->pages, page->host, req);
    qatomic_set(&r->number, r->number + 1);
    return req;
}

static PostcopyMiss *postcopy_miss_new(PostcopyRequests *r)
{
    PostcopyMiss *miss = QSLIST_FIRST(&r->free_misses);

    if (miss) {
        QSLIST_REMOVE_HEAD(&r->free_misses, next);
    } else {
        miss = g_new(PostcopyMiss, 1);
    }
    return miss;
}

/*
 * Take the entry of a page out.  Its waiters go to @wake, for
 * postcopy_wake_waiters() without the lock.
 */
static void postcopy_request_end(PostcopyRequests *r, PostcopyRequest *req,
                        PostcopyWaiterList *wake)
{
    PostcopyMiss *miss;

    while ((miss = QSLIST_FIRST(&req->misses))) {
        QSLIST_REMOVE_HEAD(&req->misses, next);
        if (miss->waiter) {
            miss->waiter->page = NULL;
            QSLIST_INSERT_HEAD(wake, miss->waiter, next_woken);
        }
        QSLIST_INSERT_HEAD(&r->free_misses, miss, next);
    }
    if (req->deferred) {
        QTAILQ_REMOVE(&r->deferred, req, next_deferred);
    }
    qatomic_set(&r->number, r->number - 1);
    QSLIST_INSERT_HEAD(&r->free_requests, req, next_free);
}

/* Makes system calls: called without the lock */
static void postcopy_wake_waiters(PostcopyWaiterList *wake)
{
    PostcopyWaiter *waiter, *next;

    QSLIST_FOREACH_SAFE(waiter, wake, next_woken, next) {
        if (waiter->on_received) {
            waiter->on_received(waiter);
            continue;
        }
        /*
         * Store-release: @next was read before.  From here on the waiter's
         * thread may continue.  The event may reach it while it waits for
         * another page: it then checks once too often.
         */
        qatomic_store_release(&waiter->done, true);
        qemu_event_set(&waiter->woken);
    }
}

PostcopyPage postcopy_page_at(const PostcopyPage *page, int64_t n)
{
    ssize_t bytes = n * (ssize_t)page->size;

    return (PostcopyPage) {
        page->rb, page->start + bytes, page->host + bytes, page->size,
        page->channel
    };
}

PostcopyRequests *postcopy_requests_new(const PostcopyRequestOps *ops)
{
    PostcopyRequests *r = g_new0(PostcopyRequests, 1);

    r->ops = ops;
    qemu_mutex_init(&r->lock);
    qemu_cond_init(&r->empty);
    r->pages = g_hash_table_new(NULL, NULL);
    r->claims = g_array_new(false, false, sizeof(PostcopyClaimed));
    QTAILQ_INIT(&r->deferred);
    postcopy_meter_init(&r->meter);
    return r;
}

void postcopy_requests_free(PostcopyRequests *r)
{
    PostcopyWaiterList none = QSLIST_HEAD_INITIALIZER(none);
    GHashTableIter iter;
    gpointer value;
    PostcopyRequest *req;
    PostcopyMiss *miss;

    g_hash_table_iter_init(&iter, r->pages);
    while (g_hash_table_iter_next(&iter, NULL, &value)) {
        postcopy_request_end(r, value, &none);
    }
    while ((req = QSLIST_FIRST(&r->free_requests))) {
        QSLIST_REMOVE_HEAD(&r->free_requests, next_free);
        g_free(req);
    }
    while ((miss = QSLIST_FIRST(&r->free_misses))) {
        QSLIST_REMOVE_HEAD(&r->free_misses, next);
        g_free(miss);
    }
    g_hash_table_unref(r->pages);
    g_array_unref(r->claims);
    postcopy_meter_destroy(&r->meter);
    qemu_cond_destroy(&r->empty);
    qemu_mutex_destroy(&r->lock);
    g_free(r);
}

void postcopy_requests_start(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    r->stats = (PostcopyFaultStats) { };
    postcopy_meter_destroy(&r->meter);
    postcopy_meter_init(&r->meter);
    r->active = true;
}

/*
 * Drop the claims of channels that have ended within a page.  Called with the
 * lock, which this drops while it waits for threads inside to leave.
 */
static void postcopy_claims_drop(PostcopyRequests *r)
{
    while (r->inside) {
        qemu_cond_wait(&r->empty, &r->lock);
    }
    g_array_set_size(r->claims, 0);
}

void postcopy_requests_stop(PostcopyRequests *r)
{
    PostcopyWaiterList wake = QSLIST_HEAD_INITIALIZER(wake);

    WITH_QEMU_LOCK_GUARD(&r->lock) {
        GHashTableIter iter;
        gpointer value;

        r->active = false;
        postcopy_claims_drop(r);
        g_hash_table_iter_init(&iter, r->pages);
        while (g_hash_table_iter_next(&iter, NULL, &value)) {
            postcopy_request_end(r, value, &wake);
        }
        g_hash_table_remove_all(r->pages);
    }
    postcopy_wake_waiters(&wake);
}

bool postcopy_requests_enter(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    if (r->active) {
        r->inside++;
    }
    return r->active;
}

void postcopy_requests_leave(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    if (!--r->inside) {
        qemu_cond_broadcast(&r->empty);
    }
}

/* Returns false if @fault is repeated: the thread was kicked, and is back */
static bool postcopy_request_add(PostcopyRequests *r, PostcopyRequest *req,
                        const PostcopyFault *fault)
{
    bool repeated = false;
    PostcopyMiss *miss;

    /* One thread may have several misses, each with its own waiter */
    QSLIST_FOREACH(miss, &req->misses, next) {
        if (miss->tid == fault->tid && (!miss->waiter || !fault->waiter ||
                                        miss->waiter == fault->waiter)) {
            repeated = true;
            break;
        }
    }
    if (!repeated) {
        miss = postcopy_miss_new(r);
        *miss = (PostcopyMiss) {
            .cpu = fault->cpu, .tid = fault->tid, .since = get_clock()
        };
        QSLIST_INSERT_HEAD(&req->misses, miss, next);
    }
    if (fault->waiter) {
        miss->waiter = fault->waiter;
    } else {
        req->uffd = true;
    }
    return !repeated;
}

PostcopyPageState postcopy_request_begin(PostcopyRequests *r,
                                         const PostcopyPage *page,
                                         const PostcopyFault *fault)
{
    PostcopyWaiter *waiter = fault->waiter;
    PostcopyPageState state = POSTCOPY_PAGE_REQUESTED;
    bool received, repeated = false;
    PostcopyRequest *req;

    if (waiter) {
        qemu_event_reset(&waiter->woken);
        waiter->done = false;
        /* If this forgets a kick, thread_kicked is visible: xchg acquires */
        qatomic_xchg(&waiter->kicked, false);
    }

    QEMU_LOCK_GUARD(&r->lock);

    received = !r->active || r->ops->received(page);
    if (!received) {
        req = g_hash_table_lookup(r->pages, page->host);
        if (!req) {
            req = postcopy_request_new(r, page);
            r->stats.requests++;
            state = POSTCOPY_PAGE_REQUEST;
        } else if (req->ahead) {
            req->ahead = false;
            req->since = get_clock();
            r->stats.ahead_missed++;
        }
        repeated = !postcopy_request_add(r, req, fault);
        if (!repeated && r->ops->missed && !(waiter && waiter->on_received)) {
            r->ops->missed(page, fault->tid);
        }
    }

    if (waiter) {
        waiter->page = received ? NULL : page->host;
        r->stats.populated += received;
        r->stats.exits += !received && !repeated;
    } else {
        r->stats.uffd += !repeated;
        r->stats.uffd_minor += fault->minor;
        r->stats.uffd_reads += fault->first;
        r->stats.uffd_spurious += received;
        r->stats.wakes += received;
    }
    return received ? POSTCOPY_PAGE_RECEIVED : state;
}

uint64_t postcopy_requests_ahead(PostcopyRequests *r, const PostcopyPage *page,
                                 unsigned n)
{
    uint64_t mask = 0;

    QEMU_LOCK_GUARD(&r->lock);
    for (unsigned i = 0; i < n && r->active; i++) {
        PostcopyPage each = postcopy_page_at(page, i);
        PostcopyRequest *req;

        if (r->ops->received(&each) ||
            g_hash_table_contains(r->pages, each.host)) {
            continue;
        }
        req = postcopy_request_new(r, &each);
        req->ahead = true;
        r->stats.ahead++;
        mask |= 1ull << i;
    }
    return mask;
}

bool postcopy_requests_served(PostcopyRequests *r, const PostcopyPage *page,
                              int cpu, uint64_t ns)
{
    QEMU_LOCK_GUARD(&r->lock);
    if (!r->ops->received(page)) {
        return false;
    }
    r->stats.exits++;
    r->stats.requests++;
    postcopy_meter_add(&r->meter, cpu, ns);
    return true;
}

void postcopy_request_defer(PostcopyRequests *r, const PostcopyPage *page)
{
    bool wake = false;
    PostcopyRequest *req;

    WITH_QEMU_LOCK_GUARD(&r->lock) {
        req = g_hash_table_lookup(r->pages, page->host);
        /* The page may have been received meanwhile, and missed once more */
        if (req && !req->deferred) {
            wake = QTAILQ_EMPTY(&r->deferred);
            r->inside += wake;
            req->deferred = true;
            QTAILQ_INSERT_TAIL(&r->deferred, req, next_deferred);
        }
    }
    if (wake) {
        r->ops->deferred();
        postcopy_requests_leave(r);
    }
}

unsigned postcopy_requests_take_deferred(PostcopyRequests *r,
                                         PostcopyPage *pages, unsigned most)
{
    PostcopyRequest *req;
    unsigned n = 0;

    QEMU_LOCK_GUARD(&r->lock);
    while (n < most && (req = QTAILQ_FIRST(&r->deferred))) {
        req->deferred = false;
        QTAILQ_REMOVE(&r->deferred, req, next_deferred);
        pages[n++] = req->page;
    }
    return n;
}

/* Returns false if the waiter was removed, and is about to be woken */
static bool postcopy_waiter_leave(PostcopyRequests *r, PostcopyWaiter *waiter)
{
    PostcopyRequest *req;
    PostcopyMiss *miss;

    QEMU_LOCK_GUARD(&r->lock);
    if (!waiter->page) {
        return false;
    }
    /* The PostcopyMiss stays: the thread returns, and its wait continues */
    req = g_hash_table_lookup(r->pages, waiter->page);
    QSLIST_FOREACH(miss, &req->misses, next) {
        if (miss->waiter == waiter) {
            miss->waiter = NULL;
        }
    }
    waiter->page = NULL;
    return true;
}

bool postcopy_request_wait(PostcopyRequests *r, PostcopyWaiter *waiter)
{
    /* A page or a kick since postcopy_request_begin() ends the wait */
    while (!qatomic_load_acquire(&waiter->done)) {
        if (qatomic_read(&waiter->kicked) && postcopy_waiter_leave(r, waiter)) {
            return false;
        }
        qemu_event_wait(&waiter->woken);
        qemu_event_reset(&waiter->woken);
    }
    return true;
}

static void postcopy_claim_end(PostcopyRequests *r, const PostcopyPage *page)
{
    for (guint i = 0; i < r->claims->len; i++) {
        if (g_array_index(r->claims, PostcopyClaimed, i).start == page->host) {
            g_array_remove_index_fast(r->claims, i);
            return;
        }
    }
}

/* Returns whether a thread waits for the page in userfaultfd */
static bool postcopy_request_received(PostcopyRequests *r,
                                      const PostcopyPage *page,
                                      PostcopyWaiterList *wake)
{
    PostcopyRequest *req = g_hash_table_lookup(r->pages, page->host);
    PostcopyMiss *miss;
    int64_t now;
    bool uffd;

    r->ops->set_received(page);
    if (!req) {
        return false;
    }
    uffd = req->uffd;
    now = get_clock();
    QSLIST_FOREACH(miss, &req->misses, next) {
        postcopy_meter_add(&r->meter, miss->cpu, now - miss->since);
    }
    if (r->ops->delivered && !QSLIST_EMPTY(&req->misses)) {
        r->ops->delivered(page);
    }
    postcopy_request_end(r, req, wake);
    g_hash_table_remove(r->pages, page->host);
    return uffd;
}

bool postcopy_request_complete(PostcopyRequests *r, const PostcopyPage *page,
                               unsigned n, PostcopyPlaceMethod method,
                               bool woke)
{
    PostcopyWaiterList wake = QSLIST_HEAD_INITIALIZER(wake);
    bool uffd = false;

    WITH_QEMU_LOCK_GUARD(&r->lock) {
        unsigned were = g_hash_table_size(r->pages);

        *(method == POSTCOPY_PLACE_COPY ? &r->stats.copied_bytes :
          method == POSTCOPY_PLACE_ZERO ? &r->stats.zero_bytes :
          &r->stats.continued_bytes) += n * page->size;
        for (unsigned i = 0; i < n; i++) {
            PostcopyPage each = postcopy_page_at(page, i);

            uffd |= postcopy_request_received(r, &each, &wake);
        }
        postcopy_claim_end(r, page);
        if (woke || uffd) {
            r->stats.wakes++;
        } else {
            r->stats.wakes_saved++;
        }
        if (were && !g_hash_table_size(r->pages)) {
            qemu_cond_broadcast(&r->empty);
        }
    }
    postcopy_wake_waiters(&wake);
    return uffd;
}

/* The claim of one page */
static PostcopyClaim postcopy_claim_one(PostcopyRequests *r,
                                        const PostcopyPage *page)
{
    PostcopyClaim claim = { };
    PostcopyRequest *req;
    PostcopyMiss *miss;

    claim.drop = r->ops->received(page);
    for (guint i = 0; i < r->claims->len && !claim.drop; i++) {
        PostcopyClaimed *c = &g_array_index(r->claims, PostcopyClaimed, i);

        claim.drop = page->host >= c->start && page->host < c->end;
    }
    req = claim.drop ? NULL : g_hash_table_lookup(r->pages, page->host);
    if (req) {
        claim.uffd = req->uffd;
        QSLIST_FOREACH(miss, &req->misses, next) {
            claim.vcpu |= miss->waiter != NULL;
        }
    }
    return claim;
}

unsigned postcopy_request_claim(PostcopyRequests *r, const PostcopyPage *page,
                                unsigned n, bool zero, PostcopyClaim *claim)
{
    PostcopyClaimed claimed = { .start = page->host };
    unsigned i;

    QEMU_LOCK_GUARD(&r->lock);
    if (!r->active) {
        *claim = (PostcopyClaim) { .drop = true };
        return n;
    }
    for (i = 0; i < n; i++) {
        PostcopyPage each = postcopy_page_at(page, i);
        PostcopyClaim one = postcopy_claim_one(r, &each);

        if (!i) {
            *claim = one;
        } else if (one.drop != claim->drop ||
                   (zero && (one.vcpu || claim->vcpu))) {
            break;
        }
        claim->uffd |= one.uffd;
        claim->vcpu |= one.vcpu;
    }
    if (claim->drop) {
        r->stats.duplicates += i;
    } else {
        claimed.end = postcopy_page_at(page, i).host;
        g_array_append_val(r->claims, claimed);
    }
    return i;
}

void postcopy_request_unclaim(PostcopyRequests *r, const PostcopyPage *page)
{
    QEMU_LOCK_GUARD(&r->lock);
    postcopy_claim_end(r, page);
}

void postcopy_requests_unclaim_all(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    postcopy_claims_drop(r);
}

GArray *postcopy_requests_list(PostcopyRequests *r)
{
    GArray *list = g_array_new(false, false, sizeof(PostcopyPage));
    GHashTableIter iter;
    gpointer value;

    QEMU_LOCK_GUARD(&r->lock);
    for (int ahead = 0; ahead < 2; ahead++) {
        g_hash_table_iter_init(&iter, r->pages);
        while (g_hash_table_iter_next(&iter, NULL, &value)) {
            PostcopyRequest *req = value;

            if (req->ahead == ahead) {
                g_array_append_val(list, req->page);
            }
        }
    }
    return list;
}

bool postcopy_requests_wait_empty(PostcopyRequests *r, int ms)
{
    QEMU_LOCK_GUARD(&r->lock);
    if (g_hash_table_size(r->pages)) {
        qemu_cond_timedwait(&r->empty, &r->lock, ms);
    }
    return !g_hash_table_size(r->pages);
}

bool postcopy_requests_received(PostcopyRequests *r, const PostcopyPage *page)
{
    QEMU_LOCK_GUARD(&r->lock);
    return !r->active || r->ops->received(page);
}

void postcopy_requests_run(PostcopyRequests *r, PostcopyPage *page,
                           ram_addr_t length, ram_addr_t window)
{
    size_t size = page->size;
    ram_addr_t first = ROUND_DOWN(page->start, MAX(window, size));
    ram_addr_t end = MIN(first + MAX(window, size), length);
    PostcopyPage low = *page, high = *page, next;

    QEMU_LOCK_GUARD(&r->lock);
    if (!r->active || page->start >= length) {
        return;
    }
    while (low.start > first) {
        next = postcopy_page_at(&low, -1);
        if (!r->ops->received(&next)) {
            break;
        }
        low = next;
    }
    while (high.start + size < end) {
        next = postcopy_page_at(&high, 1);
        if (!r->ops->received(&next)) {
            break;
        }
        high = next;
    }
    *page = low;
    page->size = high.start + size - low.start;
}

void postcopy_requests_stats(PostcopyRequests *r, PostcopyFaultStats *stats)
{
    QEMU_LOCK_GUARD(&r->lock);
    *stats = r->stats;
}

void postcopy_requests_meter(PostcopyRequests *r, PostcopyMeter *meter)
{
    QEMU_LOCK_GUARD(&r->lock);
    *meter = r->meter;
    meter->vcpus = g_array_copy(r->meter.vcpus);
}

unsigned postcopy_requests_outstanding(PostcopyRequests *r,
                                       PostcopyOldest *oldest)
{
    int64_t now, since;
    GHashTableIter iter;
    gpointer value;

    QEMU_LOCK_GUARD(&r->lock);
    /* Read with the lock held: no request is younger than @now */
    now = since = get_clock();
    g_hash_table_iter_init(&iter, r->pages);
    while (g_hash_table_iter_next(&iter, NULL, &value)) {
        PostcopyRequest *req = value;

        if (req->since <= since) {
            since = req->since;
            *oldest = (PostcopyOldest) { req->page, now - since };
        }
    }
    return g_hash_table_size(r->pages);
}

unsigned postcopy_requests_number(PostcopyRequests *r)
{
    return qatomic_read(&r->number);
}

void postcopy_waiter_init(PostcopyWaiter *waiter)
{
    *waiter = (PostcopyWaiter) { };
    qemu_event_init(&waiter->woken, false);
}

void postcopy_waiter_destroy(PostcopyWaiter *waiter)
{
    qemu_event_destroy(&waiter->woken);
}

void postcopy_waiter_kick(PostcopyWaiter *waiter)
{
    qatomic_store_release(&waiter->kicked, true);
    qemu_event_set(&waiter->woken);
}
