/*
 * SDEI 1.0, served by QEMU for KVM's guests
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_SDEI_H
#define TARGET_ARM_KVM_SDEI_H

#include "cpu-qom.h"

#ifdef CONFIG_KVM

#include "target/arm/kvm-sdei-state.h"

struct kvm_run;

extern const VMStateDescription vmstate_kvm_arm_sdei;

void kvm_arm_sdei_add_properties(ARMCPU *cpu);

/* KVM has made the vCPU.  Returns -errno if it cannot do what is asked. */
int kvm_arm_sdei_init_vcpu(ARMCPU *cpu);

/* The vCPU is reset; with the first one, so is what is the VM's. */
void kvm_arm_sdei_reset_vcpu(ARMCPU *cpu);

/* Whether guests have it, once the first vCPU is realized */
bool kvm_arm_sdei_enabled(void);

/*
 * The guest has called a function of SDEI.  In the vCPU's thread, no BQL.
 * Returns -errno, and has said why, if the guest cannot go on.
 */
int kvm_arm_sdei_exit(ARMCPU *cpu, const struct kvm_run *run);

/*
 * Let KVM hand @functions calls of SMCCC from @base on to QEMU.  Before any
 * vCPU has run.  Returns -ENOTSUP on hosts before Linux 6.4, or -errno.
 */
int kvm_arm_forward_calls(uint32_t base, uint32_t functions);

/**
 * kvm_arm_sdei_add_event: let guests register another event
 * @event: copied; its number is not in use yet
 *
 * With the BQL, after the first vCPU is realized and before the VM runs, and
 * only if kvm_arm_sdei_enabled().  Both sides of a migration must add the same
 * events in the same order.  There can be SDEI_EVENTS of them, the software
 * event included.
 */
void kvm_arm_sdei_add_event(const SdeiEvent *event);

/**
 * kvm_arm_sdei_inject: an event has come
 * @cpu: whose event it is, if it is a private one
 * @number: of an event that was added
 *
 * It interrupts the guest as soon as the guest allows that; until then it is
 * pending, and comes no second time.  A pending event migrates.  In any thread;
 * in @cpu's own one the handler runs before any more code of the guest, if it
 * can.
 *
 * Returns false if the guest has not registered the event, which is then lost.
 */
bool kvm_arm_sdei_inject(ARMCPU *cpu, uint32_t number);

/*
 * Of private events, in @cpu's own thread, out of KVM_RUN, without the BQL:
 */

/* Whether it has a handler */
bool kvm_arm_sdei_is_registered(ARMCPU *cpu, uint32_t number);

/* Whether its handler would be what the guest runs next, if it came now */
bool kvm_arm_sdei_can_take(ARMCPU *cpu, uint32_t number);

/*
 * It comes: the guest runs its handler next.  Returns false, and nothing has
 * happened, if kvm_arm_sdei_can_take() is not true any more.
 */
bool kvm_arm_sdei_take(ARMCPU *cpu, uint32_t number);

#else

static inline bool kvm_arm_sdei_enabled(void)
{
    return false;
}

#endif

#endif
