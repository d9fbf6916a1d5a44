/* SPDX-License-Identifier: GPL-2.0-or-later */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <time.h>

#include "stats.h"

double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void add_usage(struct thread_stats *stats, int sign)
{
    struct rusage u;

    getrusage(RUSAGE_THREAD, &u);
    stats->voluntary_switches += sign * u.ru_nvcsw;
    stats->involuntary_switches += sign * u.ru_nivcsw;
    stats->cpu_s += sign * (u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6);
}

void begin_thread_stats(struct thread_stats *stats)
{
    add_usage(stats, -1);
}

void end_thread_stats(struct thread_stats *stats)
{
    add_usage(stats, 1);
}

void add_thread_stats(struct thread_stats *sum, const struct thread_stats *stats)
{
    sum->counts.exits += stats->counts.exits;
    sum->counts.uffd_events += stats->counts.uffd_events;
    sum->counts.eexist += stats->counts.eexist;
    sum->voluntary_switches += stats->voluntary_switches;
    sum->involuntary_switches += stats->involuntary_switches;
    sum->cpu_s += stats->cpu_s;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double quantile(const struct figures *f, double q)
{
    unsigned long i = f->latencies * q;

    return f->latency_us[i < f->latencies ? i : f->latencies - 1];
}

/* A line of text, or a member of a JSON object. */
static void show(bool json, const char *text, const char *key, const char *format, double value)
{
    printf(json ? "  \"%s\": " : "%-34s", json ? key : text);
    printf(format, value);
    puts(json ? "," : "");
}

void print_figures(struct figures *f)
{
    const struct options *o = f->options;
    bool json = o->json;
    unsigned long pages = f->pages_per_vcpu * o->vcpus;
    unsigned long faults = f->vcpus.counts.exits + f->readers.counts.uffd_events;
    double switches = f->vcpus.voluntary_switches + f->readers.voluntary_switches;
    double per_vcpu = 0;
    struct utsname host;

    qsort(f->latency_us, f->latencies, sizeof(*f->latency_us), compare);
    uname(&host);
    for (unsigned i = 0; i < o->vcpus; i++) {
        per_vcpu += f->pages_per_vcpu / f->vcpu_s[i] / o->vcpus;
    }
    if (json) {
        printf("{\n  \"machine\": \"%s\", \"kernel_release\": \"%s\",\n"
               "  \"mode\": \"%s\", \"memory\": \"%s\", \"uffds\": \"%s\", \"load\": \"%s\", \"exits\": %s, \"prefault\": %s,\n",
               host.machine, host.release, mode_name(o->mode), backing_name(o->backing),
               o->single_uffd ? "one" : "one per vCPU", o->shared ? "shared" : "disjoint", o->exits ? "true" : "false",
               o->prefault ? "true" : "false");
    } else {
        printf("%s faults of %s memory, %s, userfaultfd: %s, exits %s; Linux %s on %s\n", mode_name(o->mode),
               backing_name(o->backing), o->shared ? "shared" : "disjoint", o->single_uffd ? "one" : "one per vCPU",
               o->exits ? "on" : "off", host.release, host.machine);
    }
    show(json, "vCPUs", "vcpus_count", "%.0f", o->vcpus);
    show(json, "readers of each userfaultfd", "readers_per_uffd_count", "%.0f", o->readers);
    show(json, "page size (KiB)", "page_size_kib", "%.0f", f->page_size >> 10);
    show(json, "memory of each vCPU (MiB)", "memory_per_vcpu_mib", "%.0f", o->bytes_per_vcpu >> 20);
    show(json, "time (s)", "elapsed_s", "%.6f", f->elapsed_s);
    show(json, "pages touched", "touch_count", "%.0f", pages);
    show(json, "pages/s, all vCPUs", "pages_per_s", "%.1f", pages / f->elapsed_s);
    show(json, "pages/s, mean of vCPUs", "pages_per_s_mean_of_vcpus", "%.1f", per_vcpu);
    show(json, "latency of a touch, p50 (us)", "latency_p50_us", "%.1f", quantile(f, 0.5));
    show(json, "  p95", "latency_p95_us", "%.1f", quantile(f, 0.95));
    show(json, "  p99", "latency_p99_us", "%.1f", quantile(f, 0.99));
    show(json, "  worst", "latency_max_us", "%.1f", quantile(f, 1));
    show(json, "exits", "exits_count", "%.0f", f->vcpus.counts.exits);
    show(json, "messages of userfaultfd", "uffd_events_count", "%.0f", f->readers.counts.uffd_events);
    show(json, "pages that were there (EEXIST)", "eexist_count", "%.0f", f->vcpus.counts.eexist + f->readers.counts.eexist);
    show(json, "voluntary switches per fault", "voluntary_switches_per_fault_count", "%.3f", faults ? switches / faults : 0);
    show(json, "processor time, vCPU threads (s)", "vcpu_threads_cpu_s", "%.3f", f->vcpus.cpu_s);
    show(json, "processor time, readers (s)", "reader_threads_cpu_s", "%.3f", f->readers.cpu_s);
    show(json, "pages that are wrong", "bad_pages_count", "%.0f", f->bad_pages);
    printf(json ? "  \"pages_per_s_by_vcpu\": [" : "pages/s of each vCPU              ");
    for (unsigned i = 0; i < o->vcpus; i++) {
        printf(json && i ? ", %.1f" : i ? " %.1f" : "%.1f", f->pages_per_vcpu / f->vcpu_s[i]);
    }
    /* Enough of them for a curve, in equal steps of their share. */
    if (json) {
        printf("],\n  \"latency_permille_us\": [");
        for (unsigned i = 0; i <= 1000; i += 5) {
            printf(i ? ", %.1f" : "%.1f", quantile(f, i / 1000.0));
        }
        printf("]\n}");
    }
    puts("");
}
