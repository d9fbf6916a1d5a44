/*
 * Postcopy: pages that are late
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "exec/ramblock.h"
#include "migration/postcopy-ram.h"
#include "incoming.h"

#define POSTCOPY_WATCH_MS 1000

static void postcopy_watch_look(void *opaque)
{
    MigrationIncomingState *mis = opaque;
    int64_t now_ms = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    PostcopyOldest oldest;
    unsigned n;

    if (postcopy_state_get() == POSTCOPY_INCOMING_END) {
        return;
    }
    if (qatomic_read(&mis->state) != MIGRATION_STATUS_POSTCOPY_ACTIVE) {
        /* QEMU has reported the pause; after it, the interval begins again */
        mis->postcopy->late_warned_ms = now_ms;
    } else if (now_ms - mis->postcopy->late_warned_ms >= POSTCOPY_LATE_MS) {
        n = postcopy_requests_outstanding(mis->postcopy->requests, &oldest);
        if (n && oldest.age_ns / SCALE_MS >= POSTCOPY_LATE_MS) {
            mis->postcopy->late_warned_ms = now_ms;
            warn_report("postcopy: %u pages are awaited, the first one since %"
                        PRIu64 " s: offset 0x" RAM_ADDR_FMT " of %s. If it is "
                        "not received: migrate-pause, and recover", n,
                        oldest.age_ns / SCALE_MS / 1000,
                        oldest.page.start, oldest.page.rb->idstr);
        }
    }
    timer_mod(mis->postcopy->late_timer, now_ms + POSTCOPY_WATCH_MS);
}

void postcopy_watch_start(MigrationIncomingState *mis)
{
    if (!mis->postcopy->late_timer) {
        mis->postcopy->late_timer = timer_new_ms(QEMU_CLOCK_REALTIME,
                                       postcopy_watch_look, mis);
    }
    postcopy_watch_look(mis);
}
