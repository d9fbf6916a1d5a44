/*
 * Postcopy: "info migrate" about fetch channels
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/monitor.h"
#include "postcopy-fetch-hmp.h"

void postcopy_fetch_hmp_print(Monitor *mon, const MigrationInfo *info)
{
    PostcopyFetchInfo *fetch = info->postcopy_fetch;
    unsigned n = 0;

    if (!fetch) {
        return;
    }
    for (PostcopyFetchStatsList *l = fetch->channels; l; l = l->next) {
        monitor_printf(mon, "postcopy fetch channel %u: requests %" PRIu64
                       ", pages %" PRIu64 ", zero pages %" PRIu64
                       ", frames %" PRIu64 ", along %" PRIu64 "\n", n++,
                       l->value->requests, l->value->pages,
                       l->value->zero_pages, l->value->frames,
                       l->value->along);
    }
}
