/*
 * Postcopy: "info migrate" about vCPUs that do not wait
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "postcopy-async-hmp.h"

void postcopy_async_hmp_print(Monitor *mon, const MigrationInfo *info)
{
    PostcopyAsyncStats *s = info->postcopy_async;

    if (!s) {
        return;
    }
    monitor_printf(mon, "postcopy async page faults: announced %" PRIu64
                   ", delivered %" PRIu64 ", forgotten %" PRIu64
                   ", outstanding %" PRIu64 ", slot busy %" PRIu64 "\n",
                   s->announced, s->delivered, s->forgotten, s->outstanding,
                   s->slot_busy);
    monitor_printf(mon, "  refused: kernel %" PRIu64 ", event %" PRIu64
                   ", busy %" PRIu64 ", without %" PRIu64 "; halted %" PRIu64
                   "\n", s->refused_kernel, s->refused_event,
                   s->refused_busy, s->refused_without, s->halted);
}
