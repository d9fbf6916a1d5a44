/*
 * Postcopy: how long threads waited for pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/host-utils.h"
#include "qemu/timer.h"
#include "postcopy-meter.h"

void postcopy_meter_init(PostcopyMeter *meter)
{
    *meter = (PostcopyMeter) {
        .vcpus = g_array_new(false, true, sizeof(PostcopyLatency)),
    };
}

void postcopy_meter_destroy(PostcopyMeter *meter)
{
    g_array_unref(meter->vcpus);
}

void postcopy_meter_reset(PostcopyMeter *meter)
{
    postcopy_meter_destroy(meter);
    postcopy_meter_init(meter);
}

void postcopy_meter_add(PostcopyMeter *meter, int cpu, uint64_t ns)
{
    uint64_t us = ns / SCALE_US;
    PostcopyLatency *latency = &meter->others;

    if (cpu >= 0) {
        if (cpu >= meter->vcpus->len) {
            g_array_set_size(meter->vcpus, cpu + 1);
        }
        latency = &g_array_index(meter->vcpus, PostcopyLatency, cpu);
    }
    latency->count++;
    latency->total_ns += ns;
    meter->dist[MIN(us ? 63 - clz64(us) : 0, POSTCOPY_METER_BUCKETS - 1)]++;
}

void postcopy_meter_copy(PostcopyMeter *to, const PostcopyMeter *from)
{
    *to = *from;
    to->vcpus = g_array_copy(from->vcpus);
}

uint64_t postcopy_latency_mean(const PostcopyLatency *latency)
{
    return latency->count ? latency->total_ns / latency->count : 0;
}

uint64_t postcopy_meter_mean(const PostcopyMeter *meter)
{
    PostcopyLatency all = meter->others;

    for (guint i = 0; i < meter->vcpus->len; i++) {
        PostcopyLatency *l = &g_array_index(meter->vcpus, PostcopyLatency, i);

        all.count += l->count;
        all.total_ns += l->total_ns;
    }
    return postcopy_latency_mean(&all);
}
