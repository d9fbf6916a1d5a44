/*
 * Guest time: TSC and kvmclock of all vCPUs move by one instant
 *
 * The source reads the kvmclock, the host's TSC and the time of day at once,
 * and the offset of each vCPU's TSC.  The destination, or the source if the
 * migration has failed, sets the kvmclock, reads it back with the host's TSC at
 * once, and sets the offsets so that each TSC has advanced by as much as the
 * kvmclock has.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "hw/core/cpu.h"
#include "qapi/qapi-types-migration.h"
#include "migration/client-options.h"
#include "migration/global_state.h"
#include "migration/inject.h"
#include "standard-headers/asm-x86/kvm_para.h"
#include "system/hw_accel.h"
#include "system/kvm.h"
#include "system/runstate.h"
#include "cpu.h"
#include "guest-time.h"
#include "guest-time-math.h"
#include "trace.h"

#define ONE_INSTANT \
    (KVM_CLOCK_TSC_STABLE | KVM_CLOCK_REALTIME | KVM_CLOCK_HOST_TSC)

/* A guest's kvmclock that is so far from KVM's was not written by KVM */
#define FAR_NS      (60 * NANOSECONDS_PER_SECOND)

/* How near to what was asked for the kvmclock shall be, and how often to try */
#define NEAR_NS     500
#define TRIES       20

/*
 * The functions on vCPUs are for VMs that are stopped, with the BQL.  Then no
 * vCPU thread is in an ioctl, and this thread makes them: to wake each vCPU
 * thread for each of them would take most of the time of all this.
 */
static int guest_time_offset_ioctl(CPUState *cs, int request, uint64_t *offset)
{
    struct kvm_device_attr attr = {
        .group = KVM_VCPU_TSC_CTRL,
        .attr = KVM_VCPU_TSC_OFFSET,
        .addr = (uintptr_t)offset,
    };

    return kvm_vcpu_ioctl(cs, request, &attr);
}

static bool guest_time_get_offset(CPUState *cs, uint64_t *offset)
{
    return guest_time_offset_ioctl(cs, KVM_GET_DEVICE_ATTR, offset) == 0;
}

/* Some hosts accept an offset and ignore it: read it back */
static bool guest_time_set_offset(CPUState *cs, uint64_t offset)
{
    uint64_t is;
    bool ok;

    ok = guest_time_offset_ioctl(cs, KVM_SET_DEVICE_ATTR, &offset) == 0 &&
         guest_time_get_offset(cs, &is) && is == offset;
    trace_kvm_guest_time_offset(cs->cpu_index, offset, ok);
    return ok;
}

typedef struct GuestTimeMsr {
    struct kvm_msrs head;
    struct kvm_msr_entry msr;
} GuestTimeMsr;

/*
 * KVM has computed when the timer fires from the TSC as it was when the
 * deadline was set
 */
static void guest_time_rearm_deadline(CPUState *cs)
{
    GuestTimeMsr m = { .head.nmsrs = 1, .msr.index = MSR_IA32_TSCDEADLINE };

    if (kvm_vcpu_ioctl(cs, KVM_GET_MSRS, &m) == 1 && m.msr.data) {
        kvm_vcpu_ioctl(cs, KVM_SET_MSRS, &m);
    }
}

/* The host's TSC as KVM scales it, between two readings of the host's */
typedef struct GuestTimeReading {
    uint64_t before, scaled, after;
} GuestTimeReading;

/* Of some readings of the first vCPU's TSC that which took least time */
static bool guest_time_read_scaled(GuestTimeReading *best)
{
    uint64_t offset, least = UINT64_MAX;

    if (!guest_time_get_offset(first_cpu, &offset)) {
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

/* How KVM scales the host's TSC for the guest; returns why it is not known */
static const char *guest_time_find_scale(uint32_t *guest_khz,
                                         GuestTscScale *scale)
{
    int khz = kvm_vcpu_ioctl(first_cpu, KVM_GET_TSC_KHZ);
    GuestTimeReading r;

    if (khz <= 0 || !guest_time_read_scaled(&r)) {
        return "KVM does not tell the TSC's frequency and offset";
    }
    *guest_khz = khz;
    if (migration_inject_fail("guest-time-scale") ||
        !guest_tsc_find_scale(r.before, r.after, r.scaled, khz,
                              MAX(kvm_vm_ioctl(kvm_state, KVM_GET_TSC_KHZ), 0),
                              scale)) {
        return "it is not known how KVM scales the TSC";
    }
    return NULL;
}

/*
 * The kvmclock and its frequency as the guest has them when the first vCPU's
 * TSC is @tsc, if it uses the kvmclock: KVM rounds frequencies for the guest,
 * so what KVM_GET_CLOCK tells is not quite what the guest reads.
 */
static void guest_time_see_as_guest(uint64_t tsc, uint64_t *clock_ns,
                                    uint32_t *clock_khz)
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
    /* The guest can write there, too */
    khz = guest_pvclock_khz(&pv);
    if (pv.version & 1 || !(pv.flags & GUEST_PVCLOCK_TSC_STABLE) ||
        ABS(khz - *clock_khz) > *clock_khz / 1000) {
        return;
    }
    ns = guest_pvclock_ns(&pv, tsc);
    if (ABS((int64_t)(ns - *clock_ns)) > FAR_NS) {
        return;
    }
    *clock_ns = ns;
    *clock_khz = khz;
}

static bool guest_time_read_clock(struct kvm_clock_data *data)
{
    *data = (struct kvm_clock_data) { 0 };
    return kvm_vm_ioctl(kvm_state, KVM_GET_CLOCK, data) == 0 &&
           (data->flags & ONE_INSTANT) == ONE_INSTANT;
}

void guest_time_forget(GuestTime *gt)
{
    g_free(gt->vcpu);
    *gt = (GuestTime) { .incoming = runstate_check(RUN_STATE_INMIGRATE) };
}

static const char *guest_time_take(GuestTime *gt, uint64_t *clock_ns)
{
    struct kvm_clock_data data;
    GuestTscScale scale;
    const char *why;
    CPUState *cs;
    int n = 0;

    why = guest_time_find_scale(&gt->tsc_khz, &scale);
    if (why) {
        return why;
    }
    CPU_FOREACH(cs) {
        n++;
    }
    gt->vcpu = g_new(GuestTimeVcpu, n);
    CPU_FOREACH(cs) {
        GuestTimeVcpu *v = &gt->vcpu[gt->vcpus++];

        v->apic_id = kvm_arch_vcpu_id(cs);
        if (!guest_time_get_offset(cs, &v->tsc_offset)) {
            return "KVM does not tell the TSC's offset";
        }
    }
    migration_inject_hold("guest-time-take");
    if (!guest_time_read_clock(&data)) {
        return "KVM does not tell kvmclock, host TSC and time of day at once";
    }
    *clock_ns = data.clock;
    gt->time = (GuestTimeOfDay) { data.realtime, guest_time_tai_offset() };
    gt->host_tsc = data.host_tsc;
    gt->scaled_tsc = guest_tsc_scaled(data.host_tsc, scale);
    gt->clock_khz = gt->tsc_khz;
    guest_time_see_as_guest(gt->scaled_tsc + gt->vcpu[0].tsc_offset, clock_ns,
                            &gt->clock_khz);

    /* A destination that can only restore values gets those of the instant */
    n = 0;
    CPU_FOREACH(cs) {
        cpu_env(cs)->tsc = gt->scaled_tsc + gt->vcpu[n++].tsc_offset;
        cpu_env(cs)->tsc_valid = true;
    }
    return NULL;
}

bool guest_time_stop(GuestTime *gt, bool enabled, RunState state,
                     uint64_t *clock_ns)
{
    const char *why;

    guest_time_forget(gt);
    /* Snapshots, paused VMs and CPR restore time as they always did */
    if (!enabled || state != RUN_STATE_FINISH_MIGRATE ||
        migrate_mode() != MIG_MODE_NORMAL) {
        return false;
    }
    why = guest_time_take(gt, clock_ns);
    if (why) {
        trace_kvm_guest_time_no_instant(why);
        guest_time_forget(gt);
        return false;
    }
    gt->valid = true;
    trace_kvm_guest_time_stop(*clock_ns, gt->time.realtime, gt->host_tsc,
                              gt->scaled_tsc, gt->tsc_khz, gt->clock_khz);
    migration_inject_hold("guest-time-taken");
    return true;
}

/* The source's first one stands for those that the source does not have */
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
 * Offsets for TSCs that have advanced by @advance when the host's TSC, scaled,
 * is @scaled_now.  With @equal all vCPUs get that of the first: with different
 * offsets, KVM has no common instant to tell.  Returns false if KVM ignores
 * them.
 */
static bool guest_time_set_offsets(GuestTime *gt, uint64_t advance,
                                   uint64_t scaled_now, bool equal)
{
    CPUState *cs;

    /* The first one comes last: KVM gives its offset to hot-plugged vCPUs */
    QTAILQ_FOREACH_REVERSE(cs, &cpus_queue, node) {
        GuestTimeVcpu *v = guest_time_find_vcpu(gt, equal ? first_cpu : cs);

        if (!guest_time_set_offset(cs, guest_tsc_offset(gt->scaled_tsc,
                                                        v->tsc_offset, advance,
                                                        scaled_now))) {
            return false;
        }
    }
    return true;
}

static void guest_time_rearm_deadlines(void)
{
    CPUState *cs;

    CPU_FOREACH(cs) {
        guest_time_rearm_deadline(cs);
    }
}

/*
 * Let the kvmclock be @clock_ns at the instant of @at, and count from there.
 * KVM adds the time of day that has passed since @at, but reads it somewhat
 * later than the clock that it sets.  So see what has come of it, and correct
 * that.  In the end *@at is a later instant with the kvmclock as it is.
 */
static bool guest_time_set_clock(uint64_t clock_ns, struct kvm_clock_data *at)
{
    uint64_t realtime = at->realtime;
    int64_t correction = 0, error;
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
    } while (++tries < TRIES && (error < -NEAR_NS || error > NEAR_NS));

    trace_kvm_guest_time_clock(at->clock, error, tries);
    return true;
}

/* Returns why it cannot be */
static const char *guest_time_restore(GuestTime *gt, uint64_t clock_ns)
{
    struct kvm_clock_data data = { .clock = clock_ns };
    GuestTscScale scale;
    const char *why;
    int64_t gap_ns;
    uint32_t khz;

    why = guest_time_find_scale(&khz, &scale);
    if (why) {
        return why;
    }
    if (khz != gt->tsc_khz) {
        return "the guest's TSC has another frequency here";
    }
    /* TSCs that agree, and a clock that is set, give a common instant */
    if (!guest_time_set_offsets(gt, 0,
                                guest_tsc_scaled(cpu_get_host_ticks(), scale),
                                true)) {
        return "KVM ignores TSC offsets";
    }
    if (kvm_vm_ioctl(kvm_state, KVM_SET_CLOCK, &data) < 0 ||
        !guest_time_read_clock(&data)) {
        return "KVM does not tell kvmclock, host TSC and time of day at once";
    }

    gap_ns = guest_time_to_count(gt->time, (GuestTimeOfDay) {
                                     data.realtime, guest_time_tai_offset() });
    if (!guest_time_set_clock(clock_ns + gap_ns, &data)) {
        return "KVM does not set the kvmclock";
    }
    if (data.clock < clock_ns) {
        return "the kvmclock would go backwards";
    }
    migration_inject_hold("guest-time-set");
    if (!guest_time_set_offsets(gt, guest_time_ticks(data.clock - clock_ns,
                                                     gt->clock_khz * 1000ULL),
                                guest_tsc_scaled(data.host_tsc, scale),
                                false)) {
        return "KVM ignores TSC offsets";
    }
    guest_time_rearm_deadlines();
    trace_kvm_guest_time_start(gap_ns, data.clock, data.realtime,
                               data.host_tsc);
    return NULL;
}

/*
 * Let TSCs go on from where they were at the stop, as the caller does with the
 * kvmclock somewhat later.  Needs nothing that guest_time_restore() may miss
 * but offsets.
 */
static bool guest_time_go_on(GuestTime *gt)
{
    GuestTimeReading r;

    if (!guest_time_read_scaled(&r) ||
        !guest_time_set_offsets(gt, 0, r.scaled, false)) {
        return false;
    }
    guest_time_rearm_deadlines();
    return true;
}

bool guest_time_start(GuestTime *gt, uint64_t clock_ns)
{
    const char *why = NULL;
    bool done = false;

    if (gt->valid) {
        why = guest_time_restore(gt, clock_ns);
        done = !why;
    } else if (gt->incoming &&
               runstate_is_live(global_state_get_runstate()) &&
               migrate_guest_time() != GUEST_TIME_POLICY_STOPPED) {
        why = "the source has not told when it stopped the guest";
    }
    if (why) {
        warn_report("guest-time: %s: %s", why,
                    gt->valid && guest_time_go_on(gt) ?
                    "TSC and kvmclock go on from where they were when the "
                    "guest stopped" :
                    "the kvmclock goes on from where it was when the guest "
                    "stopped, but the TSC has run on");
    }
    guest_time_forget(gt);
    return done;
}

static bool guest_time_vcpus_are_few(void *opaque, int version_id)
{
    GuestTime *gt = opaque;

    return gt->vcpus > 0 && gt->vcpus <= 1 << 16;
}

static int guest_time_post_load(void *opaque, int version_id)
{
    GuestTime *gt = opaque;

    /* Not from a snapshot, whatever it holds */
    gt->valid = gt->incoming;
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
    .version_id = 1,
    .minimum_version_id = 1,
    .post_load = guest_time_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT64(time.realtime, GuestTime),
        VMSTATE_INT32(time.tai_offset, GuestTime),
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
