/*
 * Postcopy: what an architecture does for vCPUs that do not wait
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef INCLUDE_MIGRATION_POSTCOPY_ASYNC_OPS_H
#define INCLUDE_MIGRATION_POSTCOPY_ASYNC_OPS_H

#include "exec/hwaddr.h"
#include "hw/core/cpu.h"

/*
 * Numbers of tokens are generation << 30 | index << 24 | vCPU's ID << 12 |
 * 0xfff.  KVM's own have the ID, which is less than 4095, in the lower 12 bits,
 * so that the two never collide in a guest.  0 and ~0 have another meaning.
 */
#define POSTCOPY_ASYNC_MAX_ID 4094

/* Why a guest cannot be notified of a missing page */
typedef enum PostcopyAsyncRefusal {
    /* It can be notified */
    POSTCOPY_ASYNC_CAN,
    /* It was in its kernel */
    POSTCOPY_ASYNC_KERNEL,
    /* An event is being delivered, or interrupts are off */
    POSTCOPY_ASYNC_EVENT,
    /* It has not taken the last notification; or all tokens are in use */
    POSTCOPY_ASYNC_BUSY,
    /* It has not enabled notifications */
    POSTCOPY_ASYNC_WITHOUT,
} PostcopyAsyncRefusal;

/* Functions with a @cpu are called in its thread, without the BQL */
typedef struct PostcopyAsyncOps {
    /*
     * From now on, follow how guests set up async page faults.  May wait for
     * all users of KVM's memory slots, but only in the first call.  With the
     * BQL.  Returns false and sets @errp on error.
     */
    bool (*start)(Error **errp);

    /* The same on all hosts, at most POSTCOPY_ASYNC_MAX_ID */
    unsigned (*id)(CPUState *cpu);

    /**
     * @can: whether the guest can be notified of a page that it has just missed
     *
     * @halt: set to whether the vCPU can be halted until the page is received
     * @around: set to whether a guest with notifications enabled has missed it
     *          in its kernel, which often misses a neighbour next
     * @data: set to an address that announce() accesses if it can
     */
    PostcopyAsyncRefusal (*can)(CPUState *cpu, bool *halt, bool *around,
                                hwaddr *data);
    /* After @can: notify the guest with @number */
    PostcopyAsyncRefusal (*announce)(CPUState *cpu, uint32_t number);
    /* After @can: let the next KVM_RUN only serve interrupts, until a kick */
    bool (*halt)(CPUState *cpu);
} PostcopyAsyncOps;

/* Called before the machine runs; @ops is never freed */
void postcopy_async_set_ops(const PostcopyAsyncOps *ops);

typedef struct PostcopyAsyncVCPU PostcopyAsyncVCPU;

/* Whether the guest has RAM at @address, all of one kind.  Any thread. */
bool postcopy_async_is_ram(hwaddr address, hwaddr size);

/* State of @cpu; NULL if there is no postcopy with async page faults */
PostcopyAsyncVCPU *postcopy_async_vcpu(CPUState *cpu);

/* Whether a token is to be sent.  Takes no lock. */
bool postcopy_async_pending(PostcopyAsyncVCPU *v);
/* The number of the token to send next, or 0 */
uint32_t postcopy_async_next(PostcopyAsyncVCPU *v);
/* The guest's slot is in use */
void postcopy_async_slot_busy(PostcopyAsyncVCPU *v);
/* The guest has taken the token that was sent */
void postcopy_async_taken(PostcopyAsyncVCPU *v);
/* The token that postcopy_async_next() has returned was sent */
void postcopy_async_sent(PostcopyAsyncVCPU *v);
/*
 * The token was announced to a guest that has not been entered since: it will
 * not be sent.  Returns false if it was sent already, or forgotten.
 */
bool postcopy_async_withdraw(PostcopyAsyncVCPU *v, uint32_t number);
/* The guest does not know its tokens any more.  Any thread. */
void postcopy_async_forget(PostcopyAsyncVCPU *v);
/* The vCPU is about to be removed: nothing may kick it any more */
void postcopy_async_detach(PostcopyAsyncVCPU *v);
/* A token was taken or forgotten: check whether it was the last one */
void postcopy_async_drained(void);

#endif
