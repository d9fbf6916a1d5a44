/*
 * Async page faults that QEMU delivers in KVM's place
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_I386_KVM_ASYNC_PF_H
#define TARGET_I386_KVM_ASYNC_PF_H

#include "cpu.h"

struct kvm_run;

/* Called once when KVM is set up */
void kvm_async_pf_init(void);

/* Bracket KVM_RUN, in the vCPU's thread and without the BQL */
void kvm_async_pf_pre_run(CPUState *cs);
void kvm_async_pf_post_run(CPUState *cs);

/* QEMU sets MSR_KVM_ASYNC_PF_EN, or is about to destroy the vCPU */
void kvm_async_pf_reset(CPUState *cs);
void kvm_async_pf_destroy(CPUState *cs);

/*
 * In kvm.c: call @handler for the guest's writes to @msr, from the first call
 * on.  Returns a negative errno if this kernel cannot filter them.
 */
int kvm_filter_msr_writes(uint32_t msr,
                          bool (*handler)(X86CPU *cpu, uint32_t msr,
                                          uint64_t val));

#endif
