/*
 * Guest time: the system counter moves by one instant
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_GUEST_TIME_H
#define TARGET_ARM_KVM_GUEST_TIME_H

#include "migration/guest-time.h"
#include "cpu-qom.h"

/*
 * The instant at which the guest was stopped.  Each vCPU has one, but that of
 * the first vCPU is the VM's, and no other is used.  Used with the BQL only.
 */
typedef struct KVMArmGuestTime {
    GuestTimeState state;
    uint64_t virtual;       /* the guest's counters */
    uint64_t physical;
    uint32_t hz;            /* CNTFRQ */
    bool one_offset;        /* the source has kvm-counter-offset=on */
} KVMArmGuestTime;

extern const VMStateDescription vmstate_kvm_arm_guest_time;

void kvm_arm_guest_time_add_properties(ARMCPU *cpu);

/* KVM has made the vCPU.  Returns -errno if it cannot do what is asked. */
int kvm_arm_guest_time_init_vcpu(ARMCPU *cpu);

/* The VM has stopped, and its state is now @state.  kvm_vtime is up to date. */
void kvm_arm_guest_time_stop(ARMCPU *cpu, RunState state);

/*
 * The VM is about to run: set the counters for all vCPUs, or leave kvm_vtime
 * of one of them to the caller.  What KVM does not set runs on, with a warning.
 */
void kvm_arm_guest_time_start(ARMCPU *cpu);

/*
 * Registers were loaded: write the counters, for all vCPUs, which nothing else
 * does with them.  Returns false if KVM refuses.
 *
 * A VM whose physical counter was never written has it as the hardware has it,
 * without traps.  When a VM is made, QEMU 10.0 writes what it has read a moment
 * before (60 ms in the lab): no guest can tell the difference.
 */
bool kvm_arm_guest_time_post_load(ARMCPU *cpu);

/* Another state is about to be loaded, or the guest begins anew */
void kvm_arm_guest_time_forget(ARMCPU *cpu);

#endif
