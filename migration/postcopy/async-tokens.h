/*
 * Postcopy: pages that a vCPU does not wait for
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_ASYNC_TOKENS_H
#define MIGRATION_POSTCOPY_ASYNC_TOKENS_H

#include "migration/postcopy-async-ops.h"
#include "request.h"

/*
 * A vCPU that misses a page can continue if the guest is notified: the guest
 * gets a token that stands for the page ("announced"), puts the task that
 * missed the page to sleep, and runs another.  When the page is received, the
 * guest gets the token again ("sent"), takes it, and wakes the task.  Otherwise
 * the vCPU is halted, without a token, and serves interrupts until the page is
 * received.
 *
 * This part knows neither KVM nor the guest: it records which vCPU waits for
 * which page, and what the guest was notified of.  A deliverer notifies it.
 *
 *     get --> ASKED --> ANNOUNCED --> READY --> SENT --> free
 *                           |           |         |
 *                           +-----------+---------+--> forget: the guest does
 *                                                      not know it any more
 *
 * Only an announced token is sent, and only once.  A number is reused when the
 * guest has taken or forgotten the token.
 */

/* Tokens of each vCPU; KVM's own async page faults have as many */
#define POSTCOPY_ASYNC_TOKENS 64
/* Halts of each vCPU: an interrupt in a halt may lead to a task's next halt */
#define POSTCOPY_ASYNC_HALTS 64

typedef enum PostcopyTokenState {
    POSTCOPY_TOKEN_FREE,
    /* The page is requested, or about to be; the guest is not notified */
    POSTCOPY_TOKEN_ASKED,
    /* The guest is notified that the page is missing */
    POSTCOPY_TOKEN_ANNOUNCED,
    /* The page was received, and the guest is not notified of that */
    POSTCOPY_TOKEN_READY,
    /* The guest is notified of that, and may not have noticed */
    POSTCOPY_TOKEN_SENT,
    /* The page is outstanding, but the guest will not be notified */
    POSTCOPY_TOKEN_GIVEN_UP,
} PostcopyTokenState;

typedef struct PostcopyToken {
    /* @waiter, for postcopy_request_begin(), and @vcpu are constant */
    PostcopyWaiter waiter;
    PostcopyAsyncVCPU *vcpu;
    /* By which the guest knows the token */
    uint32_t number;
    /* The vCPU's lock protects @state and @next */
    PostcopyTokenState state;
    /* For POSTCOPY_TOKEN_ASKED: the page was received.  Under the lock. */
    bool received;
    QSIMPLEQ_ENTRY(PostcopyToken) next;
} PostcopyToken;

/* A page for which the vCPU is halted, or would be but for an interrupt */
typedef struct PostcopyHalt {
    /* As in PostcopyToken */
    PostcopyWaiter waiter;
    PostcopyAsyncVCPU *vcpu;
    /* Address of the page; NULL: free.  Under the vCPU's lock. */
    void *host;
} PostcopyHalt;

struct PostcopyAsyncVCPU {
    QemuMutex lock;
    /* Part of its tokens' numbers.  Only its thread uses @id. */
    unsigned id;
    /* Makes the vCPU leave KVM_RUN, or NULL.  Under @lock, with @opaque. */
    void (*kick)(void *opaque);
    void *opaque;

    /* Tokens whose pages were received, in this order.  Under @lock. */
    QSIMPLEQ_HEAD(, PostcopyToken) ready;
    /* Token in the guest's slot, or NULL.  Under @lock. */
    PostcopyToken *sent;
    /* Page of its last halt, or NULL.  Under @lock. */
    PostcopyHalt *halted;
    /* @ready is not empty.  Written under @lock, read by the vCPU without */
    bool pending;
    /* @generation and @hint are those of the next token.  Under @lock. */
    unsigned generation;
    unsigned hint;
    /* @stats.outstanding: tokens announced, ready or sent.  Under @lock. */
    PostcopyAsyncStats stats;
    PostcopyToken tokens[POSTCOPY_ASYNC_TOKENS];
    PostcopyHalt halts[POSTCOPY_ASYNC_HALTS];
};

/* Never freed: pages may be received at any time */
PostcopyAsyncVCPU *postcopy_async_vcpus_new(unsigned n);

/*
 * The vCPU's thread calls these functions, and those of postcopy-async-ops.h
 * that have a @v, unless their comment allows any thread.
 */

/*
 * Attach a vCPU.  @id: the same on all hosts, at most POSTCOPY_ASYNC_MAX_ID.
 * The thread that places a page calls @kick, with the vCPU's lock held.
 */
void postcopy_async_attach(PostcopyAsyncVCPU *v, unsigned id,
                           void (*kick)(void *opaque), void *opaque);

/* A token for a page that is about to be requested, or NULL */
PostcopyToken *postcopy_async_get(PostcopyAsyncVCPU *v);
/* Free the token: no page is requested with it */
void postcopy_async_put(PostcopyToken *t);

/**
 * postcopy_async_announced: the guest was notified, or could not be
 *
 * @told: the guest was notified.  The page may have been received meanwhile.
 */
void postcopy_async_announced(PostcopyToken *t, bool told);

/**
 * postcopy_async_halt: the vCPU is about to be halted until a page is received
 *
 * @host: address of the page
 * @anew: set to whether the caller must request the page by the halt's waiter;
 *        not if an interrupt has ended a halt for it
 *
 * From then on, the receipt of the page kicks the vCPU, unless this is called
 * for another page later.  Returns NULL if all halts are in use.
 */
PostcopyHalt *postcopy_async_halt(PostcopyAsyncVCPU *v, void *host, bool *anew);
/* Free @h: the page was received, and is not requested with @h */
void postcopy_async_halt_put(PostcopyHalt *h);
/* Whether the page of @h is outstanding; if so, the halt is counted */
bool postcopy_async_halting(PostcopyHalt *h);

void postcopy_async_refused(PostcopyAsyncVCPU *v, PostcopyAsyncRefusal why);

/*
 * Whether all tokens are free, and the vCPU is halted for no page.  Any thread.
 */
bool postcopy_async_idle(PostcopyAsyncVCPU *v);
/* Add the counts of @v to @stats.  Any thread. */
void postcopy_async_count(PostcopyAsyncVCPU *v, PostcopyAsyncStats *stats);

#endif
