/*
 * Guest time: move the system counter by one instant
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_GUEST_TIME_H
#define TARGET_ARM_KVM_GUEST_TIME_H

#include "migration/guest-time.h"
#include "cpu-qom.h"

/*
 * The instant at which the guest was stopped.  Only that of the first vCPU is
 * used, for the whole VM.  Protected by the BQL.
 */
typedef struct KVMArmGuestTime {
    GuestTimeState state;
    uint64_t virtual;       /* the guest's counter */
    uint64_t physical;      /* the same */
    uint32_t hz;            /* CNTFRQ of the source */
    bool one_offset;        /* the source has kvm-counter-offset=on */
} KVMArmGuestTime;

extern const VMStateDescription vmstate_kvm_arm_guest_time;

void kvm_arm_guest_time_add_properties(ARMCPU *cpu);

/* KVM has made the vCPU.  Returns -errno if KVM lacks what properties need. */
int kvm_arm_guest_time_init_vcpu(ARMCPU *cpu);

/* The VM has stopped, and its state is now @state.  kvm_vtime is up to date. */
void kvm_arm_guest_time_stop(ARMCPU *cpu, RunState state);

/*
 * The VM is about to run: set the counters of all vCPUs, or leave kvm_vtime of
 * one of them to the caller.  Warns of a counter that KVM does not set.
 */
void kvm_arm_guest_time_start(ARMCPU *cpu);

/*
 * Registers were loaded: write the counters, which no other code does, once for
 * all vCPUs.  Returns false if KVM refuses.
 *
 * The physical counter has no offset, and guests read it without a trap, until
 * it is written.  QEMU 10.0 writes it when it makes a VM, with the value that
 * it has just read (60 ms before in the lab): guests see no difference.
 */
bool kvm_arm_guest_time_post_load(ARMCPU *cpu);

/* QEMU is about to load another state, or to reset the guest */
void kvm_arm_guest_time_forget(ARMCPU *cpu);

#endif
