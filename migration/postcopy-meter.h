/*
 * Postcopy: how long threads waited for pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_METER_H
#define MIGRATION_POSTCOPY_METER_H

/* Bucket n counts waits of [2^n, 2^(n+1)) us; the first and last take more */
#define POSTCOPY_METER_BUCKETS 24

typedef struct PostcopyLatency {
    uint64_t count;
    uint64_t total_ns;
} PostcopyLatency;

/* Its user locks */
typedef struct PostcopyMeter {
    uint64_t dist[POSTCOPY_METER_BUCKETS];
    /* PostcopyLatency by cpu_index, as far as there were any */
    GArray *vcpus;
    /* Of all other threads */
    PostcopyLatency others;
} PostcopyMeter;

void postcopy_meter_init(PostcopyMeter *meter);
void postcopy_meter_destroy(PostcopyMeter *meter);

/* Forget all */
void postcopy_meter_reset(PostcopyMeter *meter);

/* A wait has ended.  @cpu: cpu_index of the vCPU that waited, or -1 */
void postcopy_meter_add(PostcopyMeter *meter, int cpu, uint64_t ns);

/* @to must not be initialised; to be destroyed */
void postcopy_meter_copy(PostcopyMeter *to, const PostcopyMeter *from);

/* In ns; 0 if there was no wait */
uint64_t postcopy_latency_mean(const PostcopyLatency *latency);

/* Mean of all waits in ns; 0 if there was none */
uint64_t postcopy_meter_mean(const PostcopyMeter *meter);

#endif
