/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <errno.h>
#include <stdlib.h>

#include "arch.h"
#include "fail.h"
#include "readers.h"
#include "vcpu.h"

int main(int argc, char **argv)
{
    struct options options = parse_options(argc, argv);
    struct memory memory = make_memory(&options);
    struct vm vm = make_vm(&memory);
    struct vcpu *vcpus = calloc(options.vcpus, sizeof(*vcpus));
    struct figures f = {
        .options = &options,
        .page_size = memory.page_size,
        .pages_per_vcpu = vm.samples_per_vcpu,
        .latencies = options.vcpus * vm.samples_per_vcpu,
    };
    struct readers readers;
    pthread_barrier_t start;
    double start_s;

    f.vcpu_s = malloc(options.vcpus * sizeof(*f.vcpu_s));
    f.latency_us = malloc(f.latencies * sizeof(*f.latency_us));
    pthread_barrier_init(&start, NULL, options.vcpus + 1);
    for (unsigned i = 0; i < options.vcpus; i++) {
        vcpus[i] = (struct vcpu) {
            .vm = &vm, .memory = &memory, .start = &start, .number = i, .fd = make_vcpu(&vm, &memory, i),
        };
    }
    readers = start_readers(&memory);
    for (unsigned i = 0; i < options.vcpus; i++) {
        start_vcpu(&vcpus[i]);
    }

    pthread_barrier_wait(&start);
    start_s = now_s();
    for (unsigned i = 0; i < options.vcpus; i++) {
        double ticks_per_us = arch_ticks_per_us(vcpus[i].fd);

        pthread_join(vcpus[i].thread, NULL);
        f.vcpu_s[i] = vcpus[i].end_s - start_s;
        if (f.vcpu_s[i] > f.elapsed_s) {
            f.elapsed_s = f.vcpu_s[i];
        }
        add_thread_stats(&f.vcpus, &vcpus[i].stats);
        for (size_t n = 0; n < vm.samples_per_vcpu; n++) {
            f.latency_us[i * vm.samples_per_vcpu + n] = samples_of(&vm, i)[n] / ticks_per_us;
        }
    }
    stop_readers(&readers);
    for (unsigned i = 0; i < readers.count; i++) {
        add_thread_stats(&f.readers, &readers.reader[i].stats);
    }

    f.bad_pages = count_bad_pages(&memory);
    print_figures(&f);
    if (f.bad_pages) {
        fail("%lu pages are not what they must be", f.bad_pages);
    }
    if (options.exits && !f.vcpus.counts.exits) {
        fail("-w: the flag was accepted, but no vCPU has exited for a missing page");
    }
    return 0;
}
