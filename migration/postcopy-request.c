/*
 * Postcopy: outstanding page requests of the destination
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/lockable.h"
#include "qemu/timer.h"
#include "postcopy-request.h"

typedef struct Wait {
    int cpu;
    int64_t since;
} Wait;

typedef struct Request {
    RAMBlock *rb;
    ram_addr_t start;
    /* The first fault; of the others an array of Wait, or NULL */
    Wait first;
    GArray *more;
    /* PostcopyWaiters; NULL until the first one */
    GPtrArray *waiters;
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
    /* The last entry of pages has gone */
    QemuCond empty;
    PostcopyRequestCounts counts;
    PostcopyMeter meter;
};

static void request_free(gpointer opaque)
{
    Request *req = opaque;

    if (req->waiters) {
        g_ptr_array_unref(req->waiters);
    }
    if (req->more) {
        g_array_unref(req->more);
    }
    g_free(req);
}

PostcopyRequests *postcopy_requests_new(const PostcopyRequestOps *ops)
{
    PostcopyRequests *r = g_new0(PostcopyRequests, 1);

    r->ops = ops;
    qemu_mutex_init(&r->lock);
    qemu_cond_init(&r->empty);
    r->pages = g_hash_table_new_full(NULL, NULL, NULL, request_free);
    r->claims = g_ptr_array_new();
    postcopy_meter_init(&r->meter);
    return r;
}

void postcopy_requests_free(PostcopyRequests *r)
{
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
    QEMU_LOCK_GUARD(&r->lock);
    r->active = false;
}

PostcopyPageState postcopy_request_begin(PostcopyRequests *r, RAMBlock *rb,
                                         ram_addr_t start, void *host,
                                         const PostcopyFault *fault)
{
    PostcopyWaiter *waiter = fault->waiter;
    Request *req;
    bool again = false;
    PostcopyPageState state = POSTCOPY_PAGE_ASKED;

    if (waiter) {
        qemu_event_reset(&waiter->woken);
    }

    QEMU_LOCK_GUARD(&r->lock);

    if (waiter) {
        /* A kicked vCPU comes back with the same fault */
        again = waiter->kicked == host;
        waiter->kicked = NULL;
    }

    if (!waiter) {
        r->counts.uffd++;
        r->counts.uffd_minor += fault->minor;
        r->counts.uffd_reads += fault->first;
    }

    if (!r->active || r->ops->received(rb, start)) {
        if (waiter) {
            r->counts.populated++;
        } else {
            r->counts.uffd_spurious++;
            r->counts.wakes++;
        }
        return POSTCOPY_PAGE_RECEIVED;
    }

    req = g_hash_table_lookup(r->pages, host);
    if (!req) {
        req = g_new0(Request, 1);
        req->rb = rb;
        req->start = start;
        req->first = (Wait) { fault->cpu, get_clock() };
        g_hash_table_insert(r->pages, host, req);
        r->counts.requests++;
        state = POSTCOPY_PAGE_ASK;
    }

    if (waiter) {
        if (!req->waiters) {
            req->waiters = g_ptr_array_new();
        }
        g_ptr_array_add(req->waiters, waiter);
        waiter->page = host;
        r->counts.exits += !again;
    } else {
        req->uffd = true;
    }
    if (!again && state == POSTCOPY_PAGE_ASKED) {
        Wait wait = { fault->cpu, get_clock() };

        if (!req->more) {
            req->more = g_array_new(false, false, sizeof(Wait));
        }
        g_array_append_val(req->more, wait);
    }
    return state;
}

bool postcopy_request_wait(PostcopyRequests *r, PostcopyWaiter *waiter)
{
    Request *req;

    /* A page or a kick that came since postcopy_request_begin() ends it */
    qemu_event_wait(&waiter->woken);

    QEMU_LOCK_GUARD(&r->lock);
    if (!waiter->page) {
        return true;
    }
    req = g_hash_table_lookup(r->pages, waiter->page);
    g_ptr_array_remove_fast(req->waiters, waiter);
    waiter->kicked = waiter->page;
    waiter->page = NULL;
    return false;
}

bool postcopy_request_complete(PostcopyRequests *r, RAMBlock *rb,
                               ram_addr_t start, void *host,
                               PostcopyPlaceMethod method, size_t bytes,
                               bool woke)
{
    g_autoptr(GPtrArray) waiters = NULL;
    Request *req;
    bool uffd;

    WITH_QEMU_LOCK_GUARD(&r->lock) {
        int64_t now;

        r->counts.bytes[method] += bytes;
        r->ops->set_received(rb, start);
        g_ptr_array_remove_fast(r->claims, host);
        req = g_hash_table_lookup(r->pages, host);
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
        postcopy_meter_add(&r->meter, req->first.cpu, now - req->first.since);
        for (guint i = 0; req->more && i < req->more->len; i++) {
            Wait *wait = &g_array_index(req->more, Wait, i);

            postcopy_meter_add(&r->meter, wait->cpu, now - wait->since);
        }
        waiters = g_steal_pointer(&req->waiters);
        for (guint i = 0; waiters && i < waiters->len; i++) {
            PostcopyWaiter *waiter = g_ptr_array_index(waiters, i);

            waiter->page = NULL;
        }
        g_hash_table_remove(r->pages, host);
        if (!g_hash_table_size(r->pages)) {
            qemu_cond_broadcast(&r->empty);
        }
    }

    /*
     * System calls outside of the lock.  A waiter that was kicked meanwhile
     * and waits for its next page is woken too early and comes back.
     */
    for (guint i = 0; waiters && i < waiters->len; i++) {
        PostcopyWaiter *waiter = g_ptr_array_index(waiters, i);

        if (waiter->come) {
            waiter->come(waiter);
        } else {
            qemu_event_set(&waiter->woken);
        }
    }
    return uffd;
}

bool postcopy_request_claim(PostcopyRequests *r, RAMBlock *rb,
                            ram_addr_t start, void *host, bool *uffd)
{
    Request *req;

    QEMU_LOCK_GUARD(&r->lock);
    if (!r->ops->received(rb, start) &&
        !g_ptr_array_find(r->claims, host, NULL)) {
        g_ptr_array_add(r->claims, host);
        req = g_hash_table_lookup(r->pages, host);
        *uffd = req && req->uffd;
        return true;
    }
    r->counts.duplicates++;
    return false;
}

void postcopy_requests_unclaim_all(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    g_ptr_array_set_size(r->claims, 0);
}

void postcopy_requests_foreach(PostcopyRequests *r,
                               void (*fn)(RAMBlock *rb, ram_addr_t start,
                                          void *opaque),
                               void *opaque)
{
    GHashTableIter iter;
    gpointer value;

    QEMU_LOCK_GUARD(&r->lock);
    g_hash_table_iter_init(&iter, r->pages);
    while (g_hash_table_iter_next(&iter, NULL, &value)) {
        Request *req = value;

        fn(req->rb, req->start, opaque);
    }
}

void postcopy_requests_wait_empty(PostcopyRequests *r)
{
    QEMU_LOCK_GUARD(&r->lock);
    while (g_hash_table_size(r->pages)) {
        qemu_cond_wait(&r->empty, &r->lock);
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

        if (req->first.since <= since) {
            since = req->first.since;
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
