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
 * A vCPU that misses a page can go on if the guest is told: it gets a token
 * that stands for the page ("announced"), puts the task that missed it to
 * sleep, and runs another one.  When the page has come, the guest is told the
 * token once more ("sent"), takes it, and wakes the task.  Or else the vCPU is
 * halted and serves interrupts until the page has come: that takes no token.
 *
 * This is the part that knows neither KVM nor the guest: which vCPU waits for
 * which page, and what it has been told.  A deliverer tells it.
 *
 *     get --> ASKED --> ANNOUNCED --> READY --> SENT --> free
 *                           |           |         |
 *                           +-----------+---------+--> forget: the guest does
 *                                                      not know it any more
 *
 * No token is ever sent that was not announced, or twice.  A token's number
 * is given away anew only when the guest has taken it or forgotten it.
 */

/* For each vCPU; as many as KVM's own has */
#define POSTCOPY_ASYNC_TOKENS 64
/* Interrupts may lead from one halt to the next, as many as there are tasks */
#define POSTCOPY_ASYNC_HALTS 64

typedef enum PostcopyTokenState {
    POSTCOPY_TOKEN_FREE,
    /* The page was asked for, or is about to be; the guest knows nothing */
    POSTCOPY_TOKEN_ASKED,
    /* The guest knows that the page is missing */
    POSTCOPY_TOKEN_ANNOUNCED,
    /* The page has come, and the guest does not know it */
    POSTCOPY_TOKEN_READY,
    /* The guest has been told, and may not have noticed */
    POSTCOPY_TOKEN_SENT,
    /* The page is still awaited, but nobody is to be told */
    POSTCOPY_TOKEN_GIVEN_UP,
} PostcopyTokenState;

typedef struct PostcopyToken {
    /* Passed to postcopy_request_begin(); constant */
    PostcopyWaiter waiter;
    PostcopyAsyncVCPU *vcpu;
    /* What the guest is told */
    uint32_t number;
    /* Under the vCPU's lock, with next */
    PostcopyTokenState state;
    /* Of POSTCOPY_TOKEN_ASKED: the page has come.  Under the lock. */
    bool come;
    QSIMPLEQ_ENTRY(PostcopyToken) next;
} PostcopyToken;

/* A page for which the vCPU is halted, or would be but for an interrupt */
typedef struct PostcopyHalt {
    /* As a token's */
    PostcopyWaiter waiter;
    PostcopyAsyncVCPU *vcpu;
    /* Of the page; NULL: free.  Under the vCPU's lock. */
    void *host;
} PostcopyHalt;

typedef struct PostcopyAsyncCounts {
    /* Missing pages that the guest was told of */
    uint64_t announced;
    /* Of these, pages that it was told have come */
    uint64_t sent;
    /* Of these, tokens that the guest forgot before it was told */
    uint64_t forgotten;
    /* Attempts to tell of a page that has come, while the slot was in use */
    uint64_t slot_busy;
    /* Missing pages that it could not be told of */
    uint64_t refused[POSTCOPY_ASYNC__MAX];
    /* Of these, waits in which the vCPU served interrupts */
    uint64_t halts;
} PostcopyAsyncCounts;

struct PostcopyAsyncVCPU {
    QemuMutex lock;
    /* Part of its tokens' numbers; used by its thread only, as opaque */
    unsigned id;
    /* Makes the vCPU leave KVM_RUN.  Under the lock; NULL: there is none */
    void (*kick)(void *opaque);
    void *opaque;

    /* Pages that have come, in this order.  Under the lock. */
    QSIMPLEQ_HEAD(, PostcopyToken) ready;
    /* In the guest's slot, or NULL.  Under the lock. */
    PostcopyToken *sent;
    /* What it was halted for the last time, or NULL.  Under the lock. */
    PostcopyHalt *halted;
    /* Announced, ready or sent.  Under the lock. */
    unsigned outstanding;
    /* ready is not empty.  Written under the lock, read by the vCPU without */
    bool pending;
    /* Of the next token; under the lock, with hint */
    unsigned generation;
    unsigned hint;
    /* Under the lock */
    PostcopyAsyncCounts counts;
    PostcopyToken tokens[POSTCOPY_ASYNC_TOKENS];
    PostcopyHalt halts[POSTCOPY_ASYNC_HALTS];
};

/* Never freed: pages may come at any time */
PostcopyAsyncVCPU *postcopy_async_vcpus_new(unsigned n);

/*
 * These functions, and those of postcopy-async-ops.h that have a @v, are called
 * by the vCPU's thread, but for those of which it is said that any thread may.
 */

/*
 * There is a vCPU.  @id: the same on all hosts, at most POSTCOPY_ASYNC_MAX_ID.
 * @kick is called with the vCPU's lock held, by the thread that places a page.
 */
void postcopy_async_attach(PostcopyAsyncVCPU *v, unsigned id,
                           void (*kick)(void *opaque), void *opaque);

/* A token for a page that is about to be asked for, or NULL */
PostcopyToken *postcopy_async_get(PostcopyAsyncVCPU *v);
/* Give it back: nobody waits by it */
void postcopy_async_put(PostcopyToken *t);

/**
 * postcopy_async_announced: the guest was told, or could not be told
 *
 * The page may have come while it was.
 */
void postcopy_async_announced(PostcopyToken *t, bool told);

/**
 * postcopy_async_halt: the vCPU is about to be halted until the page comes
 *
 * @host: of the page
 * @anew: set to whether it is to be asked for by the halt's waiter; not if an
 *        interrupt has ended a halt for it
 *
 * From then on it is kicked when the page comes, if it is the last one for
 * which this was called.  NULL: it is halted for too many.
 */
PostcopyHalt *postcopy_async_halt(PostcopyAsyncVCPU *v, void *host, bool *anew);
/* Give it back: the page has been received, and nobody waits by it */
void postcopy_async_halt_put(PostcopyHalt *h);
/* Whether its page has not come yet; if so, the halt is counted */
bool postcopy_async_halting(PostcopyHalt *h);

void postcopy_async_refused(PostcopyAsyncVCPU *v, PostcopyAsyncRefusal why);

/*
 * Whether all tokens are free, none is about to be announced, and the vCPU is
 * halted for no page.  Any thread.
 */
bool postcopy_async_idle(PostcopyAsyncVCPU *v);
/* Add to @stats.  Any thread. */
void postcopy_async_count(PostcopyAsyncVCPU *v, PostcopyAsyncStats *stats);

#endif
