/*
 * Postcopy: faults that userfaultfd reports
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include "qemu/error-report.h"
#include "qemu/userfaultfd.h"
#include "exec/ramblock.h"
#include "hw/core/cpu.h"
#include "migration/inject.h"
#include "migration/postcopy-ram.h"
#include "fault.h"
#include "incoming.h"
#include "migration/trace.h"

/* Maximum number of faults that one read() returns: 2 KiB of stack */
#define MESSAGES 64

/* cpu_index of the vCPU whose thread has this ID, or -1 */
static int postcopy_uffd_cpu_of_thread(uint32_t tid)
{
    CPUState *cpu;

    /* A vCPU may be unplugged meanwhile */
    QEMU_LOCK_GUARD(&qemu_cpu_list_lock);
    CPU_FOREACH(cpu) {
        if (cpu->thread_id == tid) {
            return cpu->cpu_index;
        }
    }
    return -1;
}

/* @fault: what the read() has shown.  An error affects only one thread. */
static void postcopy_uffd_serve(MigrationIncomingState *mis,
                                const struct uffd_msg *msg,
                                PostcopyFault fault)
{
    void *address = (void *)(uintptr_t)msg->arg.pagefault.address;
    uint32_t tid = msg->arg.pagefault.feat.ptid;
    ram_addr_t offset;
    PostcopyPage page;
    RAMBlock *rb;

    if (msg->event != UFFD_EVENT_PAGEFAULT) {
        error_report("postcopy: event %u from userfaultfd, which is not a "
                     "page fault", msg->event);
        return;
    }
    rb = qemu_ram_block_from_host(address, true, &offset);
    if (!rb || migration_inject_fail("postcopy-uffd")) {
        error_report("postcopy: fault outside of the guest's memory: %p, "
                     "thread %u hangs", address, tid);
        return;
    }
    page = postcopy_page(rb, offset);
    fault.cpu = postcopy_uffd_cpu_of_thread(tid);
    fault.tid = tid;
    fault.minor = msg->arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_MINOR;
    trace_postcopy_ram_fault_thread_request((uintptr_t)address, rb->idstr,
                                            page.start, tid);
    if (postcopy_fault_uffd(mis, &page, &fault)) {
        uffd_wakeup(mis->userfault_fd, page.host, page.size);
    }
}

bool postcopy_uffd_read(MigrationIncomingState *mis)
{
    struct uffd_msg msgs[MESSAGES];
    int n;

    migration_inject_hold("postcopy-uffd-read");
    /* 0 if the faults that poll() has reported were resolved since */
    n = uffd_read_events(mis->userfault_fd, msgs, ARRAY_SIZE(msgs));
    for (int i = 0; i < n; i++) {
        PostcopyFault fault = { .first = i == 0, .flush_later = n > 1 };

        postcopy_uffd_serve(mis, &msgs[i], fault);
    }
    if (n > 1) {
        postcopy_source(mis)->flush(mis);
    }
    return n >= 0;
}
