/*
 * Postcopy: the two ways in which the destination learns of missing pages
 *
 * A vCPU that hits a missing page either leaves KVM_RUN, requests the page and
 * waits for it (KVM_MEM_EXIT_ON_MISSING); or it sleeps in the kernel, and the
 * fault thread requests the page (userfaultfd).  userfaultfd is always in use
 * for accesses that cannot exit: by QEMU's own threads, by vhost, and by KVM on
 * behalf of the guest.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qapi/util.h"
#include "qapi/qapi-types-migration.h"
#include "qemu/bitmap.h"
#include "qemu/coroutine.h"
#include "qemu/error-report.h"
#include "qemu/host-utils.h"
#include "qemu/lockable.h"
#include "qemu/madvise.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "hw/boards.h"
#include "hw/core/cpu.h"
#include "system/kvm.h"
#include "system/kvm-exit-on-missing.h"
#include "migration/inject.h"
#include "migration/options.h"
#include "migration/postcopy-ram.h"
#include "migration/qemu-file.h"
#include "migration/ram.h"
#include "fault.h"
#include "fetch.h"
#include "file.h"
#include "incoming.h"
#include "receive.h"
#include "trace.h"

/*
 * How many times a second a vCPU may exit for the same received page.  The
 * kernel can reclaim, merge or sample the page in between, but does so only a
 * few times a second: more exits mean that something is wrong.
 */
#define POPULATE_RETRIES 100

/*
 * Received pages are populated together within such a window, the size of
 * Linux's own fault-around.  A larger one would save little, and allocate
 * memory for more zero pages that the guest may never write to.
 */
#define POPULATE_WINDOW (64 * KiB)

/*
 * Pages around one that a guest's kernel has missed are requested within such a
 * window.  Of the 400 pages that Linux's kernel missed in a postcopy, it still
 * missed 180 with 64 KiB, and 120 with this size.
 */
#define AROUND_WINDOW (256 * KiB)

/* Maximum number of requests that one system call sends */
#define POSTCOPY_FAULT_FLUSH 64

/* How often the end of the stream checks whether a connection has broken */
#define END_LOOK_MS 100

/* ... while devices are loaded, if all memory was received before them */
#define LOADING_LOOK_US 1000

typedef struct PostcopyFaultVCPU {
    PostcopyWaiter waiter;
    /* Only the vCPU's thread uses @populated, @populated_since and @repeats */
    void *populated;
    int64_t populated_since;
    unsigned repeats;
} PostcopyFaultVCPU;

static bool postcopy_fault_fetches(MigrationIncomingState *mis)
{
    return postcopy_source(mis) == &postcopy_fetch_channels;
}

PostcopyPage postcopy_page(RAMBlock *rb, ram_addr_t offset)
{
    size_t size = qemu_ram_pagesize(rb);
    ram_addr_t start = ROUND_DOWN(offset, size);

    return (PostcopyPage) { rb, start, rb->host + start, size };
}

/* The same page, with the connection on which it is to be requested */
static PostcopyPage postcopy_fault_page(MigrationIncomingState *mis,
                                        const PostcopyPage *page)
{
    PostcopyPage missed = *page;

    missed.channel = postcopy_fault_fetches(mis) ?
                     postcopy_fetch_choose(mis, page) : 0;
    return missed;
}

static bool postcopy_fault_received(const PostcopyPage *page)
{
    /* Blocks that do not migrate have no bitmap and miss nothing */
    return !page->rb->receivedmap ||
           ramblock_recv_bitmap_test_byte_offset(page->rb, page->start);
}

static void postcopy_fault_set_received(const PostcopyPage *page)
{
    /* In this order: no vCPU exits for a page that it then finds received */
    kvm_exit_on_missing_placed(page->rb, page->start, page->size);
    ramblock_recv_bitmap_set_range(page->rb, page->host,
                                   page->size / qemu_target_page_size());
}

static void postcopy_fault_missed(const PostcopyPage *page, uint32_t tid)
{
    mark_postcopy_blocktime_begin((uintptr_t)page->host, tid, page->rb);
}

static void postcopy_fault_delivered(const PostcopyPage *page)
{
    mark_postcopy_blocktime_end((uintptr_t)page->host);
}

/* The fault thread exits after postcopy_requests_stop() */
static void postcopy_fault_deferred(void)
{
    postcopy_fault_thread_notify(migration_incoming_get_current());
}

static const PostcopyRequestOps postcopy_fault_request_ops = {
    .received = postcopy_fault_received,
    .set_received = postcopy_fault_set_received,
    .missed = postcopy_fault_missed,
    .delivered = postcopy_fault_delivered,
    .deferred = postcopy_fault_deferred,
};

void postcopy_fault_init(MigrationIncomingState *mis)
{
    struct PostcopyIncoming *postcopy = g_new0(struct PostcopyIncoming, 1);

    postcopy->requests = postcopy_requests_new(&postcopy_fault_request_ops);
    postcopy->fetch = postcopy_fetch_new(mis);
    mis->postcopy = postcopy;
}

/*
 * Returns 0, or negative errno.  The entry stays then, and recovery, which the
 * thread that notices the broken connection begins, requests the page again.
 */
static int postcopy_fault_request(MigrationIncomingState *mis,
                                  const PostcopyPage *page, bool flush_later)
{
    int ret = 0;

    migration_inject_hold("postcopy-ask");
    /*
     * Discarded pages (via RamDiscardManager) are never migrated. On unlikely
     * access, place a zeropage.
     */
    if (postcopy_source(mis) != &postcopy_file &&
        ramblock_page_is_discarded(page->rb, page->start)) {
        if (postcopy_requests_enter(mis->postcopy->requests)) {
            ret = postcopy_receive_page(mis, page, NULL);
            postcopy_requests_leave(mis->postcopy->requests);
        }
        if (ret) {
            postcopy_fault_break_connection(mis);
        }
        return ret;
    }
    return postcopy_source(mis)->request(mis, page, flush_later);
}

bool postcopy_fault_uffd(MigrationIncomingState *mis, const PostcopyPage *page,
                         const PostcopyFault *fault)
{
    PostcopyPage missed = postcopy_fault_page(mis, page);
    PostcopyPageState state;

    state = postcopy_request_begin(mis->postcopy->requests, &missed, fault);
    trace_postcopy_fault_uffd(qemu_ram_get_idstr(page->rb), page->start, state);
    if (state == POSTCOPY_PAGE_RECEIVED) {
        return true;
    }
    if (state == POSTCOPY_PAGE_REQUEST) {
        /* If this fails, recovery sends the request */
        postcopy_fault_request(mis, &missed, fault->flush_later);
    }
    return false;
}

/*
 * The page was received but KVM cannot map it: it is read-only in the host's
 * page table (zero page, KSM), swapped out, or was received after the exit.
 */
static int postcopy_fault_populate(CPUState *cpu, PostcopyFaultVCPU *vf,
                                   const PostcopyPage *page)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    const char *idstr = qemu_ram_get_idstr(page->rb);
    PostcopyPage run = *page;
    int64_t now = get_clock();

    if (vf->populated != page->host ||
        now - vf->populated_since > NANOSECONDS_PER_SECOND) {
        vf->populated = page->host;
        vf->populated_since = now;
        vf->repeats = 0;
    } else if (++vf->repeats > POPULATE_RETRIES) {
        error_report("vCPU %d: KVM exits again and again for a page that is "
                     "present: %s offset 0x" RAM_ADDR_FMT,
                     cpu->cpu_index, idstr, page->start);
        return -1;
    }

    trace_postcopy_fault_populate(cpu->cpu_index, idstr, page->start);
    postcopy_requests_run(mis->postcopy->requests, &run,
                          page->rb->postcopy_length, POPULATE_WINDOW);
    if (qemu_madvise(run.host, run.size, QEMU_MADV_POPULATE_WRITE) &&
        errno != EAGAIN && errno != EINTR) {
        error_report("vCPU %d: cannot populate %s offset 0x" RAM_ADDR_FMT
                     ": %s", cpu->cpu_index, idstr, run.start,
                     strerror(errno));
        return -1;
    }
    return 1;
}

/*
 * This sends each page only once, but sooner.  Not used where the next request
 * would wait behind these pages, at the background's rate.
 */
static void postcopy_fault_request_around(MigrationIncomingState *mis,
                                          const PostcopyPage *page)
{
    PostcopyPage first = postcopy_page(page->rb,
                                       ROUND_DOWN(page->start, AROUND_WINDOW));
    ram_addr_t end = MIN(first.start + AROUND_WINDOW,
                         page->rb->postcopy_length);
    uint64_t mask;

    if (page->size >= AROUND_WINDOW || page->start >= end ||
        migration_inject_without("around") ||
        !(migrate_postcopy_preempt() || postcopy_fault_fetches(mis)) ||
        /* Parts of such memory are never sent */
        memory_region_has_ram_discard_manager(page->rb->mr)) {
        return;
    }
    first.channel = page->channel;
    mask = postcopy_requests_ahead(mis->postcopy->requests, &first,
                                   (end - first.start) / page->size);
    trace_postcopy_fault_around(qemu_ram_get_idstr(page->rb), page->start,
                                first.start, mask);
    while (mask) {
        PostcopyPage each = postcopy_page_at(&first, ctz64(mask));

        mask &= mask - 1;
        postcopy_fault_request(mis, &each, true);
    }
}

PostcopyPageState postcopy_fault_begin(CPUState *cpu, const PostcopyPage *page,
                                       PostcopyWaiter *waiter,
                                       PostcopyFaultSend send)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    PostcopyFault fault = {
        .cpu = cpu->cpu_index,
        .tid = cpu->thread_id,
        .waiter = waiter,
    };
    PostcopyPage missed = postcopy_fault_page(mis, page);
    PostcopyPageState state;

    state = postcopy_request_begin(mis->postcopy->requests, &missed, &fault);
    trace_postcopy_fault_exit(cpu->cpu_index, qemu_ram_get_idstr(page->rb),
                              page->start, state);
    if (state == POSTCOPY_PAGE_RECEIVED) {
        return state;
    }
    migration_inject_hold("postcopy-exit");
    if (state != POSTCOPY_PAGE_REQUEST) {
        return state;
    }
    if (send == POSTCOPY_SEND_DEFERRED) {
        postcopy_request_defer(mis->postcopy->requests, &missed);
        return state;
    }
    /* If this fails, the vCPU waits until recovery sends the request */
    if (!postcopy_fault_request(mis, &missed, send == POSTCOPY_SEND_AROUND) &&
        send == POSTCOPY_SEND_AROUND) {
        postcopy_fault_request_around(mis, &missed);
        postcopy_source(mis)->flush(mis);
    }
    return state;
}

void postcopy_fault_send_deferred(MigrationIncomingState *mis)
{
    PostcopyPage pages[POSTCOPY_FAULT_FLUSH];
    unsigned n = postcopy_requests_take_deferred(mis->postcopy->requests, pages,
                                                 POSTCOPY_FAULT_FLUSH);

    for (unsigned i = 0; i < n; i++) {
        postcopy_fault_request(mis, &pages[i], true);
    }
    postcopy_source(mis)->flush(mis);
    if (n == POSTCOPY_FAULT_FLUSH) {
        /* The rest follows the faults of userfaultfd, which must not starve */
        postcopy_fault_thread_notify(mis);
    }
}

static int postcopy_fault_wait(CPUState *cpu, const PostcopyPage *page,
                               PostcopyFaultSend send)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    PostcopyFaultVCPU *vf = &mis->postcopy->vcpus[cpu->cpu_index];
    PostcopyPageState state;
    bool placed;

    state = postcopy_fault_begin(cpu, page, &vf->waiter, send);
    if (state == POSTCOPY_PAGE_RECEIVED) {
        return postcopy_fault_populate(cpu, vf, page);
    }

    vf->populated = NULL;

    /*
     * cpus_kick_thread() sets thread_kicked, then postcopy_fault_kick() is
     * called.  Either this call comes after postcopy_request_begin() has reset
     * the waiter, or the reset has seen the kick, and thread_kicked is visible.
     */
    if (qatomic_read(&cpu->thread_kicked)) {
        postcopy_waiter_kick(&vf->waiter);
    }
    placed = postcopy_request_wait(mis->postcopy->requests, &vf->waiter);
    trace_postcopy_fault_exit_end(cpu->cpu_index, placed);

    /*
     * In both cases the vCPU returns to KVM_RUN.  It finds the page, or gets
     * -EINTR: then its thread handles the kick, and the vCPU faults again.
     */
    return placed;
}

static int postcopy_fault_exit(CPUState *cpu, RAMBlock *rb, ram_addr_t offset)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    const PostcopySource *source = postcopy_source(mis);
    PostcopyPage page = postcopy_page(rb, offset);

    if (source->serve && source->serve(mis, &page, cpu->cpu_index)) {
        return 1;
    }
    switch (postcopy_async_fault(cpu, &page)) {
    case POSTCOPY_FAULT_ENTER:
        return 0;
    case POSTCOPY_FAULT_WAIT_FOR_ANOTHER:
        return MIN(postcopy_fault_wait(cpu, &page, POSTCOPY_SEND_NOW), 0);
    case POSTCOPY_FAULT_WAIT_AROUND:
        return postcopy_fault_wait(cpu, &page, POSTCOPY_SEND_AROUND);
    default:
        return postcopy_fault_wait(cpu, &page, POSTCOPY_SEND_NOW);
    }
}

static void postcopy_fault_kick(CPUState *cpu)
{
    MigrationIncomingState *mis = migration_incoming_get_current();

    postcopy_waiter_kick(&mis->postcopy->vcpus[cpu->cpu_index].waiter);
}

static bool postcopy_fault_missing(RAMBlock *rb, unsigned long *bitmap)
{
    size_t size = qemu_real_host_page_size();
    size_t pages = rb->postcopy_length / size;

    if (!rb->receivedmap) {
        return false;
    }
    if (size == qemu_target_page_size()) {
        bitmap_complement(bitmap, rb->receivedmap, pages);
        return true;
    }
    for (size_t i = 0; i < pages; i++) {
        if (!ramblock_recv_bitmap_test_byte_offset(rb, i * size)) {
            set_bit(i, bitmap);
        }
    }
    return true;
}

static const KVMMissingOps postcopy_fault_missing_ops = {
    .fault = postcopy_fault_exit,
    .kick = postcopy_fault_kick,
    .missing = postcopy_fault_missing,
};

static bool postcopy_fault_exits_available(Error **errp)
{
    if (!kvm_exit_on_missing_available(errp)) {
        return false;
    }
    /* For received pages that are read-only.  Length 0 only probes. */
    if (qemu_madvise(NULL, 0, QEMU_MADV_POPULATE_WRITE)) {
        error_setg(errp, "the host kernel does not have MADV_POPULATE_WRITE, "
                   "which came with Linux 5.14");
        return false;
    }
    return true;
}

bool postcopy_fault_exits_check(Error **errp)
{
    ERRP_GUARD();
    Error *err = NULL;

    if (migrate_postcopy_fault_exits() == ON_OFF_AUTO_OFF) {
        return true;
    }
    /* For "auto", too: the blackout leaves no time for the first probe */
    if (postcopy_fault_exits_available(&err)) {
        if (migrate_postcopy_ram()) {
            postcopy_async_prepare();
        }
        return true;
    }
    if (migrate_postcopy_fault_exits() == ON_OFF_AUTO_AUTO) {
        error_free(err);
        return true;
    }
    error_propagate(errp, err);
    error_prepend(errp, "postcopy-fault-exits=on: ");
    error_append_hint(errp, "Set postcopy-fault-exits to 'auto' or 'off', or "
                      "run on a host kernel that has the feature.\n");
    return false;
}

static void postcopy_fault_exits_enable(MigrationIncomingState *mis)
{
    Error *err = NULL;

    if (migrate_postcopy_fault_exits() == ON_OFF_AUTO_OFF) {
        trace_postcopy_fault_exits_off("parameter");
        return;
    }
#ifdef CONFIG_MIGRATION_INJECT
    if (!kvm_enabled() && migrate_postcopy_fault_exits() != ON_OFF_AUTO_ON) {
        /* Other tests have no exits with TCG */
        trace_postcopy_fault_exits_off("TCG");
        return;
    }
#endif
    if (migrate_rdma()) {
        /* No code records which pages RDMA receives in precopy */
        trace_postcopy_fault_exits_off("RDMA");
        return;
    }
    if (!postcopy_fault_exits_available(&err)) {
        trace_postcopy_fault_exits_off(error_get_pretty(err));
        error_free(err);
        return;
    }

    if (!mis->postcopy->vcpus) {
        unsigned max_cpus = MACHINE(qdev_get_machine())->smp.max_cpus;

        mis->postcopy->vcpus = g_new0(PostcopyFaultVCPU, max_cpus);
        for (unsigned i = 0; i < max_cpus; i++) {
            postcopy_waiter_init(&mis->postcopy->vcpus[i].waiter);
        }
    }
    if (!kvm_exit_on_missing_enable(&postcopy_fault_missing_ops, &err)) {
        /* The guest has left the source: continue without exits */
        warn_reportf_err(err, "postcopy uses only userfaultfd: ");
        return;
    }
    postcopy_async_start(mis);
}

static void postcopy_fault_choose_source(MigrationIncomingState *mis)
{
    qatomic_set(&mis->postcopy->source,
                postcopy_file_active(mis) ? &postcopy_file :
                postcopy_fetch_incoming(mis) ? &postcopy_fetch_channels :
                &postcopy_return_path);
}

void postcopy_fault_start(MigrationIncomingState *mis)
{
    postcopy_fault_choose_source(mis);
    postcopy_requests_start(mis->postcopy->requests);
    postcopy_fault_exits_enable(mis);
    postcopy_watch_start(mis);
}

/*
 * Pages that were not received are zeros from here on.  That may be right: a
 * source does not send memory that is not plugged, or reported free by the
 * guest.
 */
static int trace_not_received(RAMBlock *rb, void *opaque)
{
    long pages = rb->postcopy_length >> qemu_target_page_bits();
    long missing = rb->receivedmap ?
        pages - bitmap_count_one(rb->receivedmap, pages) : 0;

    if (missing && !memory_region_has_ram_discard_manager(rb->mr)) {
        trace_postcopy_not_received(rb->idstr, missing);
    }
    return 0;
}

void postcopy_fault_stop(MigrationIncomingState *mis)
{
    if (trace_event_get_state_backends(TRACE_POSTCOPY_NOT_RECEIVED)) {
        foreach_not_ignored_block(trace_not_received, NULL);
    }
    postcopy_requests_stop(mis->postcopy->requests);
    kvm_exit_on_missing_forget();
}

void postcopy_fault_end(MigrationIncomingState *mis)
{
    /*
     * Both calls wait for vCPUs in KVM_RUN.  A vCPU that misses a page that is
     * never received stays there until userfaultfd releases the memory.
     */
    kvm_exit_on_missing_disable();
    postcopy_async_stop(mis);
}

void postcopy_fault_hold(MigrationIncomingState *mis)
{
    qatomic_set(&mis->postcopy->hold_requests, true);
}

void postcopy_fault_ask_again(MigrationIncomingState *mis)
{
    g_autoptr(GArray) list = NULL;

    /*
     * In this order: a thread that has found requests held, or uses the
     * previous source, has an entry by now, and others send by themselves.
     */
    postcopy_fault_choose_source(mis);
    WITH_QEMU_LOCK_GUARD(&mis->rp_mutex) {
        qatomic_set(&mis->postcopy->hold_requests, false);
    }
    list = postcopy_requests_list(mis->postcopy->requests);
    for (guint i = 0; i < list->len; i++) {
        PostcopyPage *page = &g_array_index(list, PostcopyPage, i);
        const char *idstr = qemu_ram_get_idstr(page->rb);

        if (postcopy_fault_request(mis, page, true)) {
            /* The connection has broken again; the next recovery sends it */
            error_report("postcopy: cannot request again %s offset 0x"
                         RAM_ADDR_FMT, idstr, page->start);
            return;
        }
        trace_postcopy_fault_ask_again(idstr, page->start);
        if ((i + 1) % POSTCOPY_FAULT_FLUSH == 0) {
            postcopy_source(mis)->flush(mis);
        }
    }
    postcopy_source(mis)->flush(mis);
}

/*
 * Called by the listen thread, and only this thread closes these files.  The
 * next call sees an error that another thread sets meanwhile without a lock.
 */
static bool postcopy_fault_connection_is_broken(MigrationIncomingState *mis)
{
    return qemu_file_get_error(mis->from_src_file) ||
           !mis->to_src_file || qemu_file_get_error(mis->to_src_file);
}

/*
 * All pages that the source has sent were received.  Whether one is missing
 * that is not discarded: the thread that misses a discarded page places it.
 */
static bool postcopy_fault_is_withheld(MigrationIncomingState *mis)
{
    g_autoptr(GArray) list = postcopy_requests_list(mis->postcopy->requests);

    for (guint i = 0; i < list->len; i++) {
        PostcopyPage *page = &g_array_index(list, PostcopyPage, i);

        if (!ramblock_page_is_discarded(page->rb, page->start)) {
            error_report("postcopy: the source has ended the stream without "
                         "the page at offset 0x" RAM_ADDR_FMT " of %s",
                         page->start, qemu_ram_get_idstr(page->rb));
            return true;
        }
    }
    return false;
}

int postcopy_fault_wait_end(MigrationIncomingState *mis)
{
    PostcopyState ps = postcopy_state_get();
    int64_t late_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + POSTCOPY_LATE_MS;
    const PostcopySource *source = postcopy_source(mis);
    bool ended = false;

    if (!migrate_postcopy_ram() || qemu_in_coroutine() ||
        ps < POSTCOPY_INCOMING_LISTENING || ps >= POSTCOPY_INCOMING_END) {
        return 0;
    }
    if (mis->state == MIGRATION_STATUS_POSTCOPY_RECOVER) {
        /* Requests are held, so no thread reads the preempt channel */
        error_report("postcopy: the source has ended the stream before it has "
                     "resumed");
        return -EIO;
    }
    while (true) {
        ended = ended || !source->wait_end ||
                source->wait_end(mis, END_LOOK_MS);
        if (!ended && qemu_clock_get_ms(QEMU_CLOCK_REALTIME) >= late_ms) {
            late_ms = INT64_MAX;
            warn_report("postcopy: the source has ended the stream, but not "
                        "all fetch channels, for %d s. If one is lost: "
                        "migrate-pause, and recover", POSTCOPY_LATE_MS / 1000);
        }
        if (postcopy_state_get() == POSTCOPY_INCOMING_LISTENING) {
            /* The main thread loads the devices, and may still miss a page */
            g_usleep(LOADING_LOOK_US);
        } else if (ended &&
                   postcopy_requests_wait_empty(mis->postcopy->requests,
                                                END_LOOK_MS)) {
            return 0;
        }
        /* A channel keeps the order of pages: none follows the last end */
        if (postcopy_fault_connection_is_broken(mis) ||
            (ended && !migrate_postcopy_preempt() &&
             postcopy_fault_is_withheld(mis))) {
            return -EIO;
        }
    }
}

void postcopy_fault_break_connection(MigrationIncomingState *mis)
{
    /*
     * to_src_file is the same socket, but a thread that sends to a source which
     * does not read holds its lock
     */
    QEMU_LOCK_GUARD(&mis->from_src_file_mutex);
    if (mis->from_src_file) {
        qemu_file_shutdown(mis->from_src_file);
    }
}

static void postcopy_fault_fill_latencies(MigrationInfo *info,
                                          const PostcopyMeter *meter)
{
    uint64List **dist = &info->postcopy_latency_dist;
    uint64List **vcpus = &info->postcopy_vcpu_latency;

    info->has_postcopy_latency = true;
    info->postcopy_latency = postcopy_meter_mean(meter);
    info->has_postcopy_non_vcpu_latency = true;
    info->postcopy_non_vcpu_latency = postcopy_latency_mean(&meter->others);
    info->has_postcopy_latency_dist = true;
    for (unsigned i = 0; i < POSTCOPY_METER_BUCKETS; i++) {
        QAPI_LIST_APPEND(dist, meter->dist[i]);
    }
    info->has_postcopy_vcpu_latency = true;
    for (guint i = 0; i < meter->vcpus->len; i++) {
        PostcopyLatency *l = &g_array_index(meter->vcpus, PostcopyLatency, i);

        QAPI_LIST_APPEND(vcpus, postcopy_latency_mean(l));
    }
}

void postcopy_fault_fill_info(MigrationInfo *info)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    PostcopyFaultStats *stats;
    PostcopyOldest oldest;
    PostcopyMeter meter;

    if (postcopy_state_get() < POSTCOPY_INCOMING_LISTENING) {
        return;
    }
    stats = g_new0(PostcopyFaultStats, 1);
    postcopy_requests_stats(mis->postcopy->requests, stats);
    stats->awaited = postcopy_requests_outstanding(mis->postcopy->requests,
                                                   &oldest);
    if (stats->awaited) {
        stats->oldest = g_new0(PostcopyAwaitedPage, 1);
        stats->oldest->ramblock = g_strdup(qemu_ram_get_idstr(oldest.page.rb));
        stats->oldest->offset = oldest.page.start;
        stats->oldest->wait_ms = oldest.age_ns / SCALE_MS;
    }
    info->postcopy_faults = stats;
    postcopy_async_fill_info(mis, info);

    postcopy_requests_meter(mis->postcopy->requests, &meter);
    postcopy_fault_fill_latencies(info, &meter);
    postcopy_meter_destroy(&meter);
}
