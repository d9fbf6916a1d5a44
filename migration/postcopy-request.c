/*
 * Postcopy: outstanding page requests of the destination
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/lockable.h"
#include "qemu/queue.h"
#include "qemu/timer.h"
#include "postcopy-request.h"

/* One thread that misses a page */
typedef struct Wait {
    QSLIST_ENTRY(Wait) next;
    int cpu;
    uint32_t tid;
    int64_t since;
    /* Of a vCPU that is in postcopy_request_wait() or on its way; or NULL */
    PostcopyWaiter *waiter;
} Wait;

typedef struct Request {
    QSLIST_ENTRY(Request) next_free;
    RAMBlock *rb;
    ram_addr_t start;
    int64_t since;
    QSLIST_HEAD(, Wait) waits;
    /* A thread waits in userfaultfd */
    bool uffd;
} Request;

struct PostcopyRequests {
    const PostcopyRequestOps *ops;

    /* Protects everything below, and received bits of pages while active */
    QemuMutex lock;
    bool active;
    /* Host page (in this process) -> Request */
    GHashTable *pages;
    /* Host pages that somebody places: about one for each channel */
    GPtrArray *claims;
    /* Threads between postcopy_requests_enter() and postcopy_requests_leave() */
    unsigned inside;
    /* The last entry of pages has gone, or the last thread inside */
    QemuCond empty;
    /*
     * Not in use, so that a fault allocates no memory.  A Request is not part
     * of its first waiter: that vCPU may be kicked, and miss another page.
     */
    QSLIST_HEAD(, Request) free_requests;
    QSLIST_HEAD(, Wait) free_waits;
    PostcopyRequestCounts counts;
    PostcopyMeter meter;
};

typedef QSLIST_HEAD(, PostcopyWaiter) WaiterList;

static Request *request_new(PostcopyRequests *r, RAMBlock *rb,
                            ram_addr_t start)
{
    Request *req = QSLIST_FIRST(&r->free_requests);

    if (req) {
        QSLIST_REMOVE_HEAD(&r->free_requests, next_free);
    } else {
        req = g_new(Request, 1);
    }
    *req = (Request) { .rb = rb, .start = start, .since = get_clock() };
    return req;
}

static Wait *wait_new(PostcopyRequests *r)
{
    Wait *wait = QSLIST_FIRST(&r->free_waits);

    if (wait) {
        QSLIST_REMOVE_HEAD(&r->free_waits, next);
    } else {
        wait = g_new(Wait, 1);
    }
    return wait;
}

/*
 * Take the entry of a page out.  Its waiters go to @wake, for
 * wake_waiters() without the lock.
 */
static void request_end(PostcopyRequests *r, Request *req, WaiterList *wake)
{
    Wait *wait;

    while ((wait = QSLIST_FIRST(&req->waits))) {
        QSLIST_REMOVE_HEAD(&req->waits, next);
        if (wait->waiter) {
            wait->waiter->page = NULL;
            QSLIST_INSERT_HEAD(wake, wait->waiter, next_woken);
        }
        QSLIST_INSERT_HEAD(&r->free_waits, wait, next);
    }
    QSLIST_INSERT_HEAD(&r->free_requests, req, next_free);
}

/* System calls, outside of the lock */
static void wake_waiters(WaiterList *wake)
{
    PostcopyWaiter *waiter, *next;

    QSLIST_FOREACH_SAFE(waiter, wake, next_woken, next) {
        if (waiter->come) {
            waiter->come(waiter);
            continue;
        }
        /*
         * With release: next was read before.  From here on the waiter may go,
         * and the event reaches it while it waits for another page: it
         * then looks once too often.
         */
        qatomic_store_release(&waiter->done, true);
        qemu_event_set(&waiter->woken);
    }
}

PostcopyRequests *postcopy_requests_new(const PostcopyRequestOps *ops)
{
    PostcopyRequests *r = g_new0(PostcopyRequests, 1);

    r->ops = ops;
    qemu_mutex_init(&r->lock);
    qemu_cond_init(&r->empty);
    r->pages = g_hash_table_new(NULL, NULL);
    r->claims = g_ptr_array_new();
    postcopy_meter_init(&r->meter);
    return r;
}

void postcopy_requests_free(PostcopyRequests *r)
{
    WaiterList none = QSLIST_HEAD_INITIALIZER(none);
    GHashTableIter iter;
    gpointer value;
    Request *req;
    Wait *wait;

    g_hash_table_iter_init(&iter, r->pages);
    while (g_hash_table_iter_next(&iter, NULL, &value)) {
        request_end(r, value, &none);
    }
    while ((req = QSLIST_FIRST(&r->free_requests))) {
        QSLIST_REMOVE_HEAD(&r->free_requests, next_free);
        g_free(req);
    }
    while ((wait = QSLIST_FIRST(&r->free_waits))) {
        QSLIST_REMOVE_HEAD(&r->free_waits, next);
        g_free(wait);
    }
    g_hash_table_unref(r->pages);
    g_ptr_array_unref(r->claims);
    postcopy_meter_destroy(&r->meter);
    qemu_cond_destroy(&r->empty);
    qemu_mutex_destroy(&r->lock);
    g_free(r);
}

void postcopy_requests_start(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    r->counts = (PostcopyRequestCounts) { };
    postcopy_meter_reset(&r->meter);
    r->active = true;
}

void postcopy_requests_stop(PostcopyRequests *r)
{
    WaiterList wake = QSLIST_HEAD_INITIALIZER(wake);

    WITH_QEMU_LOCK_GUARD(&r->lock) {
        GHashTableIter iter;
        gpointer value;

        r->active = false;
        while (r->inside) {
            qemu_cond_wait(&r->empty, &r->lock);
        }
        /* Of channels that have ended within a page */
        g_ptr_array_set_size(r->claims, 0);
        g_hash_table_iter_init(&iter, r->pages);
        while (g_hash_table_iter_next(&iter, NULL, &value)) {
            request_end(r, value, &wake);
        }
        g_hash_table_remove_all(r->pages);
    }
    wake_waiters(&wake);
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

/* Returns false if @fault was known: of a thread that was kicked, and is back */
static bool request_add(PostcopyRequests *r, Request *req,
                        const PostcopyFault *fault)
{
    bool again = false;
    Wait *wait;

    /* Of one thread there may be more, each with a waiter of its own */
    QSLIST_FOREACH(wait, &req->waits, next) {
        if (wait->tid == fault->tid && (!wait->waiter || !fault->waiter ||
                                        wait->waiter == fault->waiter)) {
            again = true;
            break;
        }
    }
    if (!again) {
        wait = wait_new(r);
        *wait = (Wait) {
            .cpu = fault->cpu, .tid = fault->tid, .since = get_clock()
        };
        QSLIST_INSERT_HEAD(&req->waits, wait, next);
    }
    if (fault->waiter) {
        wait->waiter = fault->waiter;
    } else {
        req->uffd = true;
    }
    return !again;
}

PostcopyPageState postcopy_request_begin(PostcopyRequests *r, RAMBlock *rb,
                                         ram_addr_t start, void *host,
                                         const PostcopyFault *fault)
{
    PostcopyWaiter *waiter = fault->waiter;
    PostcopyPageState state = POSTCOPY_PAGE_ASKED;
    bool received, known = false;
    Request *req;

    if (waiter) {
        qemu_event_reset(&waiter->woken);
        waiter->done = false;
    }

    QEMU_LOCK_GUARD(&r->lock);

    received = !r->active || r->ops->received(rb, start);
    if (!received) {
        req = g_hash_table_lookup(r->pages, host);
        if (!req) {
            req = request_new(r, rb, start);
            g_hash_table_insert(r->pages, host, req);
            r->counts.requests++;
            state = POSTCOPY_PAGE_ASK;
        }
        known = !request_add(r, req, fault);
        if (!known && r->ops->missed && !(waiter && waiter->come)) {
            r->ops->missed(rb, host, fault->tid);
        }
    }

    if (waiter) {
        waiter->page = received ? NULL : host;
        r->counts.populated += received;
        r->counts.exits += !received && !known;
    } else {
        r->counts.uffd += !known;
        r->counts.uffd_minor += fault->minor;
        r->counts.uffd_reads += fault->first;
        r->counts.uffd_spurious += received;
        r->counts.wakes += received;
    }
    return received ? POSTCOPY_PAGE_RECEIVED : state;
}

/* Returns false if somebody has taken the waiter out, who is about to wake it */
static bool waiter_leave(PostcopyRequests *r, PostcopyWaiter *waiter)
{
    Request *req;
    Wait *wait;

    QEMU_LOCK_GUARD(&r->lock);
    if (!waiter->page) {
        return false;
    }
    /* The Wait stays: the thread will come back, and has waited since then */
    req = g_hash_table_lookup(r->pages, waiter->page);
    QSLIST_FOREACH(wait, &req->waits, next) {
        if (wait->waiter == waiter) {
            wait->waiter = NULL;
        }
    }
    waiter->page = NULL;
    return true;
}

bool postcopy_request_wait(PostcopyRequests *r, PostcopyWaiter *waiter)
{
    /* A page or a kick that came since postcopy_request_begin() ends it */
    while (true) {
        qemu_event_wait(&waiter->woken);
        if (qatomic_load_acquire(&waiter->done)) {
            return true;
        }
        if (waiter_leave(r, waiter)) {
            return false;
        }
        qemu_event_reset(&waiter->woken);
        if (qatomic_load_acquire(&waiter->done)) {
            return true;
        }
    }
}

bool postcopy_request_complete(PostcopyRequests *r, RAMBlock *rb,
                               ram_addr_t start, void *host,
                               PostcopyPlaceMethod method, size_t bytes,
                               bool woke)
{
    WaiterList wake = QSLIST_HEAD_INITIALIZER(wake);
    bool uffd;

    WITH_QEMU_LOCK_GUARD(&r->lock) {
        Request *req = g_hash_table_lookup(r->pages, host);
        int64_t now;
        Wait *wait;

        r->counts.bytes[method] += bytes;
        r->ops->set_received(rb, start);
        g_ptr_array_remove_fast(r->claims, host);
        uffd = req && req->uffd;
        if (woke || uffd) {
            r->counts.wakes++;
        } else {
            r->counts.wakes_saved++;
        }
        if (!req) {
            return false;
        }
        now = get_clock();
        QSLIST_FOREACH(wait, &req->waits, next) {
            postcopy_meter_add(&r->meter, wait->cpu, now - wait->since);
        }
        request_end(r, req, &wake);
        g_hash_table_remove(r->pages, host);
        if (!g_hash_table_size(r->pages)) {
            qemu_cond_broadcast(&r->empty);
        }
    }
    wake_waiters(&wake);
    return uffd;
}

bool postcopy_request_claim(PostcopyRequests *r, RAMBlock *rb,
                            ram_addr_t start, void *host, bool *uffd,
                            bool *vcpu)
{
    Request *req;
    Wait *wait;

    QEMU_LOCK_GUARD(&r->lock);
    if (!r->active) {
        return false;
    }
    if (r->ops->received(rb, start) ||
        g_ptr_array_find(r->claims, host, NULL)) {
        r->counts.duplicates++;
        return false;
    }
    g_ptr_array_add(r->claims, host);
    req = g_hash_table_lookup(r->pages, host);
    *uffd = req && req->uffd;
    *vcpu = false;
    if (req) {
        QSLIST_FOREACH(wait, &req->waits, next) {
            *vcpu |= wait->waiter != NULL;
        }
    }
    return true;
}

void postcopy_request_unclaim(PostcopyRequests *r, void *host)
{
    QEMU_LOCK_GUARD(&r->lock);
    g_ptr_array_remove_fast(r->claims, host);
}

void postcopy_requests_unclaim_all(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    g_ptr_array_set_size(r->claims, 0);
}

GArray *postcopy_requests_list(PostcopyRequests *r)
{
    GArray *list = g_array_new(false, false, sizeof(PostcopyRequested));
    GHashTableIter iter;
    gpointer value;

    QEMU_LOCK_GUARD(&r->lock);
    g_hash_table_iter_init(&iter, r->pages);
    while (g_hash_table_iter_next(&iter, NULL, &value)) {
        Request *req = value;
        PostcopyRequested page = { req->rb, req->start };

        g_array_append_val(list, page);
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

bool postcopy_requests_received(PostcopyRequests *r, RAMBlock *rb,
                                ram_addr_t start)
{
    QEMU_LOCK_GUARD(&r->lock);
    return !r->active || r->ops->received(rb, start);
}

void postcopy_requests_run(PostcopyRequests *r, RAMBlock *rb,
                           ram_addr_t length, ram_addr_t window,
                           ram_addr_t *start, size_t *size)
{
    size_t page_size = *size;
    ram_addr_t first = ROUND_DOWN(*start, MAX(window, page_size));
    ram_addr_t end = MIN(first + MAX(window, page_size), length);

    QEMU_LOCK_GUARD(&r->lock);
    if (!r->active || *start >= length) {
        return;
    }
    while (*start > first && r->ops->received(rb, *start - page_size)) {
        *start -= page_size;
        *size += page_size;
    }
    while (*start + *size < end && r->ops->received(rb, *start + *size)) {
        *size += page_size;
    }
}

void postcopy_requests_counts(PostcopyRequests *r,
                              PostcopyRequestCounts *counts)
{
    QEMU_LOCK_GUARD(&r->lock);
    *counts = r->counts;
}

void postcopy_requests_meter(PostcopyRequests *r, PostcopyMeter *meter)
{
    QEMU_LOCK_GUARD(&r->lock);
    postcopy_meter_copy(meter, &r->meter);
}

unsigned postcopy_requests_outstanding(PostcopyRequests *r,
                                       PostcopyOldest *oldest)
{
    int64_t now, since;
    GHashTableIter iter;
    gpointer value;

    QEMU_LOCK_GUARD(&r->lock);
    /* With the lock held: nothing is outstanding since later than now */
    now = since = get_clock();
    g_hash_table_iter_init(&iter, r->pages);
    while (g_hash_table_iter_next(&iter, NULL, &value)) {
        Request *req = value;

        if (req->since <= since) {
            since = req->since;
            *oldest = (PostcopyOldest) { req->rb, req->start, now - since };
        }
    }
    return g_hash_table_size(r->pages);
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
    qemu_event_set(&waiter->woken);
}
