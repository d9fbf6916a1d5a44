/*
 * Guest time: move TSC and kvmclock of all vCPUs by one instant
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_I386_KVM_GUEST_TIME_H
#define TARGET_I386_KVM_GUEST_TIME_H

#include "migration/vmstate.h"
#include "migration/guest-time.h"

typedef struct GuestTimeVcpu {
    uint32_t apic_id;
    uint64_t tsc_offset;
} GuestTimeVcpu;

/*
 * The instant at which the guest was stopped.  Part of the kvmclock device;
 * protected by the BQL.
 */
typedef struct GuestTime {
    GuestTimeState state;
    uint64_t clock_ns;      /* the kvmclock, which the device migrates */
    uint64_t host_tsc;
    uint64_t scaled_tsc;    /* the TSC of a vCPU with an offset of 0 */
    uint32_t tsc_khz;       /* of the guest's TSC */
    uint32_t clock_khz;     /* the TSC's, by the guest's kvmclock */
    int32_t vcpus;
    GuestTimeVcpu *vcpu;
} GuestTime;

extern const VMStateDescription vmstate_guest_time;

/*
 * The VM has stopped, and its state is now @state.  For a live migration, takes
 * the instant.  If the destination will get it, stores the kvmclock in
 * @clock_ns and the TSC in each vCPU's env.  Returns false if the caller is to
 * save kvmclock and TSCs.
 */
bool guest_time_stop(GuestTime *gt, RunState state, uint64_t *clock_ns);

/*
 * The VM is about to run, with a kvmclock that was @clock_ns when it stopped.
 * After a migration, or on the source after a failed one, there is an instant:
 * sets all TSCs and the kvmclock.  Returns false if the caller is to set the
 * kvmclock.
 */
bool guest_time_start(GuestTime *gt, uint64_t clock_ns);

/* QEMU is about to load another state, or to reset the guest */
void guest_time_forget(GuestTime *gt);

#endif
