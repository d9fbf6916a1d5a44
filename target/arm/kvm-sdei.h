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

/* KVM has made the vCPU.  Returns -errno if KVM lacks what properties need. */
int kvm_arm_sdei_init_vcpu(ARMCPU *cpu);

/* Resets the vCPU's state and, for the first vCPU, that of the VM */
void kvm_arm_sdei_reset_vcpu(ARMCPU *cpu);

/* Whether guests have SDEI; valid once the first vCPU is realized */
bool kvm_arm_sdei_enabled(void);

/*
 * The guest has called a function of SDEI.  In the vCPU's thread, no BQL.
 * Reports an error and returns -errno if the guest cannot continue.
 */
int kvm_arm_sdei_exit(ARMCPU *cpu, const struct kvm_run *run);

/*
 * Let KVM pass @functions SMCCC calls from @base on to QEMU.  Before any vCPU
 * has run.  Returns -ENOTSUP on hosts before Linux 6.4, or -errno.
 */
int kvm_arm_forward_calls(uint32_t base, uint32_t functions);

/**
 * kvm_arm_sdei_add_event: let guests register another event
 * @event: copied; its number is not in use yet
 *
 * With the BQL, after the first vCPU is realized and before the VM runs, and
 * only if kvm_arm_sdei_enabled().  Both sides of a migration must add the same
 * events in the same order, at most SDEI_EVENTS with the software event.
 */
void kvm_arm_sdei_add_event(const SdeiEvent *event);

/**
 * kvm_arm_sdei_inject: make an event pending
 * @cpu: the event's vCPU, if the event is private
 * @number: of an event that was added
 *
 * The event interrupts the guest as soon as the guest allows that; it stays
 * pending, and migrates, until then.  Another call meanwhile has no effect.  In
 * any thread; in that of @cpu, the handler runs before any other guest code if
 * the guest can take it.
 *
 * Returns false if the guest has not registered the event, which is then lost.
 */
bool kvm_arm_sdei_inject(ARMCPU *cpu, uint32_t number);

/*
 * For private events, in @cpu's own thread, out of KVM_RUN, without the BQL:
 */

/* Whether the event has a handler */
bool kvm_arm_sdei_is_registered(ARMCPU *cpu, uint32_t number);

/* Whether the guest would run the event's handler next if it were injected */
bool kvm_arm_sdei_can_take(ARMCPU *cpu, uint32_t number);

/*
 * Inject the event; the guest runs its handler next.  Returns false, without
 * effect, if kvm_arm_sdei_can_take() is not true any more.
 */
bool kvm_arm_sdei_take(ARMCPU *cpu, uint32_t number);

#else

static inline bool kvm_arm_sdei_enabled(void)
{
    return false;
}

#endif

#endif
