/*
 * Background snapshot: "info migrate"
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "snapshot-hmp.h"

void snapshot_hmp_print(Monitor *mon, const MigrationInfo *info)
{
    BackgroundSnapshotInfo *s = info->background_snapshot;

    if (!s) {
        return;
    }
    monitor_printf(mon, "background snapshot: anonymous memory %s, files %s\n",
                   BackgroundSnapshotSetup_str(s->setup_anonymous),
                   BackgroundSnapshotSetup_str(s->setup_file));
    monitor_printf(mon, "background snapshot: holes %" PRIu64 ", faults %"
                   PRIu64 " (together %" PRIu64 ", reads %" PRIu64
                   "), releases %" PRIu64 "\n", s->holes, s->faults,
                   s->faults_together, s->fault_reads, s->releases);
}
