/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The virtual machine: its two memory slots and its vCPUs. */
#ifndef VM_H
#define VM_H

#include "memory.h"

/* Where the memory under test is for the guest: above what architectures keep for devices. */
#define TEST_GPA (4ul << 30)

struct vm {
    int kvm, fd;
    size_t run_size;            /* of struct kvm_run */
    uint8_t *low;               /* program, tables, samples */
    size_t samples_per_vcpu;
};

/* Ends with status 2 if exits are asked for, and this kernel does not know them. */
struct vm make_vm(const struct memory *m);

/* Returns its file; it starts at the program. */
int make_vcpu(const struct vm *vm, const struct memory *m, unsigned number);

const uint64_t *samples_of(const struct vm *vm, unsigned vcpu);

#endif
