/*
 * HMP: output of "info migrate" on guest time, snapshots and postcopy's faults
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "info-hmp.h"

static void info_snapshot(Monitor *mon, const MigrationInfo *info)
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

static void info_postcopy_latencies(Monitor *mon, const MigrationInfo *info)
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
        static const char bar[] = "########################################";

        if (l->value) {
            monitor_printf(mon, "  %8u - %8u us: %10" PRIu64 " %.*s\n",
                           n ? 1u << n : 0, 2u << n, l->value,
                           (int)DIV_ROUND_UP(l->value * strlen(bar), most),
                           bar);
        }
    }
}

static void info_postcopy_faults(Monitor *mon, const MigrationInfo *info)
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
    info_postcopy_latencies(mon, info);
}

static void info_postcopy_async(Monitor *mon, const MigrationInfo *info)
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

static void info_postcopy_fetch(Monitor *mon, const MigrationInfo *info)
{
    PostcopyFetchInfo *fetch = info->postcopy_fetch;
    unsigned n = 0;

    if (!fetch) {
        return;
    }
    for (PostcopyFetchStatsList *l = fetch->channels; l; l = l->next) {
        monitor_printf(mon, "postcopy fetch channel %u: requests %" PRIu64
                       ", pages %" PRIu64 ", zero pages %" PRIu64
                       ", frames %" PRIu64 "\n", n++,
                       l->value->requests, l->value->pages,
                       l->value->zero_pages, l->value->frames);
    }
}

static void info_postcopy_window(Monitor *mon, const MigrationInfo *info)
{
    PostcopyWindowInfo *w = info->postcopy_window;

    if (w) {
        monitor_printf(mon, "postcopy window: %" PRIu64 " bytes, unacknowledged %"
                       PRIu64 ", unread %" PRIu64 ", delay %" PRIu64 " us\n",
                       w->size, w->unacknowledged, w->unread, w->delay / 1000);
    }
}

static void info_postcopy_file(Monitor *mon, const MigrationInfo *info)
{
    const PostcopyFileInfo *f = info->postcopy_file;

    if (f) {
        monitor_printf(mon, "postcopy file: %s, %" PRIu64 " of %" PRIu64
                       " bytes to read, %" PRIu64 " pages missed that the page "
                       "cache had not\n", f->filename, f->remaining, f->total,
                       f->uncached);
    }
}

static void info_guest_time_host(Monitor *mon, const char *name,
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

static void info_guest_time(Monitor *mon, const MigrationInfo *info)
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
    info_guest_time_host(mon, "source", g->source);
    info_guest_time_host(mon, "destination", g->destination);
}

void migration_info_hmp_print(Monitor *mon, const MigrationInfo *info)
{
    info_snapshot(mon, info);
    info_postcopy_faults(mon, info);
    info_postcopy_async(mon, info);
    info_postcopy_fetch(mon, info);
    info_postcopy_window(mon, info);
    info_postcopy_file(mon, info);
    info_guest_time(mon, info);
}
