/*
 * Guest time: the system counter moves by one instant
 *
 * The source reads its counter and the time of day at once, and the guest's
 * counters.  The destination, or the source if the migration has failed, gives
 * the guest offsets by which both counters have advanced by the same.
 *
 * KVM has one offset per VM for each of the counters, and no way to read it.
 * A VM with kvm-counter-offset=on has the same one for both counters, and sets
 * it.  In others, KVM computes an offset from the value that a counter is to
 * have, when it comes to that: so see what has come of it, and correct that.
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
#include "migration/vmstate.h"
#include "system/kvm.h"
#include "system/runstate.h"
#include "cpu.h"
#include "kvm_arm.h"
#include "kvm-guest-time.h"
#include "kvm-guest-time-math.h"
#include "trace.h"

/* Readings of a counter to learn its offset, or of the time of day */
#define READINGS    20
/* How near to what was asked for an offset shall be, and how often to try */
#define NEAR_PER_S  1000000
#define TRIES       50
/* For vCPU threads to leave their ioctls */
#define BUSY_MS     1000

typedef struct Instant {
    uint64_t counter;       /* the host's */
    GuestTimeOfDay time;
} Instant;

static uint64_t host_counter(void)
{
    uint64_t now;

    asm volatile("isb; mrs %0, cntvct_el0; isb" : "=r"(now) : : "memory");
    return now;
}

static uint32_t host_hz(void)
{
    uint64_t hz;

    asm("mrs %0, cntfrq_el0" : "=r"(hz));
    return hz;
}

/* Of some readings that which took least time */
static Instant read_instant(void)
{
    uint64_t best = UINT64_MAX;
    Instant instant = { 0 };

    for (int i = 0; i < READINGS; i++) {
        uint64_t before = host_counter(), took;
        struct timespec ts;

        clock_gettime(CLOCK_REALTIME, &ts);
        took = host_counter() - before;
        if (took < best) {
            best = took;
            instant.counter = before + took / 2;
            instant.time.realtime = ts.tv_sec * NANOSECONDS_PER_SECOND +
                                    ts.tv_nsec;
        }
    }
    instant.time.tai_offset = guest_time_tai_offset();
    return instant;
}

/* NULL if KVM does not let this register migrate, as older ones did not */
static uint64_t *find_reg(ARMCPU *cpu, uint64_t reg)
{
    for (int i = 0; i < cpu->cpreg_array_len; i++) {
        if (cpu->cpreg_indexes[i] == reg) {
            return &cpu->cpreg_values[i];
        }
    }
    return NULL;
}

static bool read_offset(CPUState *cs, uint64_t reg, GuestCounterOffset *offset)
{
    if (reg == KVM_REG_ARM_PTIMER_CNT &&
        migration_inject_fail("guest-time-no-physical")) {
        return false;
    }
    for (int i = 0; i < READINGS; i++) {
        uint64_t before = host_counter(), guest;

        if (kvm_get_one_reg(cs, reg, &guest)) {
            return false;
        }
        guest_counter_narrow(offset, before, host_counter(), guest);
    }
    return true;
}

/* By the value of the counter */
static void set_offset(CPUState *cs, uint64_t reg, uint64_t offset)
{
    int64_t near = MAX(1, host_hz() / NEAR_PER_S), error, lead = 0;
    bool physical = reg == KVM_REG_ARM_PTIMER_CNT;
    GuestCounterOffset is;
    int tries = 0;

    do {
        uint64_t before = host_counter(), guest = before + lead - offset;

        migration_inject_hold("guest-time-set");
        if ((physical && migration_inject_fail("guest-time-no-physical")) ||
            kvm_set_one_reg(cs, reg, &guest)) {
            warn_report("guest-time: KVM does not set the %s counter: it has "
                        "run on", physical ? "physical" : "virtual");
            return;
        }
        is = GUEST_COUNTER_OFFSET_ANY;
        guest_counter_narrow(&is, before, host_counter(), guest);
        if (!read_offset(cs, reg, &is)) {
            break;
        }
        error = guest_counter_offset(&is) - offset;
        /* Expect that KVM is as fast as it was at best */
        if (!tries || error < 0) {
            lead += error;
        }
    } while (++tries < TRIES && (error < -near || error > near));

    trace_kvm_arm_guest_time_offset(offset, guest_counter_offset(&is),
                                    is.width, tries);
}

/* All vCPUs are stopped */
static int try_one_offset(uint64_t offset)
{
    struct kvm_arm_counter_offset arg = { .counter_offset = offset };
    int ret, ms = 0;

    if (migration_inject_fail("guest-time-one-offset")) {
        return -EBUSY;
    }
    /* KVM takes it only while no vCPU is in any ioctl */
    while ((ret = kvm_vm_ioctl(kvm_state, KVM_ARM_SET_COUNTER_OFFSET, &arg))
           == -EBUSY && ms++ < BUSY_MS) {
        g_usleep(1000);
    }
    trace_kvm_arm_guest_time_one_offset(offset, ret, ms);
    return ret;
}

/*
 * When the guest is about to run, with an offset that it already has.  It may
 * be the only one that is left of it, so it runs in any case.
 */
static void set_one_offset(uint64_t offset)
{
    int ret = try_one_offset(offset);

    if (ret) {
        warn_report("guest-time: KVM does not set the system counter's offset: "
                    "%s: the counters have run on", strerror(-ret));
    }
}

void kvm_arm_guest_time_forget(ARMCPU *cpu)
{
    cpu->kvm_guest_time = (KVMArmGuestTime) {
        .incoming = runstate_check(RUN_STATE_INMIGRATE),
    };
}

int kvm_arm_guest_time_init_vcpu(ARMCPU *cpu)
{
    int ret;

    if (!cpu->kvm_counter_offset || CPU(cpu) != first_cpu) {
        return 0;
    }
    if (!kvm_check_extension(kvm_state, KVM_CAP_COUNTER_OFFSET)) {
        error_report("kvm-counter-offset=on: this host's KVM does not know "
                     "KVM_ARM_SET_COUNTER_OFFSET, which Linux has since 6.4");
        return -ENOTSUP;
    }
    ret = try_one_offset(host_counter());
    if (ret) {
        error_report("kvm-counter-offset=on: KVM does not set the system "
                     "counter's offset: %s", strerror(-ret));
    }
    return ret;
}

/* The VM has one virtual counter: so have all vCPUs */
static void set_vtime(uint64_t virtual, bool dirty)
{
    CPUState *cs;

    CPU_FOREACH(cs) {
        ARM_CPU(cs)->kvm_vtime = virtual;
        ARM_CPU(cs)->kvm_vtime_dirty = dirty;
    }
}

static const char *take_instant(CPUState *cs, KVMArmGuestTime *gt,
                                uint64_t *counter)
{
    GuestCounterOffset virtual = GUEST_COUNTER_OFFSET_ANY;
    GuestCounterOffset physical = GUEST_COUNTER_OFFSET_ANY;
    Instant instant;

    if (!read_offset(cs, KVM_REG_ARM_TIMER_CNT, &virtual)) {
        return "KVM does not tell the virtual counter";
    }
    if (!read_offset(cs, KVM_REG_ARM_PTIMER_CNT, &physical)) {
        /* KVM from before this register leaves it as the hardware has it */
        physical = (GuestCounterOffset) { 0 };
    }
    instant = read_instant();
    gt->time = instant.time;
    gt->virtual = instant.counter - guest_counter_offset(&virtual);
    gt->physical = instant.counter - guest_counter_offset(&physical);
    gt->hz = host_hz();
    *counter = instant.counter;
    return NULL;
}

void kvm_arm_guest_time_stop(ARMCPU *cpu, RunState state)
{
    KVMArmGuestTime *gt = &cpu->kvm_guest_time;
    uint64_t counter;
    const char *why;

    /* The first one is the last to be told that the VM has stopped */
    if (CPU(cpu) != first_cpu) {
        return;
    }
    kvm_arm_guest_time_forget(cpu);
    if (cpu->kvm_adjvtime) {
        set_vtime(cpu->kvm_vtime, true);
    }
    /* Snapshots, paused VMs and CPR restore time as they always did */
    if (!cpu->kvm_guest_time_enabled || state != RUN_STATE_FINISH_MIGRATE ||
        migrate_mode() != MIG_MODE_NORMAL) {
        return;
    }
    why = take_instant(CPU(cpu), gt, &counter);
    if (why) {
        trace_kvm_arm_guest_time_no_instant(why);
        return;
    }
    gt->valid = true;
    gt->one_offset = cpu->kvm_counter_offset;
    if (gt->one_offset) {
        gt->physical = gt->virtual;
    }
    if (cpu->kvm_adjvtime) {
        set_vtime(gt->virtual, true);
    }
    trace_kvm_arm_guest_time_stop(gt->virtual, gt->physical, gt->time.realtime,
                                  counter);
    migration_inject_hold("guest-time-taken");
}

static void restore(CPUState *cs, KVMArmGuestTime *gt)
{
    Instant instant = read_instant();
    int64_t gap_ns = guest_time_to_count(gt->time, instant.time);
    uint64_t shift = instant.counter - guest_time_ticks(gap_ns, gt->hz);

    if (gt->one_offset) {
        set_one_offset(shift - gt->virtual);
    } else {
        set_offset(cs, KVM_REG_ARM_TIMER_CNT, shift - gt->virtual);
        set_offset(cs, KVM_REG_ARM_PTIMER_CNT, shift - gt->physical);
    }
    set_vtime(gt->virtual, false);
    trace_kvm_arm_guest_time_start(gap_ns, instant.time.realtime,
                                   instant.counter);
}

void kvm_arm_guest_time_start(ARMCPU *cpu)
{
    KVMArmGuestTime *gt = &cpu->kvm_guest_time;
    bool stopped = migrate_guest_time() == GUEST_TIME_POLICY_STOPPED;

    /* The first one is the first to be told that the VM runs */
    if (CPU(cpu) != first_cpu) {
        return;
    }
    /* With kvm-no-adjvtime=on, nothing is to stand still */
    if (gt->valid && (cpu->kvm_adjvtime || !stopped)) {
        restore(CPU(cpu), gt);
    } else if (cpu->kvm_vtime_dirty) {
        uint64_t virtual = cpu->kvm_vtime;

        set_vtime(virtual, false);
        if (cpu->kvm_counter_offset) {
            set_one_offset(host_counter() - virtual);
        } else {
            cpu->kvm_vtime_dirty = true;    /* the caller's, for all of them */
        }
    }
    if (gt->incoming && !gt->valid && !stopped &&
        runstate_is_live(global_state_get_runstate())) {
        warn_report("guest-time: the source has not told when it stopped the "
                    "guest: the counters are as with guest-time=stopped, but "
                    "the physical one has run on");
    }
    kvm_arm_guest_time_forget(cpu);
}

bool kvm_arm_guest_time_post_load(ARMCPU *cpu)
{
    static const uint64_t counters[] = {
        KVM_REG_ARM_TIMER_CNT, KVM_REG_ARM_PTIMER_CNT,
    };

    if (CPU(cpu) != first_cpu) {
        return true;
    }
    if (cpu->kvm_counter_offset) {
        int ret = try_one_offset(host_counter() -
                                 *find_reg(cpu, KVM_REG_ARM_TIMER_CNT));

        if (ret) {
            error_report("guest-time: KVM does not set the system counter's "
                         "offset: %s", strerror(-ret));
        }
        return !ret;
    }
    for (int i = 0; i < ARRAY_SIZE(counters); i++) {
        uint64_t *value = find_reg(cpu, counters[i]);

        if (value && kvm_set_one_reg(CPU(cpu), counters[i], value)) {
            error_report("guest-time: KVM does not set the system counter");
            return false;
        }
    }
    return true;
}

static bool guest_time_needed(void *opaque)
{
    ARMCPU *cpu = opaque;

    /* An instant that was loaded may not be for whom the guest is sent to */
    return CPU(cpu) == first_cpu && cpu->kvm_guest_time_enabled &&
           cpu->kvm_guest_time.valid;
}

static int guest_time_post_load(void *opaque, int version_id)
{
    ARMCPU *cpu = opaque;
    KVMArmGuestTime *gt = &cpu->kvm_guest_time;

    if (gt->hz != host_hz()) {
        error_report("guest-time: the system counter (CNTFRQ) has %" PRIu32
                     " Hz on the source and %" PRIu32 " Hz here, and KVM "
                     "cannot scale it: migrate to a host with the same "
                     "frequency", gt->hz, host_hz());
        return -EINVAL;
    }
    if (gt->one_offset != cpu->kvm_counter_offset) {
        error_report("guest-time: CPU property kvm-counter-offset is %s on the "
                     "source: start the destination with the same",
                     gt->one_offset ? "on" : "off");
        return -EINVAL;
    }
    /* Not from a snapshot, whatever it holds */
    gt->valid = gt->incoming;
    return 0;
}

const VMStateDescription vmstate_kvm_arm_guest_time = {
    .name = "cpu/kvm_guest_time",
    .version_id = 1,
    .minimum_version_id = 1,
    .needed = guest_time_needed,
    .post_load = guest_time_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT64(kvm_guest_time.time.realtime, ARMCPU),
        VMSTATE_INT32(kvm_guest_time.time.tai_offset, ARMCPU),
        VMSTATE_UINT64(kvm_guest_time.virtual, ARMCPU),
        VMSTATE_UINT64(kvm_guest_time.physical, ARMCPU),
        VMSTATE_UINT32(kvm_guest_time.hz, ARMCPU),
        VMSTATE_BOOL(kvm_guest_time.one_offset, ARMCPU),
        VMSTATE_END_OF_LIST()
    }
};

static bool guest_time_get(Object *obj, Error **errp)
{
    return ARM_CPU(obj)->kvm_guest_time_enabled;
}

static void guest_time_set(Object *obj, bool value, Error **errp)
{
    ARM_CPU(obj)->kvm_guest_time_enabled = value;
}

static bool counter_offset_get(Object *obj, Error **errp)
{
    return ARM_CPU(obj)->kvm_counter_offset;
}

static void counter_offset_set(Object *obj, bool value, Error **errp)
{
    ARM_CPU(obj)->kvm_counter_offset = value;
}

void kvm_arm_guest_time_add_properties(ARMCPU *cpu)
{
    Object *obj = OBJECT(cpu);

    object_property_add_bool(obj, "kvm-guest-time", guest_time_get,
                             guest_time_set);
    object_property_set_description(obj, "kvm-guest-time",
                                    "Set on to let the destination of a live "
                                    "migration know when the VM stopped.");

    object_property_add_bool(obj, "kvm-counter-offset", counter_offset_get,
                             counter_offset_set);
    object_property_set_description(obj, "kvm-counter-offset",
                                    "Set on to give the virtual and the "
                                    "physical counter the same offset.");
}
