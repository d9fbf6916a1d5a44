/*
 * Guest time: TSC and kvmclock of all vCPUs move by one instant
 *
 * The source reads the kvmclock, the host's TSC and the time of day at once,
 * and the offset of each vCPU's TSC.  The destination sets the kvmclock, reads
 * it back with the host's TSC at once, and sets the offsets so that each TSC
 * has advanced by as much as the kvmclock has.
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

typedef struct VcpuTsc {
    uint64_t value;
    bool ok;
} VcpuTsc;

static bool tsc_offset_ioctl(CPUState *cs, int request, uint64_t *offset)
{
    struct kvm_device_attr attr = {
        .group = KVM_VCPU_TSC_CTRL,
        .attr = KVM_VCPU_TSC_OFFSET,
        .addr = (uintptr_t)offset,
    };

    return kvm_vcpu_ioctl(cs, request, &attr) == 0;
}

static void do_get_offset(CPUState *cs, run_on_cpu_data data)
{
    VcpuTsc *tsc = data.host_ptr;

    tsc->ok = tsc_offset_ioctl(cs, KVM_GET_DEVICE_ATTR, &tsc->value);
}

/* Some hosts accept an offset and ignore it: read it back */
static void do_set_offset(CPUState *cs, run_on_cpu_data data)
{
    VcpuTsc *tsc = data.host_ptr;
    uint64_t is;

    tsc->ok = tsc_offset_ioctl(cs, KVM_SET_DEVICE_ATTR, &tsc->value) &&
              tsc_offset_ioctl(cs, KVM_GET_DEVICE_ATTR, &is) &&
              is == tsc->value;
    trace_kvm_guest_time_offset(cs->cpu_index, tsc->value, tsc->ok);
}

static bool get_offset(CPUState *cs, uint64_t *offset)
{
    VcpuTsc tsc = { 0 };

    run_on_cpu(cs, do_get_offset, RUN_ON_CPU_HOST_PTR(&tsc));
    *offset = tsc.value;
    return tsc.ok;
}

static bool set_offset(CPUState *cs, uint64_t offset)
{
    VcpuTsc tsc = { .value = offset };

    run_on_cpu(cs, do_set_offset, RUN_ON_CPU_HOST_PTR(&tsc));
    return tsc.ok;
}

typedef struct OneMsr {
    struct kvm_msrs head;
    struct kvm_msr_entry msr;
} OneMsr;

/* The TSC of a vCPU, between two readings of the host's */
typedef struct TscReading {
    uint64_t before, tsc, after;
    bool ok;
} TscReading;

/* Of some readings that which took least time */
static void do_read_tsc(CPUState *cs, run_on_cpu_data data)
{
    TscReading *best = data.host_ptr;

    *best = (TscReading) { .after = UINT64_MAX };
    for (int i = 0; i < 10; i++) {
        OneMsr m = { .head.nmsrs = 1, .msr.index = MSR_IA32_TSC };
        TscReading r;

        r.before = cpu_get_host_ticks();
        r.ok = kvm_vcpu_ioctl(cs, KVM_GET_MSRS, &m) == 1;
        r.after = cpu_get_host_ticks();
        r.tsc = m.msr.data;
        if (r.ok && r.after - r.before < best->after - best->before) {
            *best = r;
        }
    }
}

/*
 * KVM has computed when the timer fires from the TSC as it was when the
 * deadline was set
 */
static void do_rearm_deadline(CPUState *cs, run_on_cpu_data data)
{
    OneMsr m = {
        .head.nmsrs = 1,
        .msr.index = MSR_IA32_TSCDEADLINE,
        .msr.data = cpu_env(cs)->tsc_deadline,
    };

    if (m.msr.data) {
        kvm_vcpu_ioctl(cs, KVM_SET_MSRS, &m);
    }
}

/* How KVM scales the host's TSC for the guest; returns why it is not known */
static const char *find_scale(uint32_t *guest_khz, GuestTscScale *scale)
{
    int khz = kvm_vcpu_ioctl(first_cpu, KVM_GET_TSC_KHZ);
    uint64_t offset;
    TscReading r;

    if (khz <= 0 || !get_offset(first_cpu, &offset)) {
        return "KVM does not tell the TSC's frequency and offset";
    }
    *guest_khz = khz;
    run_on_cpu(first_cpu, do_read_tsc, RUN_ON_CPU_HOST_PTR(&r));
    if (!r.ok ||
        !guest_tsc_find_scale(r.before, r.after, r.tsc - offset, khz,
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
static void see_as_guest(uint64_t tsc, uint64_t *clock_ns, uint32_t *clock_khz)
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

static bool read_clock(struct kvm_clock_data *data)
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

static const char *take_instant(GuestTime *gt, uint64_t *clock_ns)
{
    struct kvm_clock_data data;
    GuestTscScale scale;
    const char *why;
    CPUState *cs;
    int n = 0;

    why = find_scale(&gt->tsc_khz, &scale);
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
        if (!get_offset(cs, &v->tsc_offset)) {
            return "KVM does not tell the TSC's offset";
        }
    }
    if (!read_clock(&data)) {
        return "KVM does not tell kvmclock, host TSC and time of day at once";
    }
    *clock_ns = data.clock;
    gt->time = (GuestTimeOfDay) { data.realtime, guest_time_tai_offset() };
    gt->host_tsc = data.host_tsc;
    gt->scaled_tsc = guest_tsc_scaled(data.host_tsc, scale);
    gt->clock_khz = gt->tsc_khz;
    see_as_guest(gt->scaled_tsc + gt->vcpu[0].tsc_offset, clock_ns,
                 &gt->clock_khz);

    /* A destination that can only restore values gets those of the instant */
    n = 0;
    CPU_FOREACH(cs) {
        cpu_env(cs)->tsc = gt->scaled_tsc + gt->vcpu[n++].tsc_offset;
    }
    return NULL;
}

void guest_time_stop(GuestTime *gt, bool enabled, RunState state,
                     uint64_t *clock_ns)
{
    const char *why;

    guest_time_forget(gt);
    /* Snapshots, paused VMs and CPR restore time as they always did */
    if (!enabled || state != RUN_STATE_FINISH_MIGRATE ||
        migrate_mode() != MIG_MODE_NORMAL) {
        return;
    }
    why = take_instant(gt, clock_ns);
    if (why) {
        trace_kvm_guest_time_no_instant(why);
        guest_time_forget(gt);
        return;
    }
    gt->valid = true;
    trace_kvm_guest_time_stop(*clock_ns, gt->time.realtime, gt->host_tsc,
                              gt->scaled_tsc, gt->tsc_khz, gt->clock_khz);
}

static GuestTimeVcpu *find_vcpu(GuestTime *gt, CPUState *cs)
{
    for (int i = 0; i < gt->vcpus; i++) {
        if (gt->vcpu[i].apic_id == kvm_arch_vcpu_id(cs)) {
            return &gt->vcpu[i];
        }
    }
    return NULL;
}

/*
 * Offsets for TSCs that have advanced by @advance when the host's TSC, scaled,
 * is @scaled_now.  With @equal all vCPUs get that of the first: with different
 * offsets, KVM has no common instant to tell.
 */
static const char *set_offsets(GuestTime *gt, uint64_t advance,
                               uint64_t scaled_now, bool equal)
{
    CPUState *cs;

    CPU_FOREACH(cs) {
        GuestTimeVcpu *v = find_vcpu(gt, equal ? first_cpu : cs);

        if (!v) {
            return "the source does not have all vCPUs";
        }
        if (!set_offset(cs, guest_tsc_offset(gt->scaled_tsc, v->tsc_offset,
                                             advance, scaled_now))) {
            return "KVM ignores TSC offsets";
        }
    }
    return NULL;
}

/*
 * Let the kvmclock be @clock_ns at the instant of @at, and count from there.
 * KVM adds the time of day that has passed since @at, but reads it somewhat
 * later than the clock that it sets.  So see what has come of it, and correct
 * that.  In the end *@at is a later instant with the kvmclock as it is.
 */
static bool set_clock(uint64_t clock_ns, struct kvm_clock_data *at)
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

        if (kvm_vm_ioctl(kvm_state, KVM_SET_CLOCK, &data) < 0 ||
            !read_clock(at)) {
            return false;
        }
        error = at->clock - clock_ns - (at->realtime - realtime);
        correction -= error;
    } while (++tries < TRIES && (error < -NEAR_NS || error > NEAR_NS));

    trace_kvm_guest_time_clock(at->clock, error, tries);
    return true;
}

/* Returns why it cannot be */
static const char *restore(GuestTime *gt, uint64_t clock_ns,
                           GuestTscScale scale)
{
    struct kvm_clock_data data = { .clock = clock_ns };
    const char *why;
    int64_t gap_ns;
    CPUState *cs;

    /* TSCs that agree, and a clock that is set, give a common instant */
    why = set_offsets(gt, 0, guest_tsc_scaled(cpu_get_host_ticks(), scale),
                      true);
    if (why) {
        return why;
    }
    if (kvm_vm_ioctl(kvm_state, KVM_SET_CLOCK, &data) < 0 ||
        !read_clock(&data)) {
        return "KVM does not tell kvmclock, host TSC and time of day at once";
    }

    gap_ns = guest_time_to_count(gt->time, (GuestTimeOfDay) {
                                     data.realtime, guest_time_tai_offset() });
    if (!set_clock(clock_ns + gap_ns, &data)) {
        return "KVM does not set the kvmclock";
    }
    if (data.clock < clock_ns) {
        return "the kvmclock would go backwards";
    }
    why = set_offsets(gt, guest_time_ticks(data.clock - clock_ns,
                                           gt->clock_khz * 1000ULL),
                      guest_tsc_scaled(data.host_tsc, scale), false);
    if (why) {
        return why;
    }
    CPU_FOREACH(cs) {
        run_on_cpu(cs, do_rearm_deadline, RUN_ON_CPU_NULL);
    }
    trace_kvm_guest_time_start(gap_ns, data.clock, data.realtime,
                               data.host_tsc);
    return NULL;
}

bool guest_time_start(GuestTime *gt, uint64_t clock_ns)
{
    const char *why = NULL;
    bool done = false;

    if (gt->loaded) {
        GuestTscScale scale;
        uint32_t khz;

        why = find_scale(&khz, &scale);
        if (!why) {
            why = khz == gt->tsc_khz ? restore(gt, clock_ns, scale) :
                  "the guest's TSC has another frequency here";
            done = !why;
            if (why) {
                /* The caller sets the kvmclock to what it was: TSCs as well */
                set_offsets(gt, 0, guest_tsc_scaled(cpu_get_host_ticks(),
                                                    scale), false);
            }
        }
    } else if (gt->incoming &&
               runstate_is_live(global_state_get_runstate()) &&
               migrate_guest_time() != GUEST_TIME_POLICY_STOPPED) {
        why = "the source has not told when it stopped the guest";
    }
    if (why) {
        warn_report("guest-time: %s: TSC and kvmclock go on from where they "
                    "were on the source", why);
    }
    guest_time_forget(gt);
    return done;
}

static bool vcpus_are_few(void *opaque, int version_id)
{
    GuestTime *gt = opaque;

    return gt->vcpus > 0 && gt->vcpus <= 1 << 16;
}

static int guest_time_post_load(void *opaque, int version_id)
{
    GuestTime *gt = opaque;

    /* Not from a snapshot, whatever it holds */
    gt->valid = gt->loaded = gt->incoming;
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
        VMSTATE_VALIDATE("number of vCPUs", vcpus_are_few),
        VMSTATE_STRUCT_VARRAY_ALLOC(vcpu, GuestTime, vcpus, 1,
                                    vmstate_guest_time_vcpu, GuestTimeVcpu),
        VMSTATE_END_OF_LIST()
    }
};
