/*
 * Guest time: move TSC and kvmclock of all vCPUs by one instant
 *
 * The source reads the kvmclock, the host's TSC and the time of day at once,
 * and the offset of each vCPU's TSC.  The destination, or the source if the
 * migration fails, sets the kvmclock, reads it back with the host's TSC at
 * once, and sets the offsets so that each TSC has advanced by as much as the
 * kvmclock.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qapi/error.h"
#include "qemu/timer.h"
#include "hw/core/cpu.h"
#include "migration/inject.h"
#include "standard-headers/asm-x86/kvm_para.h"
#include "system/hw_accel.h"
#include "system/kvm.h"
#include "cpu.h"
#include "guest-time.h"
#include "guest-time-math.h"
#include "trace.h"

#define ONE_INSTANT \
    (KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC)

/* A guest's kvmclock that is so far from KVM's was not written by KVM */
#define FAR_NS      (60 * NANOSECONDS_PER_SECOND)

/* Tolerance of the kvmclock, and the time to reach it, while the guest waits */
#define NEAR_NS     500
#define TRY_NS      (2 * SCALE_MS)
#define TRIES       10      /* even after TRY_NS */

#define TSC_OFFSET_ATTR(offset) {                   \
    .group = KVM_VCPU_TSC_CTRL,                     \
    .attr = KVM_VCPU_TSC_OFFSET,                    \
    .addr = (uintptr_t)(offset),                    \
}

/*
 * vCPUs are stopped or paused, and this thread has the BQL.  So no vCPU thread
 * is in an ioctl, and this thread calls the ioctls of vCPUs itself: waking each
 * vCPU thread for each ioctl would take most of the time.
 */
static bool guest_time_offset(CPUState *cs, int request, uint64_t *offset)
{
    struct kvm_device_attr attr = TSC_OFFSET_ATTR(offset);

    return kvm_vcpu_ioctl(cs, request, &attr) == 0;
}

/* Some hosts accept any offset and ignore it: read the first vCPU's back */
static bool guest_time_set_offset(CPUState *cs, uint64_t offset)
{
    uint64_t is = offset;
    bool ok;

    ok = guest_time_offset(cs, KVM_SET_DEVICE_ATTR, &offset) &&
         (cs != first_cpu || guest_time_offset(cs, KVM_GET_DEVICE_ATTR, &is)) &&
         is == offset;
    trace_kvm_guest_time_offset(cs->cpu_index, offset, ok);
    return ok;
}

typedef struct GuestTimeMsr {
    struct kvm_msrs head;
    struct kvm_msr_entry msr;
} GuestTimeMsr;

/* KVM has computed the expiry of timers from the old TSCs: set them again */
static void guest_time_rearm_deadlines(void)
{
    CPUState *cs;

    CPU_FOREACH(cs) {
        GuestTimeMsr m = { .head.nmsrs = 1, .msr.index = MSR_IA32_TSCDEADLINE };

        if (kvm_vcpu_ioctl(cs, KVM_GET_MSRS, &m) == 1 && m.msr.data) {
            kvm_vcpu_ioctl(cs, KVM_SET_MSRS, &m);
        }
    }
}

/* The host's TSC as KVM scales it, between two readings of the host's TSC */
typedef struct GuestTimeReading {
    uint64_t before, scaled, after;
} GuestTimeReading;

/* Reads the first vCPU's TSC several times; returns the quickest reading */
static bool guest_time_read_scaled(GuestTimeReading *best)
{
    uint64_t offset, least = UINT64_MAX;

    if (!guest_time_offset(first_cpu, KVM_GET_DEVICE_ATTR, &offset)) {
        return false;
    }
    for (int i = 0; i < 10; i++) {
        GuestTimeMsr m = { .head.nmsrs = 1, .msr.index = MSR_IA32_TSC };
        uint64_t before = cpu_get_host_ticks(), after;

        if (kvm_vcpu_ioctl(first_cpu, KVM_GET_MSRS, &m) != 1) {
            return false;
        }
        after = cpu_get_host_ticks();
        if (after - before < least) {
            least = after - before;
            *best = (GuestTimeReading) { before, m.msr.data - offset, after };
        }
    }
    return true;
}

/* How KVM scales the host's TSC for the guest */
static bool guest_time_find_scale(uint32_t *guest_khz, GuestTscScale *scale,
                                  Error **errp)
{
    int khz = kvm_vcpu_ioctl(first_cpu, KVM_GET_TSC_KHZ);
    GuestTimeReading r;

    if (khz <= 0 || !guest_time_read_scaled(&r)) {
        error_setg(errp, "KVM does not report the TSC's frequency and offset");
        return false;
    }
    *guest_khz = khz;
    if (migration_inject_fail("guest-time-scale") ||
        !guest_tsc_find_scale(r.before, r.after, r.scaled, khz,
                              MAX(kvm_vm_ioctl(kvm_state, KVM_GET_TSC_KHZ), 0),
                              scale)) {
        error_setg(errp, "it is not known how KVM scales the TSC");
        return false;
    }
    return true;
}

/*
 * If the guest uses the kvmclock, take the time and the frequency that the
 * guest reads, not KVM's.  KVM rounds frequencies for the guest, so that
 * KVM_GET_CLOCK returns another time than the guest reads.
 */
static void guest_time_see_as_guest(GuestTime *gt)
{
    GuestPvclock pv;
    uint64_t msr, ns;
    int64_t khz;

    cpu_synchronize_state(first_cpu);
    msr = cpu_env(first_cpu)->system_time_msr;
    if (!(msr & KVM_MSR_ENABLED)) {
        return;
    }
    cpu_physical_memory_read(msr & ~(uint64_t)KVM_MSR_ENABLED, &pv, sizeof(pv));
    /* The guest can write to this memory, too */
    khz = guest_pvclock_khz(&pv);
    if (pv.version & 1 || !(pv.flags & GUEST_PVCLOCK_TSC_STABLE) ||
        ABS(khz - gt->clock_khz) > gt->clock_khz / 1000) {
        return;
    }
    ns = guest_pvclock_ns(&pv, gt->scaled_tsc + gt->vcpu[0].tsc_offset);
    if (ABS((int64_t)(ns - gt->clock_ns)) > FAR_NS) {
        return;
    }
    gt->clock_ns = ns;
    gt->clock_khz = khz;
}

static bool guest_time_read_clock(struct kvm_clock_data *data)
{
    *data = (struct kvm_clock_data) { 0 };
    return kvm_vm_ioctl(kvm_state, KVM_GET_CLOCK, data) == 0 &&
           (data->flags & ONE_INSTANT) == ONE_INSTANT;
}

static bool guest_time_take(GuestTimeState *s, Error **errp)
{
    GuestTime *gt = container_of(s, GuestTime, state);
    struct kvm_clock_data data;
    GuestTscScale scale;
    GuestTimeVcpu *v;
    CPUState *cs;

    if (!guest_time_find_scale(&gt->tsc_khz, &scale, errp)) {
        return false;
    }
    gt->vcpus = 0;
    CPU_FOREACH(cs) {
        gt->vcpus++;
    }
    v = gt->vcpu = g_renew(GuestTimeVcpu, gt->vcpu, gt->vcpus);
    CPU_FOREACH(cs) {
        v->apic_id = kvm_arch_vcpu_id(cs);
        if (!guest_time_offset(cs, KVM_GET_DEVICE_ATTR, &v++->tsc_offset)) {
            error_setg(errp, "KVM does not report the TSC's offset");
            return false;
        }
    }
    migration_inject_hold("guest-time-take");
    if (!guest_time_read_clock(&data)) {
        error_setg(errp, "KVM does not report kvmclock, host TSC and time of "
                   "day at once");
        return false;
    }
    s->then = guest_time_of_day(data.realtime);
    gt->host_tsc = data.host_tsc;
    gt->scaled_tsc = guest_tsc_scaled(data.host_tsc, scale);
    gt->clock_ns = data.clock;
    gt->clock_khz = gt->tsc_khz;
    guest_time_see_as_guest(gt);
    trace_kvm_guest_time_stop(gt->clock_ns, s->then.realtime, gt->host_tsc,
                              gt->scaled_tsc, gt->tsc_khz, gt->clock_khz);
    migration_inject_hold("guest-time-taken");
    return true;
}

/* A vCPU that the source does not have gets the offset of the first one */
static GuestTimeVcpu *guest_time_find_vcpu(GuestTime *gt, CPUState *cs)
{
    for (int i = 0; i < gt->vcpus; i++) {
        if (gt->vcpu[i].apic_id == kvm_arch_vcpu_id(cs)) {
            return &gt->vcpu[i];
        }
    }
    return &gt->vcpu[0];
}

/*
 * Set offsets with which TSCs have advanced by @advance when the host's TSC,
 * scaled, is @scaled_now.  With @equal, all vCPUs get the first one's offset:
 * KVM reports a common instant only while offsets are equal.
 */
static bool guest_time_set_offsets(GuestTime *gt, uint64_t advance,
                                   uint64_t scaled_now, bool equal,
                                   Error **errp)
{
    CPUState *cs;

    /* The first vCPU last: KVM gives hot-plugged ones the offset set last */
    QTAILQ_FOREACH_REVERSE(cs, &cpus_queue, node) {
        GuestTimeVcpu *v = guest_time_find_vcpu(gt, equal ? first_cpu : cs);
        uint64_t offset = guest_tsc_offset(gt->scaled_tsc, v->tsc_offset,
                                           advance, scaled_now);

        if (cs == first_cpu) {
            /* Parked vCPUs before it, as if they were hot-plugged by now */
            struct kvm_device_attr attr = TSC_OFFSET_ATTR(&offset);

            kvm_set_attr_of_parked_vcpus(kvm_state, &attr);
        }
        if (!guest_time_set_offset(cs, offset)) {
            error_setg(errp, "KVM ignores TSC offsets");
            return false;
        }
    }
    return true;
}

/*
 * Set the kvmclock to @clock_ns as of the instant @at.  KVM adds the time of
 * day that has passed since @at, but reads it somewhat later than the clock
 * that it sets.  So read the clock back and correct it.  Returns in @at a later
 * instant with the kvmclock that KVM reports.
 */
static bool guest_time_set_clock(uint64_t clock_ns, struct kvm_clock_data *at)
{
    int64_t correction = 0, error, begun = get_clock();
    uint64_t realtime = at->realtime;
    int tries = 0;

    do {
        struct kvm_clock_data data = {
            .clock = clock_ns + correction,
            .realtime = realtime,
            .flags = KVM_CLOCK_REALTIME,
        };

        if (kvm_vm_ioctl(kvm_state, KVM_SET_CLOCK, &data) < 0) {
            return false;
        }
        migration_inject_hold("guest-time-clock");
        if (!guest_time_read_clock(at)) {
            return false;
        }
        error = at->clock - clock_ns - (at->realtime - realtime);
        correction -= error;
        tries++;
    } while (ABS(error) > NEAR_NS &&
             (tries < TRIES || get_clock() - begun < TRY_NS));

    trace_kvm_guest_time_clock(at->clock, error, tries);
    guest_time_is_off(error);
    return true;
}

/* Sets the kvmclock, so that KVM reports a common instant if the TSCs agree */
static bool guest_time_begin_clock(uint64_t clock_ns,
                                   struct kvm_clock_data *at)
{
    *at = (struct kvm_clock_data) { .clock = clock_ns };
    return kvm_vm_ioctl(kvm_state, KVM_SET_CLOCK, at) == 0 &&
           guest_time_read_clock(at);
}

static bool guest_time_restore(GuestTimeState *s, Error **errp)
{
    GuestTime *gt = container_of(s, GuestTime, state);
    struct kvm_clock_data data;
    GuestTscScale scale;
    int64_t gap_ns;
    uint32_t khz;

    if (!guest_time_find_scale(&khz, &scale, errp)) {
        return false;
    }
    if (khz != gt->tsc_khz) {
        error_setg(errp, "the guest's TSC has another frequency here");
        return false;
    }
    /* Mostly equal: KVM treats TSCs that were loaded close together as equal */
    if (!guest_time_begin_clock(gt->clock_ns, &data)) {
        if (!guest_time_set_offsets(gt, 0,
                                    guest_tsc_scaled(cpu_get_host_ticks(),
                                                     scale), true, errp)) {
            return false;
        }
        if (!guest_time_begin_clock(gt->clock_ns, &data)) {
            error_setg(errp, "KVM does not report kvmclock, host TSC and time "
                       "of day at once");
            return false;
        }
    }

    gap_ns = guest_time_to_count(s, data.realtime);
    if (!guest_time_set_clock(gt->clock_ns + gap_ns, &data)) {
        error_setg(errp, "KVM does not set the kvmclock");
        return false;
    }
    if (data.clock < gt->clock_ns) {
        error_setg(errp, "the kvmclock would go backwards");
        return false;
    }
    migration_inject_hold("guest-time-set");
    if (!guest_time_set_offsets(gt, guest_time_ticks(data.clock - gt->clock_ns,
                                                     gt->clock_khz * 1000ULL),
                                guest_tsc_scaled(data.host_tsc, scale),
                                false, errp)) {
        return false;
    }
    guest_time_rearm_deadlines();
    trace_kvm_guest_time_start(gap_ns, data.clock, data.realtime,
                               data.host_tsc);
    return true;
}

/*
 * There is no instant, but the stream had TSCs, which have run on since they
 * were loaded.  Shift all offsets by the value that restores the first TSC.
 */
static bool guest_time_shift_offsets(uint64_t scaled_now)
{
    uint64_t offset, shift;
    CPUState *cs;

    if (!guest_time_offset(first_cpu, KVM_GET_DEVICE_ATTR, &offset)) {
        return false;
    }
    shift = cpu_env(first_cpu)->tsc - scaled_now - offset;
    QTAILQ_FOREACH_REVERSE(cs, &cpus_queue, node) {
        if (!guest_time_offset(cs, KVM_GET_DEVICE_ATTR, &offset) ||
            !guest_time_set_offset(cs, offset + shift)) {
            return false;
        }
    }
    return true;
}

/*
 * Restores the TSCs, as of the stop, and so does the device with the kvmclock,
 * somewhat later.  This needs TSC offsets, but not the rest of what
 * guest_time_restore() needs.
 */
static const char *guest_time_fall_back(GuestTimeState *s)
{
    GuestTime *gt = container_of(s, GuestTime, state);
    GuestTimeReading r;

    if (!guest_time_read_scaled(&r) ||
        !(s->valid ? guest_time_set_offsets(gt, 0, r.scaled, false, NULL)
                   : guest_time_shift_offsets(r.scaled))) {
        return "the kvmclock goes on from where it was when the guest stopped, "
               "but the TSC has run on";
    }
    guest_time_rearm_deadlines();
    return "TSC and kvmclock go on from where they were when the guest stopped";
}

static bool guest_time_read_now(GuestTimeNow *now)
{
    struct kvm_clock_data data;
    uint64_t first, offset;
    GuestTscScale scale;
    uint32_t khz;
    CPUState *cs;

    if (!guest_time_find_scale(&khz, &scale, NULL) ||
        !guest_time_offset(first_cpu, KVM_GET_DEVICE_ATTR, &first) ||
        !guest_time_read_clock(&data)) {
        return false;
    }
    CPU_FOREACH(cs) {
        if (!guest_time_offset(cs, KVM_GET_DEVICE_ATTR, &offset) ||
            offset != first) {
            return false;
        }
    }
    if (!scale.frac_bits) {
        /* KVM does not scale by a ratio within its tolerance */
        int host = kvm_vm_ioctl(kvm_state, KVM_GET_TSC_KHZ);

        khz = host > 0 ? host : khz;
    }
    now->counter = guest_tsc_scaled(data.host_tsc, scale) + first;
    now->hz = khz * 1000ULL;
    now->time = guest_time_of_day(data.realtime);
    return true;
}

static const GuestTimeOps guest_time_ops = {
    .take = guest_time_take,
    .restore = guest_time_restore,
    .fall_back = guest_time_fall_back,
    .now = guest_time_read_now,
};

bool guest_time_stop(GuestTime *gt, RunState state, uint64_t *clock_ns)
{
    GuestTimeVcpu *v;
    CPUState *cs;

    if (!guest_time_state_stop(&gt->state, &guest_time_ops, state)) {
        return false;
    }
    /* For a destination that only restores values: those of the instant */
    v = gt->vcpu;
    CPU_FOREACH(cs) {
        cpu_env(cs)->tsc = gt->scaled_tsc + v++->tsc_offset;
        cpu_env(cs)->tsc_valid = true;
    }
    *clock_ns = gt->clock_ns;
    return true;
}

bool guest_time_start(GuestTime *gt, uint64_t clock_ns)
{
    if (gt->state.incoming) {
        gt->clock_ns = clock_ns;
    }
    return guest_time_state_start(&gt->state, &guest_time_ops);
}

void guest_time_forget(GuestTime *gt)
{
    g_clear_pointer(&gt->vcpu, g_free);
    guest_time_state_forget(&gt->state);
}

static bool guest_time_vcpus_are_few(void *opaque, int version_id)
{
    GuestTime *gt = opaque;

    return gt->vcpus > 0 && gt->vcpus <= 1 << 16;
}

static int guest_time_post_load(void *opaque, int version_id)
{
    GuestTime *gt = opaque;

    guest_time_state_post_load(&gt->state);
    return 0;
}

static const VMStateDescription vmstate_guest_time_vcpu = {
    .name = "guest_time/vcpu",
    .version_id = 1,
    .minimum_version_id = 1,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT32(apic_id, GuestTimeVcpu),
        VMSTATE_UINT64(tsc_offset, GuestTimeVcpu),
        VMSTATE_END_OF_LIST()
    }
};

const VMStateDescription vmstate_guest_time = {
    .name = "guest_time",
    .version_id = 2,
    .minimum_version_id = 2,
    .post_load = guest_time_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_STRUCT(state, GuestTime, 1, vmstate_guest_time_state,
                       GuestTimeState),
        VMSTATE_UINT64(host_tsc, GuestTime),
        VMSTATE_UINT64(scaled_tsc, GuestTime),
        VMSTATE_UINT32(tsc_khz, GuestTime),
        VMSTATE_UINT32(clock_khz, GuestTime),
        VMSTATE_INT32(vcpus, GuestTime),
        VMSTATE_VALIDATE("number of vCPUs", guest_time_vcpus_are_few),
        VMSTATE_STRUCT_VARRAY_ALLOC(vcpu, GuestTime, vcpus, 1,
                                    vmstate_guest_time_vcpu, GuestTimeVcpu),
        VMSTATE_END_OF_LIST()
    }
};
