/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What threads count, and the figures made of it. */
#ifndef STATS_H
#define STATS_H

#include "memory.h"

struct thread_stats {
    struct resolve_counts counts;
    long voluntary_switches, involuntary_switches;
    double cpu_s;
};

/* Of the calling thread, from begin to end. */
void begin_thread_stats(struct thread_stats *stats);
void end_thread_stats(struct thread_stats *stats);

double now_s(void);

struct figures {
    const struct options *options;
    size_t page_size;
    double elapsed_s;
    double *vcpu_s;             /* of each vCPU, from the common start to its own end */
    unsigned long pages_per_vcpu;
    double *latency_us;         /* of all touches; is sorted by print_figures() */
    unsigned long latencies;
    struct thread_stats vcpus, readers;
    unsigned long bad_pages;
};

void add_thread_stats(struct thread_stats *sum, const struct thread_stats *stats);
void print_figures(struct figures *f);

#endif
