/*
 * Async page faults for KVM's arm64 guests, served by QEMU
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_ASYNC_PF_H
#define TARGET_ARM_KVM_ASYNC_PF_H

#include "cpu-qom.h"

struct kvm_run;

/* Of ARMCPU.  Used by the vCPU's thread, and while the VM is stopped. */
typedef struct KVMArmAsyncPF {
    /* The guest has told where its data block is, a guest physical address */
    bool enabled;
    uint64_t block;
    /* The PPI is up: there are tokens to be taken */
    bool up;
    /* It is to forget the tokens it knows, and is told of none until it has */
    bool wake_all;
    /* Suspended until a kick */
    bool suspended;
} KVMArmAsyncPF;

#ifdef CONFIG_KVM

extern const VMStateDescription vmstate_kvm_arm_async_pf;

/* Called once when KVM is set up */
void kvm_arm_async_pf_init(void);

void kvm_arm_async_pf_add_properties(ARMCPU *cpu);

/* After kvm_arm_sdei_init_vcpu().  Returns -errno, and has said why. */
int kvm_arm_async_pf_init_vcpu(ARMCPU *cpu);

/* Guests that have it find it at /firmware/async-pf, of which this is made */
void kvm_arm_async_pf_describe(void *fdt);

void kvm_arm_async_pf_reset_vcpu(ARMCPU *cpu);

/* Bracket KVM_RUN, in the vCPU's thread and without the BQL */
void kvm_arm_async_pf_pre_run(ARMCPU *cpu);
void kvm_arm_async_pf_post_run(ARMCPU *cpu);

/*
 * The guest has called a function of SMCCC.  In the vCPU's thread, without the
 * BQL.  Returns whether it was served.
 */
bool kvm_arm_async_pf_exit(ARMCPU *cpu, const struct kvm_run *run);

/* The guest has called a function of SDEI, which may have unregistered ours */
void kvm_arm_async_pf_sdei_called(ARMCPU *cpu, const struct kvm_run *run);

#else

static inline void kvm_arm_async_pf_describe(void *fdt)
{
}

#endif

#endif
