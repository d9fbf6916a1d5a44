/*
 * Postcopy: faults that userfaultfd reports
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "qemu/userfaultfd.h"
#include "exec/ramblock.h"
#include "hw/core/cpu.h"
#include "postcopy-fault.h"
#include "postcopy-ram.h"
#include "postcopy-request.h"
#include "postcopy-uffd.h"
#include "trace.h"

/* As many as one read() may return: 2 KiB of stack */
#define MESSAGES 64

/* A page that has not come after so long is worth a warning, and so often */
#define LATE_NS (10ll * NANOSECONDS_PER_SECOND)

/* cpu_index of the vCPU whose thread has this ID, or -1 */
static int cpu_of_thread(uint32_t tid)
{
    CPUState *cpu;

    CPU_FOREACH(cpu) {
        if (cpu->thread_id == tid) {
            return cpu->cpu_index;
        }
    }
    return -1;
}

static bool serve(MigrationIncomingState *mis, const struct uffd_msg *msg,
                  bool first)
{
    void *address = (void *)(uintptr_t)msg->arg.pagefault.address;
    uint32_t tid = msg->arg.pagefault.feat.ptid;
    PostcopyFault fault = {
        .minor = msg->arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_MINOR,
        .first = first,
    };
    ram_addr_t start;
    RAMBlock *rb;

    if (msg->event != UFFD_EVENT_PAGEFAULT) {
        error_report("postcopy: event %u from userfaultfd, which is not a "
                     "page fault", msg->event);
        return true;
    }
    rb = qemu_ram_block_from_host(address, true, &start);
    if (!rb) {
        error_report("postcopy: fault outside of the guest's memory: %p",
                     address);
        return false;
    }
    start = ROUND_DOWN(start, qemu_ram_pagesize(rb));
    fault.cpu = cpu_of_thread(tid);
    trace_postcopy_ram_fault_thread_request((uintptr_t)address, rb->idstr,
                                            start, tid);
    mark_postcopy_blocktime_begin((uintptr_t)address, tid, rb);
    if (postcopy_fault_uffd(mis, rb, start, &fault)) {
        uffd_wakeup(mis->userfault_fd, rb->host + start,
                    qemu_ram_pagesize(rb));
    }
    return true;
}

bool postcopy_uffd_read(MigrationIncomingState *mis)
{
    struct uffd_msg msgs[MESSAGES];
    int n;

    /* 0 if the faults of the poll() have been resolved since */
    n = uffd_read_events(mis->userfault_fd, msgs, ARRAY_SIZE(msgs));
    for (int i = 0; i < n; i++) {
        if (!serve(mis, &msgs[i], i == 0)) {
            return false;
        }
    }
    return n >= 0;
}

void postcopy_uffd_watch(MigrationIncomingState *mis)
{
    /* The fault thread's own */
    static int64_t looked, warned;
    int64_t now = get_clock();
    PostcopyOldest oldest;
    uint64_t seconds;
    unsigned n;

    if (now - looked < POSTCOPY_UFFD_WATCH_MS * SCALE_MS) {
        return;
    }
    looked = now;
    /* While the connection is down, that is known and said */
    if (now - warned < LATE_NS ||
        qatomic_read(&mis->state) != MIGRATION_STATUS_POSTCOPY_ACTIVE) {
        return;
    }
    n = postcopy_requests_outstanding(mis->page_requests, &oldest);
    if (n && oldest.age_ns >= LATE_NS) {
        warned = now;
        seconds = oldest.age_ns / NANOSECONDS_PER_SECOND;
        warn_report("postcopy: %u pages are awaited, the first one since %"
                    PRIu64 " s: offset 0x" RAM_ADDR_FMT " of %s. If it does "
                    "not come: migrate-pause, and recover", n, seconds,
                    oldest.start, oldest.rb->idstr);
    }
}
