/*
 * Async page faults for KVM's arm64 guests, served by QEMU
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_ASYNC_PF_H
#define TARGET_ARM_KVM_ASYNC_PF_H

#include "cpu-qom.h"

struct kvm_run;

/* Part of ARMCPU.  Used by the vCPU's thread, and while the VM is stopped. */
typedef struct KVMArmAsyncPF {
    /* The guest has set @block, the guest physical address of its data block */
    bool enabled;
    uint64_t block;
    /* The PPI is raised: the guest can take tokens */
    bool up;
    /* Notify the guest to forget its tokens, and of nothing else before that */
    bool wake_all;
    /* KVM suspends the vCPU until a kick */
    bool suspended;
} KVMArmAsyncPF;

#ifdef CONFIG_KVM

extern const VMStateDescription vmstate_kvm_arm_async_pf;

/* Called once when KVM is set up */
void kvm_arm_async_pf_init(void);

void kvm_arm_async_pf_add_properties(ARMCPU *cpu);

/* After kvm_arm_sdei_init_vcpu().  Returns -errno after reporting the error. */
int kvm_arm_async_pf_init_vcpu(ARMCPU *cpu);

/* Adds the node /firmware/async-pf, by which guests find the interface */
void kvm_arm_async_pf_describe(void *fdt);

void kvm_arm_async_pf_reset_vcpu(ARMCPU *cpu);

/* Bracket KVM_RUN, in the vCPU's thread and without the BQL */
void kvm_arm_async_pf_pre_run(ARMCPU *cpu);
void kvm_arm_async_pf_post_run(ARMCPU *cpu);

/*
 * Serves a call of an SMCCC function.  In the vCPU's thread, without the BQL.
 * Returns false if the function is not one of async page faults.
 */
bool kvm_arm_async_pf_exit(ARMCPU *cpu, const struct kvm_run *run);

/* After a call of SDEI, which may have unregistered the event of async-pf */
void kvm_arm_async_pf_sdei_called(ARMCPU *cpu, const struct kvm_run *run);

#else

static inline void kvm_arm_async_pf_describe(void *fdt)
{
}

#endif

#endif
