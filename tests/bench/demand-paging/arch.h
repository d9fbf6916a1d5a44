/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What differs by architecture: the guest's program, and a vCPU that runs it. */
#ifndef ARCH_H
#define ARCH_H

#include <linux/kvm.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * The program: for each of count pages from address on, write TOUCHED to its byte, and the ticks
 * that this took, as 64 bits, to samples. Then leave KVM so that arch_is_done().
 */
extern const uint8_t guest_program[], guest_program_end[];

struct guest_job {
    uint64_t address, stride, count, samples;
};

/* Identity of the first 512 GiB, in pages of 1 GiB. */
#define ARCH_TABLES_SIZE 0x2000ul
#define ARCH_ADDRESSES (512ul << 30)
void arch_make_tables(void *tables, uint64_t gpa);

void arch_start_vcpu(int kvm, int vm, int vcpu, uint64_t program, uint64_t tables, const struct guest_job *job);
bool arch_is_done(const struct kvm_run *run);
double arch_ticks_per_us(int vcpu);

#endif
