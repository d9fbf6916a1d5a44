/*
 * Postcopy: vCPUs that do not wait for missing pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "exec/address-spaces.h"
#include "exec/memory.h"
#include "hw/boards.h"
#include "system/cpus.h"
#include "qapi/qapi-types-migration.h"
#include "migration/inject.h"
#include "migration/options.h"
#include "async-tokens.h"
#include "fault.h"
#include "incoming.h"
#include "trace.h"

/*
 * Set once for the process, by the architecture, before the machine runs.  NULL
 * where guests cannot be notified.
 */
static const PostcopyAsyncOps *async_ops;

/*
 * ASYNC_RUNNING: guests are notified of missing pages.  ASYNC_DRAINING: all
 * pages were received, and guests may not have been notified of that yet.
 */
enum { ASYNC_OFF, ASYNC_RUNNING, ASYNC_DRAINING };

/* Made before the first vCPU runs on the destination; never freed */
struct PostcopyAsync {
    /* By cpu_index */
    PostcopyAsyncVCPU *vcpus;
    unsigned vcpus_num;
    /* Atomic: ASYNC_OFF, ASYNC_RUNNING or ASYNC_DRAINING */
    int state;
};

static struct PostcopyAsync *async_get(void)
{
    return migration_incoming_get_current()->postcopy->async;
}

PostcopyAsyncVCPU *postcopy_async_vcpu(CPUState *cpu)
{
    struct PostcopyAsync *a = async_get();

    if (!a || qatomic_read(&a->state) == ASYNC_OFF) {
        return NULL;
    }
    return &a->vcpus[cpu->cpu_index];
}

bool postcopy_async_prepare(void)
{
    Error *err = NULL;

    if (!async_ops) {
        trace_postcopy_async_off("architecture");
    } else if (migrate_postcopy_async_pf() == POSTCOPY_ASYNC_PF_OFF) {
        trace_postcopy_async_off("parameter");
    } else if (!async_ops->start(&err)) {
        trace_postcopy_async_off(error_get_pretty(err));
        error_free(err);
    } else {
        return true;
    }
    return false;
}

void postcopy_async_start(MigrationIncomingState *mis)
{
    struct PostcopyAsync *a = mis->postcopy->async;

    if (!postcopy_async_prepare()) {
        return;
    }
    if (!a) {
        a = g_new0(struct PostcopyAsync, 1);
        a->vcpus_num = MACHINE(qdev_get_machine())->smp.max_cpus;
        a->vcpus = postcopy_async_vcpus_new(a->vcpus_num);
        mis->postcopy->async = a;
    }
    qatomic_set_mb(&a->state, ASYNC_RUNNING);
}

void postcopy_async_drained(void)
{
    struct PostcopyAsync *a = async_get();

    if (!a || qatomic_read(&a->state) != ASYNC_DRAINING) {
        return;
    }
    for (unsigned i = 0; i < a->vcpus_num; i++) {
        if (!postcopy_async_idle(&a->vcpus[i])) {
            return;
        }
    }
    /*
     * A vCPU that takes a token from now on finds that the page was received,
     * and frees the token.
     */
    if (qatomic_cmpxchg(&a->state, ASYNC_DRAINING, ASYNC_OFF) ==
        ASYNC_DRAINING) {
        trace_postcopy_async_drained();
    }
}

void postcopy_async_stop(MigrationIncomingState *mis)
{
    struct PostcopyAsync *a = mis->postcopy->async;

    if (a && qatomic_cmpxchg(&a->state, ASYNC_RUNNING, ASYNC_DRAINING) ==
        ASYNC_RUNNING) {
        postcopy_async_drained();
    }
}

static bool async_received(const PostcopyPage *page)
{
    MigrationIncomingState *mis = migration_incoming_get_current();

    return postcopy_requests_received(mis->postcopy->requests, page);
}

/* Whether the page of @gpa was received; if not, sets *@page to it */
static bool async_data_received(hwaddr gpa, PostcopyPage *page)
{
    hwaddr offset, len = 1;
    PostcopyPage data;
    MemoryRegion *mr;

    RCU_READ_LOCK_GUARD();
    mr = address_space_translate(&address_space_memory, gpa, &offset, &len,
                                 true, MEMTXATTRS_UNSPECIFIED);
    if (!memory_region_is_ram(mr)) {
        return true;
    }
    data = postcopy_page(mr->ram_block, offset);
    if (async_received(&data)) {
        return true;
    }
    *page = data;
    return false;
}

static void async_kick(void *opaque)
{
    CPUState *cpu = opaque;

    /*
     * The vCPU leaves KVM_RUN, and enters it again.  thread_kicked stays clear:
     * with it, the vCPU's thread would take the BQL, which others hold while
     * they wait for pages.  The token is pending before the signal is sent, and
     * the thread looks for tokens before each KVM_RUN.  A thread that waits for
     * a page in QEMU is not woken: it looks for tokens afterwards, too.
     */
    pthread_kill(cpu->thread->thread, SIG_IPI);
}

bool postcopy_async_is_ram(hwaddr address, hwaddr size)
{
    hwaddr offset, len = size;
    MemoryRegion *mr;

    RCU_READ_LOCK_GUARD();
    mr = address_space_translate(&address_space_memory, address, &offset, &len,
                                 true, MEMTXATTRS_UNSPECIFIED);
    return memory_access_is_direct(mr, true, MEMTXATTRS_UNSPECIFIED) &&
           len == size;
}

/* POSTCOPY_ASYNC_CAN: the guest is notified, or the page was received */
static PostcopyAsyncRefusal async_announce(CPUState *cpu, PostcopyAsyncVCPU *v,
                                           const PostcopyPage *page)
{
    PostcopyToken *t = postcopy_async_get(v);
    PostcopyAsyncRefusal why;

    if (!t) {
        return POSTCOPY_ASYNC_BUSY;
    }
    if (postcopy_fault_begin(cpu, page, &t->waiter, POSTCOPY_SEND_DEFERRED) ==
        POSTCOPY_PAGE_RECEIVED) {
        postcopy_async_put(t);
        return POSTCOPY_ASYNC_CAN;
    }
    why = async_ops->announce(cpu, t->number);
    postcopy_async_announced(t, why == POSTCOPY_ASYNC_CAN);
    if (why == POSTCOPY_ASYNC_CAN) {
        trace_postcopy_async_announced(cpu->cpu_index, t->number,
                                       qemu_ram_get_idstr(page->rb),
                                       page->start);
        migration_inject_hold("async-announced");
    }
    return why;
}

/*
 * Whether to enter the guest until the page is received.  @anew: @h has not
 * requested the page, see postcopy_async_halt().
 */
static bool async_halt(CPUState *cpu, const PostcopyPage *page, PostcopyHalt *h,
                       bool anew, bool around)
{
    if (anew && postcopy_fault_begin(cpu, page, &h->waiter,
                                     around ? POSTCOPY_SEND_AROUND
                                            : POSTCOPY_SEND_NOW) ==
        POSTCOPY_PAGE_RECEIVED) {
        postcopy_async_halt_put(h);
        return false;
    }
    /* In this order: a page that is received from now on ends the halt */
    return !postcopy_async_halting(h) || async_ops->halt(cpu);
}

static PostcopyFaultResult async_serve(CPUState *cpu, PostcopyPage *page)
{
    struct PostcopyAsync *a = async_get();
    PostcopyAsyncVCPU *v;
    PostcopyAsyncRefusal why;
    PostcopyHalt *h = NULL;
    hwaddr data = 0;
    bool halt = false, around = false, anew = true;

    if (!a || qatomic_read(&a->state) != ASYNC_RUNNING ||
        async_received(page)) {
        return POSTCOPY_FAULT_WAIT;
    }

    v = &a->vcpus[cpu->cpu_index];
    if (v->opaque != cpu) {
        postcopy_async_attach(v, async_ops->id(cpu), async_kick, cpu);
    }

    why = async_ops->can(cpu, &halt, &around, &data);
    if (why == POSTCOPY_ASYNC_CAN && !async_data_received(data, page)) {
        /* Once for each vCPU; a wait in the kernel could not be interrupted */
        trace_postcopy_async_data(cpu->cpu_index, data);
        return POSTCOPY_FAULT_WAIT_FOR_ANOTHER;
    }

    if (why == POSTCOPY_ASYNC_CAN) {
        why = async_announce(cpu, v, page);
        if (why == POSTCOPY_ASYNC_CAN) {
            return POSTCOPY_FAULT_ENTER;
        }
    }
    if (halt) {
        h = postcopy_async_halt(v, page->host, &anew);
    }
    if (anew) {
        trace_postcopy_async_refused(cpu->cpu_index, why, halt);
        postcopy_async_refused(v, why);
    }
    if (h && async_halt(cpu, page, h, anew, around)) {
        return POSTCOPY_FAULT_ENTER;
    }
    return around ? POSTCOPY_FAULT_WAIT_AROUND : POSTCOPY_FAULT_WAIT;
}

PostcopyFaultResult postcopy_async_fault(CPUState *cpu, PostcopyPage *page)
{
    PostcopyFaultResult result = async_serve(cpu, page);

    /* All pages may have been received while this had the last token */
    postcopy_async_drained();
    return result;
}

void postcopy_async_fill_info(MigrationIncomingState *mis, MigrationInfo *info)
{
    struct PostcopyAsync *a = mis->postcopy->async;

    if (!a) {
        return;
    }
    /* With the BQL */
    migration_inject_hold("async-info");
    info->postcopy_async = g_new0(PostcopyAsyncStats, 1);
    for (unsigned i = 0; i < a->vcpus_num; i++) {
        postcopy_async_count(&a->vcpus[i], info->postcopy_async);
    }
}

void postcopy_async_set_ops(const PostcopyAsyncOps *ops)
{
    async_ops = ops;
}
