/*
 * Postcopy: "info migrate" on the destination
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "postcopy-hmp.h"

/* Width of the longest bar */
#define BAR 40

static void postcopy_hmp_print_latencies(Monitor *mon,
                                         const MigrationInfo *info)
{
    uint64List *l;
    uint64_t most = 0;
    unsigned n = 0;

    monitor_printf(mon, "postcopy latency: %" PRIu64 " us, other threads than "
                   "vCPUs: %" PRIu64 " us\n", info->postcopy_latency / 1000,
                   info->postcopy_non_vcpu_latency / 1000);
    monitor_printf(mon, "postcopy vCPU latency (us):");
    for (l = info->postcopy_vcpu_latency; l; l = l->next) {
        monitor_printf(mon, " %" PRIu64, l->value / 1000);
    }
    monitor_printf(mon, "\npostcopy latency distribution:\n");
    for (l = info->postcopy_latency_dist; l; l = l->next) {
        most = MAX(most, l->value);
    }
    for (l = info->postcopy_latency_dist; l; l = l->next, n++) {
        static const char bar[BAR + 1] =
            "########################################";

        if (l->value) {
            monitor_printf(mon, "  %8u - %8u us: %10" PRIu64 " %.*s\n",
                           n ? 1u << n : 0, 2u << n, l->value,
                           (int)DIV_ROUND_UP(l->value * BAR, most), bar);
        }
    }
}

void postcopy_hmp_print(Monitor *mon, const MigrationInfo *info)
{
    PostcopyFaultStats *s = info->postcopy_faults;

    if (!s) {
        return;
    }
    monitor_printf(mon, "postcopy faults: exits %" PRIu64 ", populated %"
                   PRIu64 ", uffd %" PRIu64 " (minor %" PRIu64 ", spurious %"
                   PRIu64 ", reads %" PRIu64 "), requests %" PRIu64
                   ", duplicates %" PRIu64 "\n", s->exits, s->populated,
                   s->uffd, s->uffd_minor, s->uffd_spurious, s->uffd_reads,
                   s->requests, s->duplicates);
    monitor_printf(mon, "postcopy pages requested ahead: %" PRIu64
                   ", of these missed %" PRIu64 "\n", s->ahead,
                   s->ahead_missed);
    monitor_printf(mon, "postcopy wakes: %" PRIu64 ", saved %" PRIu64 "\n",
                   s->wakes, s->wakes_saved);
    monitor_printf(mon, "postcopy bytes: copied %" PRIu64 ", zero %" PRIu64
                   ", continued %" PRIu64 "\n", s->copied_bytes,
                   s->zero_bytes, s->continued_bytes);
    monitor_printf(mon, "postcopy pages awaited: %" PRIu64 "\n", s->awaited);
    if (s->oldest) {
        monitor_printf(mon, "  since %" PRIu64 " ms: %s offset 0x%" PRIx64
                       "\n", s->oldest->wait_ms, s->oldest->ramblock,
                       s->oldest->offset);
    }
    postcopy_hmp_print_latencies(mon, info);
}
