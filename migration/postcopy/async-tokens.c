/*
 * Postcopy: pages that a vCPU does not wait for
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/lockable.h"
#include "qemu/queue.h"
#include "async-tokens.h"

static void postcopy_token_ready(PostcopyToken *t)
{
    PostcopyAsyncVCPU *v = t->vcpu;

    t->state = POSTCOPY_TOKEN_READY;
    QSIMPLEQ_INSERT_TAIL(&v->ready, t, next);
    qatomic_set(&v->pending, true);
}

static void postcopy_async_kick(PostcopyAsyncVCPU *v)
{
    if (v->kick) {
        v->kick(v->opaque);
    }
}

/* Called by the thread that has placed the page */
static void postcopy_token_received(PostcopyWaiter *waiter)
{
    PostcopyToken *t = container_of(waiter, PostcopyToken, waiter);
    PostcopyAsyncVCPU *v = t->vcpu;

    QEMU_LOCK_GUARD(&v->lock);
    switch (t->state) {
    case POSTCOPY_TOKEN_ASKED:
        /* postcopy_async_announced() checks this */
        t->received = true;
        break;
    case POSTCOPY_TOKEN_ANNOUNCED:
        postcopy_token_ready(t);
        postcopy_async_kick(v);
        break;
    case POSTCOPY_TOKEN_GIVEN_UP:
        t->state = POSTCOPY_TOKEN_FREE;
        break;
    default:
        g_assert_not_reached();
    }
}

static void postcopy_halt_free(PostcopyHalt *h)
{
    if (h->vcpu->halted == h) {
        h->vcpu->halted = NULL;
    }
    h->host = NULL;
}

/* Called by the thread that has placed the page */
static void postcopy_halt_received(PostcopyWaiter *waiter)
{
    PostcopyHalt *h = container_of(waiter, PostcopyHalt, waiter);

    QEMU_LOCK_GUARD(&h->vcpu->lock);
    if (h->vcpu->halted == h) {
        postcopy_async_kick(h->vcpu);
    }
    postcopy_halt_free(h);
}

PostcopyAsyncVCPU *postcopy_async_vcpus_new(unsigned n)
{
    PostcopyAsyncVCPU *vcpus = g_new0(PostcopyAsyncVCPU, n);

    for (unsigned i = 0; i < n; i++) {
        PostcopyAsyncVCPU *v = &vcpus[i];

        qemu_mutex_init(&v->lock);
        QSIMPLEQ_INIT(&v->ready);
        for (unsigned j = 0; j < POSTCOPY_ASYNC_TOKENS; j++) {
            postcopy_waiter_init(&v->tokens[j].waiter);
            v->tokens[j].waiter.on_received = postcopy_token_received;
            v->tokens[j].vcpu = v;
        }
        for (unsigned j = 0; j < POSTCOPY_ASYNC_HALTS; j++) {
            postcopy_waiter_init(&v->halts[j].waiter);
            v->halts[j].waiter.on_received = postcopy_halt_received;
            v->halts[j].vcpu = v;
        }
    }
    return vcpus;
}

void postcopy_async_attach(PostcopyAsyncVCPU *v, unsigned id,
                           void (*kick)(void *opaque), void *opaque)
{
    assert(id <= POSTCOPY_ASYNC_MAX_ID);
    QEMU_LOCK_GUARD(&v->lock);
    v->id = id;
    v->kick = kick;
    v->opaque = opaque;
}

void postcopy_async_detach(PostcopyAsyncVCPU *v)
{
    postcopy_async_forget(v);
    postcopy_async_attach(v, 0, NULL, NULL);
}

PostcopyToken *postcopy_async_get(PostcopyAsyncVCPU *v)
{
    QEMU_LOCK_GUARD(&v->lock);
    for (unsigned i = 0; i < POSTCOPY_ASYNC_TOKENS; i++) {
        unsigned index = (v->hint + i) % POSTCOPY_ASYNC_TOKENS;
        PostcopyToken *t = &v->tokens[index];

        if (t->state == POSTCOPY_TOKEN_FREE) {
            t->state = POSTCOPY_TOKEN_ASKED;
            t->received = false;
            t->number = (uint32_t)v->generation << 30 | index << 24 |
                        v->id << 12 | 0xfff;
            v->hint = (index + 1) % POSTCOPY_ASYNC_TOKENS;
            v->generation = (v->generation + !v->hint) % 4;
            return t;
        }
    }
    return NULL;
}

void postcopy_async_put(PostcopyToken *t)
{
    QEMU_LOCK_GUARD(&t->vcpu->lock);
    assert(t->state == POSTCOPY_TOKEN_ASKED);
    t->state = POSTCOPY_TOKEN_FREE;
}

void postcopy_async_announced(PostcopyToken *t, bool told)
{
    PostcopyAsyncVCPU *v = t->vcpu;

    QEMU_LOCK_GUARD(&v->lock);
    assert(t->state == POSTCOPY_TOKEN_ASKED);
    if (told) {
        v->stats.announced++;
        v->stats.outstanding++;
        t->state = POSTCOPY_TOKEN_ANNOUNCED;
        if (t->received) {
            /* This thread enters the guest next, and sends the token then */
            postcopy_token_ready(t);
        }
    } else if (t->received) {
        t->state = POSTCOPY_TOKEN_FREE;
    } else {
        t->state = POSTCOPY_TOKEN_GIVEN_UP;
    }
}

bool postcopy_async_withdraw(PostcopyAsyncVCPU *v, uint32_t number)
{
    QEMU_LOCK_GUARD(&v->lock);
    for (unsigned i = 0; i < POSTCOPY_ASYNC_TOKENS; i++) {
        PostcopyToken *t = &v->tokens[i];

        if (t->number != number) {
            continue;
        }
        if (t->state == POSTCOPY_TOKEN_ANNOUNCED) {
            t->state = POSTCOPY_TOKEN_GIVEN_UP;
        } else if (t->state == POSTCOPY_TOKEN_READY) {
            QSIMPLEQ_REMOVE(&v->ready, t, PostcopyToken, next);
            qatomic_set(&v->pending, !QSIMPLEQ_EMPTY(&v->ready));
            t->state = POSTCOPY_TOKEN_FREE;
        } else {
            return false;
        }
        v->stats.announced--;
        v->stats.outstanding--;
        return true;
    }
    return false;
}

PostcopyHalt *postcopy_async_halt(PostcopyAsyncVCPU *v, void *host, bool *anew)
{
    PostcopyHalt *free = NULL;

    QEMU_LOCK_GUARD(&v->lock);
    for (unsigned i = 0; i < POSTCOPY_ASYNC_HALTS; i++) {
        PostcopyHalt *h = &v->halts[i];

        if (h->host == host) {
            *anew = false;
            return v->halted = h;
        }
        free = h->host ? free : h;
    }
    if (free) {
        *anew = true;
        free->host = host;
        v->halted = free;
    }
    return free;
}

void postcopy_async_halt_put(PostcopyHalt *h)
{
    QEMU_LOCK_GUARD(&h->vcpu->lock);
    postcopy_halt_free(h);
}

bool postcopy_async_halting(PostcopyHalt *h)
{
    QEMU_LOCK_GUARD(&h->vcpu->lock);
    h->vcpu->stats.halted += h->host != NULL;
    return h->host;
}

bool postcopy_async_pending(PostcopyAsyncVCPU *v)
{
    return qatomic_read(&v->pending);
}

uint32_t postcopy_async_next(PostcopyAsyncVCPU *v)
{
    QEMU_LOCK_GUARD(&v->lock);
    return QSIMPLEQ_EMPTY(&v->ready) ? 0 : QSIMPLEQ_FIRST(&v->ready)->number;
}

void postcopy_async_slot_busy(PostcopyAsyncVCPU *v)
{
    QEMU_LOCK_GUARD(&v->lock);
    v->stats.slot_busy++;
}

static void postcopy_async_free_sent(PostcopyAsyncVCPU *v)
{
    if (v->sent) {
        v->sent->state = POSTCOPY_TOKEN_FREE;
        v->sent = NULL;
        v->stats.outstanding--;
    }
}

void postcopy_async_taken(PostcopyAsyncVCPU *v)
{
    QEMU_LOCK_GUARD(&v->lock);
    postcopy_async_free_sent(v);
}

void postcopy_async_sent(PostcopyAsyncVCPU *v)
{
    PostcopyToken *t;

    QEMU_LOCK_GUARD(&v->lock);
    t = QSIMPLEQ_FIRST(&v->ready);
    if (!t) {
        /* postcopy_async_forget() was first: the guest will be reset */
        return;
    }
    postcopy_async_free_sent(v);
    QSIMPLEQ_REMOVE_HEAD(&v->ready, next);
    qatomic_set(&v->pending, !QSIMPLEQ_EMPTY(&v->ready));
    t->state = POSTCOPY_TOKEN_SENT;
    v->sent = t;
    v->stats.delivered++;
}

void postcopy_async_forget(PostcopyAsyncVCPU *v)
{
    QEMU_LOCK_GUARD(&v->lock);
    for (unsigned i = 0; i < POSTCOPY_ASYNC_TOKENS; i++) {
        PostcopyToken *t = &v->tokens[i];

        switch (t->state) {
        case POSTCOPY_TOKEN_ANNOUNCED:
            t->state = POSTCOPY_TOKEN_GIVEN_UP;
            v->stats.forgotten++;
            break;
        case POSTCOPY_TOKEN_READY:
            v->stats.forgotten++;
            t->state = POSTCOPY_TOKEN_FREE;
            break;
        case POSTCOPY_TOKEN_SENT:
            t->state = POSTCOPY_TOKEN_FREE;
            break;
        default:
            break;
        }
    }
    QSIMPLEQ_INIT(&v->ready);
    v->sent = NULL;
    v->stats.outstanding = 0;
    qatomic_set(&v->pending, false);
}

void postcopy_async_refused(PostcopyAsyncVCPU *v, PostcopyAsyncRefusal why)
{
    PostcopyAsyncStats *s = &v->stats;

    QEMU_LOCK_GUARD(&v->lock);
    *(why == POSTCOPY_ASYNC_KERNEL ? &s->refused_kernel :
      why == POSTCOPY_ASYNC_EVENT ? &s->refused_event :
      why == POSTCOPY_ASYNC_BUSY ? &s->refused_busy :
      &s->refused_without) += 1;
}

bool postcopy_async_idle(PostcopyAsyncVCPU *v)
{
    QEMU_LOCK_GUARD(&v->lock);
    for (unsigned i = 0; i < POSTCOPY_ASYNC_TOKENS; i++) {
        if (v->tokens[i].state != POSTCOPY_TOKEN_FREE) {
            return false;
        }
    }
    for (unsigned i = 0; i < POSTCOPY_ASYNC_HALTS; i++) {
        if (v->halts[i].host) {
            return false;
        }
    }
    return true;
}

void postcopy_async_count(PostcopyAsyncVCPU *v, PostcopyAsyncStats *stats)
{
    QEMU_LOCK_GUARD(&v->lock);
    stats->announced += v->stats.announced;
    stats->delivered += v->stats.delivered;
    stats->forgotten += v->stats.forgotten;
    stats->outstanding += v->stats.outstanding;
    stats->slot_busy += v->stats.slot_busy;
    stats->refused_kernel += v->stats.refused_kernel;
    stats->refused_event += v->stats.refused_event;
    stats->refused_busy += v->stats.refused_busy;
    stats->refused_without += v->stats.refused_without;
    stats->halted += v->stats.halted;
}
