/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The vCPU threads, which serve their own faults if they exit for them. */
#ifndef VCPU_H
#define VCPU_H

#include <pthread.h>

#include "stats.h"
#include "vm.h"

struct vcpu {
    const struct vm *vm;
    const struct memory *memory;
    pthread_barrier_t *start;   /* of all vCPUs and main() */
    unsigned number;
    int fd;
    pthread_t thread;
    /* The thread's own until it has ended */
    struct thread_stats stats;
    double end_s;
};

void start_vcpu(struct vcpu *vcpu);

#endif
