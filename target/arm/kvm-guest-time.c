/*
 * Guest time: move the system counter by one instant
 *
 * The source reads its counter and the time of day at once, and the guest's
 * counters.  The destination, or the source if the migration fails, sets
 * offsets with which both of the guest's counters have advanced equally.
 *
 * KVM has one offset per VM for each counter, which userspace cannot read.
 * With kvm-counter-offset=on, QEMU sets one offset for both.  Otherwise KVM
 * computes an offset from the counter's new value at some time within the
 * ioctl; so QEMU reads the counter back and corrects it.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qapi/error.h"
#include "qapi/visitor.h"
#include "qemu/error-report.h"
#include "qemu/timer.h"
#include "hw/core/cpu.h"
#include "qapi/qapi-types-migration.h"
#include "migration/client-options.h"
#include "migration/inject.h"
#include "migration/vmstate.h"
#include "system/kvm.h"
#include "cpu.h"
#include "kvm_arm.h"
#include "kvm-guest-time.h"
#include "kvm-guest-time-math.h"
#include "trace.h"

/* An offset is computed from this many readings of a counter */
#define READINGS    20
/*
 * An offset may be wrong by 1 s / NEAR_PER_S.  QEMU tries for TRY_NS, while the
 * guest waits, to get there
 */
#define NEAR_PER_S  1000000
#define TRY_NS      (2 * SCALE_MS)
#define TRIES       10      /* even after TRY_NS */
/* vCPU threads have this long to leave their ioctls */
#define BUSY_MS     1000

typedef struct ArmGuestTimeInstant {
    uint64_t counter;       /* the host's */
    uint64_t realtime;      /* ns */
} ArmGuestTimeInstant;

/* The host's counter */
static uint64_t arm_guest_time_host(void)
{
    uint64_t now;

    asm volatile("isb; mrs %0, cntvct_el0; isb" : "=r"(now) : : "memory");
    return now;
}

static uint32_t arm_guest_time_hz(void)
{
    uint64_t hz;

    asm("mrs %0, cntfrq_el0" : "=r"(hz));
    return hz;
}

static ArmGuestTimeInstant arm_guest_time_now(void)
{
    ArmGuestTimeInstant now = { 0 };

    now.realtime = guest_time_read_with(arm_guest_time_host, &now.counter);
    return now;
}

/* NULL if this KVM does not let the register migrate: older ones did not */
static uint64_t *arm_guest_time_reg(ARMCPU *cpu, uint64_t reg)
{
    for (int i = 0; i < cpu->cpreg_array_len; i++) {
        if (cpu->cpreg_indexes[i] == reg) {
            return &cpu->cpreg_values[i];
        }
    }
    return NULL;
}

static bool arm_guest_time_read_offset(ARMCPU *cpu, uint64_t reg,
                                       GuestCounterOffset *offset)
{
    if (reg == KVM_REG_ARM_PTIMER_CNT &&
        migration_inject_fail("guest-time-no-physical")) {
        return false;
    }
    for (int i = 0; i < READINGS; i++) {
        uint64_t before = arm_guest_time_host(), guest;

        if (kvm_get_one_reg(CPU(cpu), reg, &guest)) {
            return false;
        }
        guest_counter_narrow(offset, before, arm_guest_time_host(), guest);
    }
    return true;
}

/*
 * Without kvm-counter-offset: sets the counter's value.  Returns false if KVM
 * refuses; the counter has then run on.
 */
static bool arm_guest_time_set_offset(ARMCPU *cpu, uint64_t reg,
                                      uint64_t offset)
{
    int64_t near = MAX(1, arm_guest_time_hz() / NEAR_PER_S), error = 0, lead = 0;
    bool physical = reg == KVM_REG_ARM_PTIMER_CNT;
    int64_t begun = get_clock();
    GuestCounterOffset is;
    int tries = 0;

    do {
        uint64_t before = arm_guest_time_host();
        uint64_t guest = before + lead - offset;

        migration_inject_hold("guest-time-set");
        if ((physical && migration_inject_fail("guest-time-no-physical")) ||
            kvm_set_one_reg(CPU(cpu), reg, &guest)) {
            return false;
        }
        is = GUEST_COUNTER_OFFSET_ANY;
        guest_counter_narrow(&is, before, arm_guest_time_host(), guest);
        if (!arm_guest_time_read_offset(cpu, reg, &is)) {
            break;
        }
        error = guest_counter_offset(&is) - offset;
        /* Lead by the smallest delay that was seen in KVM */
        if (!tries || error < 0) {
            lead += error;
        }
        tries++;
    } while (ABS(error) > near &&
             (tries < TRIES || get_clock() - begun < TRY_NS));

    if (!physical) {
        guest_time_is_off(-(double)error * NANOSECONDS_PER_SECOND /
                          arm_guest_time_hz());
    }
    trace_kvm_arm_guest_time_offset(offset, guest_counter_offset(&is),
                                    is.width, tries);
    return true;
}

/* All vCPUs are stopped.  Returns 0 or -errno. */
static int arm_guest_time_try_one_offset(uint64_t offset)
{
    struct kvm_arm_counter_offset arg = { .counter_offset = offset };
    int ret, ms = 0;

    if (migration_inject_fail("guest-time-one-offset")) {
        return -EBUSY;
    }
    /* KVM returns -EBUSY while any vCPU is in an ioctl */
    while ((ret = kvm_vm_ioctl(kvm_state, KVM_ARM_SET_COUNTER_OFFSET, &arg))
           == -EBUSY && ms++ < BUSY_MS) {
        g_usleep(1000);
    }
    trace_kvm_arm_guest_time_one_offset(offset, ret, ms);
    return ret;
}

/*
 * Called before the guest runs, which it does even if this fails: there may be
 * no other copy of the guest.
 */
static void arm_guest_time_set_one_offset(uint64_t offset)
{
    int ret = arm_guest_time_try_one_offset(offset);

    if (ret) {
        warn_report("guest-time: KVM does not set the system counter's offset: "
                    "%s: the counters have run on", strerror(-ret));
    }
}

int kvm_arm_guest_time_init_vcpu(ARMCPU *cpu)
{
    int ret;

    if (!cpu->kvm_counter_offset || CPU(cpu) != first_cpu) {
        return 0;
    }
    if (!kvm_check_extension(kvm_state, KVM_CAP_COUNTER_OFFSET)) {
        error_report("kvm-counter-offset=on: this host's KVM does not support "
                     "KVM_ARM_SET_COUNTER_OFFSET, which Linux has since 6.4");
        return -ENOTSUP;
    }
    ret = arm_guest_time_try_one_offset(arm_guest_time_host());
    if (ret) {
        error_report("kvm-counter-offset=on: KVM does not set the system "
                     "counter's offset: %s", strerror(-ret));
    }
    return ret;
}

/* All vCPUs share the VM's virtual counter */
static void arm_guest_time_set_vtime(uint64_t virtual, bool dirty)
{
    CPUState *cs;

    CPU_FOREACH(cs) {
        ARM_CPU(cs)->kvm_vtime = virtual;
        ARM_CPU(cs)->kvm_vtime_dirty = dirty;
    }
}

static bool arm_guest_time_take(GuestTimeState *s, Error **errp)
{
    ARMCPU *cpu = container_of(s, ARMCPU, kvm_guest_time.state);
    KVMArmGuestTime *gt = &cpu->kvm_guest_time;
    GuestCounterOffset virtual = GUEST_COUNTER_OFFSET_ANY;
    GuestCounterOffset physical = GUEST_COUNTER_OFFSET_ANY;
    ArmGuestTimeInstant now = { 0 };

    if (!arm_guest_time_read_offset(cpu, KVM_REG_ARM_TIMER_CNT, &virtual)) {
        error_setg(errp, "KVM does not report the virtual counter");
        return false;
    }
    if (!arm_guest_time_read_offset(cpu, KVM_REG_ARM_PTIMER_CNT, &physical)) {
        /* An older KVM without this register sets no offset */
        physical = (GuestCounterOffset) { 0 };
    }
    now = arm_guest_time_now();
    s->then = guest_time_of_day(now.realtime);
    gt->hz = arm_guest_time_hz();
    gt->one_offset = cpu->kvm_counter_offset;
    gt->virtual = now.counter - guest_counter_offset(&virtual);
    gt->physical = gt->one_offset ? gt->virtual :
                   now.counter - guest_counter_offset(&physical);
    trace_kvm_arm_guest_time_stop(gt->virtual, gt->physical, now.realtime,
                                  now.counter);
    migration_inject_hold("guest-time-taken");
    return true;
}

/* Warns of each counter that KVM does not set; no fallback is left then */
static bool arm_guest_time_restore(GuestTimeState *s, Error **errp)
{
    ARMCPU *cpu = container_of(s, ARMCPU, kvm_guest_time.state);
    KVMArmGuestTime *gt = &cpu->kvm_guest_time;
    ArmGuestTimeInstant now = arm_guest_time_now();
    int64_t gap_ns = guest_time_to_count(s, now.realtime);
    uint64_t shift = now.counter - guest_time_ticks(gap_ns, gt->hz);

    /* No gap to count: with kvm-no-adjvtime=on, the counters have run on */
    if (!cpu->kvm_adjvtime && !gap_ns) {
        return true;
    }
    if (gt->one_offset) {
        int ret = arm_guest_time_try_one_offset(shift - gt->virtual);

        if (ret) {
            guest_time_warn("KVM does not set the system counter's offset: %s: "
                            "the counters have run on", strerror(-ret));
        }
    } else {
        if (!arm_guest_time_set_offset(cpu, KVM_REG_ARM_TIMER_CNT,
                                       shift - gt->virtual)) {
            guest_time_warn("KVM does not set the virtual counter: it has run "
                            "on");
        }
        if (!arm_guest_time_set_offset(cpu, KVM_REG_ARM_PTIMER_CNT,
                                       shift - gt->physical)) {
            guest_time_warn("KVM does not set the physical counter: it has run "
                            "on");
        }
    }
    arm_guest_time_set_vtime(gt->virtual, false);
    trace_kvm_arm_guest_time_start(gap_ns, now.realtime, now.counter);
    return true;
}

/*
 * There is no instant.  The caller restores the virtual counter's old value;
 * this does so with the physical counter, which has run on since it was loaded.
 */
static const char *arm_guest_time_fall_back(GuestTimeState *s)
{
    ARMCPU *cpu = container_of(s, ARMCPU, kvm_guest_time.state);

    if (!cpu->kvm_counter_offset && cpu->kvm_adjvtime &&
        (!arm_guest_time_reg(cpu, KVM_REG_ARM_PTIMER_CNT) ||
         !arm_guest_time_set_offset(cpu, KVM_REG_ARM_PTIMER_CNT,
                                    arm_guest_time_host() -
                                    cpu->kvm_guest_time.physical))) {
        return "the virtual counter goes on from where it was when the guest "
               "stopped, but the physical one has run on";
    }
    return "the counters are as with guest-time=stopped";
}

static const GuestTimeOps arm_guest_time_ops = {
    .take = arm_guest_time_take,
    .restore = arm_guest_time_restore,
    .fall_back = arm_guest_time_fall_back,
};

void kvm_arm_guest_time_stop(ARMCPU *cpu, RunState state)
{
    /* This handler runs last for the first vCPU when the VM stops */
    if (CPU(cpu) != first_cpu) {
        return;
    }
    if (cpu->kvm_adjvtime) {
        arm_guest_time_set_vtime(cpu->kvm_vtime, true);
    }
    if (guest_time_state_stop(&cpu->kvm_guest_time.state, &arm_guest_time_ops,
                              state) && cpu->kvm_adjvtime) {
        arm_guest_time_set_vtime(cpu->kvm_guest_time.virtual, true);
    }
}

void kvm_arm_guest_time_start(ARMCPU *cpu)
{
    GuestTimeState *s = &cpu->kvm_guest_time.state;

    /* This handler runs first for the first vCPU when the VM starts */
    if (CPU(cpu) != first_cpu) {
        return;
    }
    /* With kvm-no-adjvtime=on, the counters never stand still */
    if (!cpu->kvm_adjvtime &&
        guest_time_policy(s) == GUEST_TIME_POLICY_STOPPED) {
        guest_time_state_drop(s, "kvm-no-adjvtime lets the counters run on");
    }
    if (!s->valid && cpu->kvm_vtime_dirty) {
        uint64_t virtual = cpu->kvm_vtime;

        arm_guest_time_set_vtime(virtual, false);
        if (cpu->kvm_counter_offset) {
            arm_guest_time_set_one_offset(arm_guest_time_host() - virtual);
        } else {
            cpu->kvm_vtime_dirty = true;    /* the caller sets it for all */
        }
    }
    guest_time_state_start(s, &arm_guest_time_ops);
}

void kvm_arm_guest_time_forget(ARMCPU *cpu)
{
    guest_time_state_forget(&cpu->kvm_guest_time.state);
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
        uint64_t virtual = *arm_guest_time_reg(cpu, KVM_REG_ARM_TIMER_CNT);
        int ret = arm_guest_time_try_one_offset(arm_guest_time_host() -
                                                virtual);

        if (ret) {
            error_report("guest-time: KVM does not set the system counter's "
                         "offset: %s", strerror(-ret));
        }
        return !ret;
    }
    for (int i = 0; i < ARRAY_SIZE(counters); i++) {
        uint64_t *value = arm_guest_time_reg(cpu, counters[i]);

        if (value && kvm_set_one_reg(CPU(cpu), counters[i], value)) {
            error_report("guest-time: KVM does not set the system counter");
            return false;
        }
        if (value && counters[i] == KVM_REG_ARM_PTIMER_CNT &&
            !cpu->kvm_guest_time.state.valid) {
            cpu->kvm_guest_time.physical = *value;
        }
    }
    return true;
}

static bool arm_guest_time_vmstate_needed(void *opaque)
{
    ARMCPU *cpu = opaque;

    return CPU(cpu) == first_cpu &&
           guest_time_state_needed(&cpu->kvm_guest_time.state);
}

static int arm_guest_time_vmstate_post_load(void *opaque, int version_id)
{
    ARMCPU *cpu = opaque;
    KVMArmGuestTime *gt = &cpu->kvm_guest_time;

    if (gt->hz != arm_guest_time_hz()) {
        error_report("guest-time: the system counter (CNTFRQ) has %" PRIu32
                     " Hz on the source and %" PRIu32 " Hz here, and KVM "
                     "cannot scale it: migrate to a host with the same "
                     "frequency", gt->hz, arm_guest_time_hz());
        return -EINVAL;
    }
    if (gt->one_offset != cpu->kvm_counter_offset) {
        error_report("guest-time: CPU property kvm-counter-offset is %s on the "
                     "source: start the destination with the same",
                     gt->one_offset ? "on" : "off");
        return -EINVAL;
    }
    guest_time_state_post_load(&gt->state);
    return 0;
}

const VMStateDescription vmstate_kvm_arm_guest_time = {
    .name = "cpu/kvm_guest_time",
    .version_id = 2,
    .minimum_version_id = 2,
    .needed = arm_guest_time_vmstate_needed,
    .post_load = arm_guest_time_vmstate_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_STRUCT(kvm_guest_time.state, ARMCPU, 1, vmstate_guest_time_state,
                       GuestTimeState),
        VMSTATE_UINT64(kvm_guest_time.virtual, ARMCPU),
        VMSTATE_UINT64(kvm_guest_time.physical, ARMCPU),
        VMSTATE_UINT32(kvm_guest_time.hz, ARMCPU),
        VMSTATE_BOOL(kvm_guest_time.one_offset, ARMCPU),
        VMSTATE_END_OF_LIST()
    }
};

/* Getter and setter of a property */
static void arm_guest_time_visit_bool(Object *obj, Visitor *v, const char *name,
                                      void *opaque, Error **errp)
{
    visit_type_bool(v, name, opaque, errp);
}

/* Sets the machine's property by an older name */
static void arm_guest_time_set_switch(Object *obj, bool value, Error **errp)
{
    guest_time_set_switch(value);
}

void kvm_arm_guest_time_add_properties(ARMCPU *cpu)
{
    Object *obj = OBJECT(cpu);

    object_property_add_bool(obj, "kvm-guest-time", NULL,
                             arm_guest_time_set_switch);
    object_property_set_description(obj, "kvm-guest-time",
                                    "Use the machine's guest-time instead.");

    object_property_add(obj, "kvm-counter-offset", "bool",
                        arm_guest_time_visit_bool, arm_guest_time_visit_bool,
                        NULL, &cpu->kvm_counter_offset);
    object_property_set_description(obj, "kvm-counter-offset",
                                    "Set on to give the virtual and the "
                                    "physical counter the same offset.");
}
