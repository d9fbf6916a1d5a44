/*
 * Guest time: "info migrate"
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "guest-time-hmp.h"

static void guest_time_hmp_print_host(Monitor *mon, const char *name,
                                      const GuestTimeHost *host)
{
    if (!host) {
        return;
    }
    monitor_printf(mon, "guest time, clock of the %s: ", name);
    if (host->synchronized) {
        monitor_printf(mon, "synchronized to %" PRIu64 " us", host->max_error);
    } else {
        monitor_printf(mon, "not synchronized");
    }
    if (host->has_tai_offset) {
        monitor_printf(mon, ", TAI - UTC %" PRId64 " s", host->tai_offset);
    }
    monitor_printf(mon, "\n");
}

void guest_time_hmp_print(Monitor *mon, const MigrationInfo *info)
{
    const GuestTimeInfo *g = info->guest_time;

    if (!g) {
        return;
    }
    monitor_printf(mon, "guest time: %s one instant",
                   g->instant ? "moves by" : "does not move by");
    if (g->has_policy) {
        monitor_printf(mon, ", %s", GuestTimePolicy_str(g->policy));
    }
    if (g->reason) {
        monitor_printf(mon, ": %s", g->reason);
    }
    monitor_printf(mon, "\n");
    if (g->has_gap) {
        monitor_printf(mon, "guest time, blackout: %" PRId64 " us, counted: %"
                       PRId64 " us", g->gap / 1000, g->counted / 1000);
        if (g->has_error) {
            monitor_printf(mon, ", wrong by at most: %" PRIu64 " us",
                           g->error / 1000);
        }
        monitor_printf(mon, "\n");
    }
    if (g->has_clock_error) {
        monitor_printf(mon, "guest time, clocks are ahead by: %" PRId64 " ns\n",
                       g->clock_error);
    }
    guest_time_hmp_print_host(mon, "source", g->source);
    guest_time_hmp_print_host(mon, "destination", g->destination);
}
