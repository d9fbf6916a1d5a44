/*
 * SDEI 1.0, served by QEMU for KVM's guests
 *
 * KVM's SMCCC filter (Linux 6.4) passes a guest's SDEI calls to QEMU.  To
 * deliver an event, QEMU changes the registers of a vCPU that has left KVM_RUN.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qemu/error-report.h"
#include "qemu/lockable.h"
#include "qemu/main-loop.h"
#include "qemu/rcu.h"
#include "hw/core/cpu.h"
#include "migration/inject.h"
#include "migration/vmstate.h"
#include "system/kvm.h"
#include "system/runstate.h"
#include "cpu.h"
#include "cpu-features.h"
#include "internals.h"
#include "kvm_arm.h"
#include "kvm-sdei.h"
#include "trace.h"

/* No event has this number */
#define NO_EVENT    UINT32_MAX
/* An event that only builds for tests have */
#define TEST_EVENT  0x40400100

static const SdeiEvent kvm_arm_sdei_events[] = {
    { .number = 0, .signalable = true },
#ifdef CONFIG_MIGRATION_INJECT
    { .number = TEST_EVENT, .critical = true, .signalable = true },
    { .number = TEST_EVENT + 1, .shared = true, .signalable = true },
    { .number = TEST_EVENT + 2, .shared = true, .critical = true,
      .signalable = true },
#endif
};

/*
 * The VM's state.  @lock protects it and each vCPU's SdeiPE, but for streams,
 * which are written and read while no vCPU runs.  @lock is taken after the BQL,
 * and no system call is made with it.  Only a vCPU's own thread reads its
 * registers, before it takes @lock, and changes them, after it: a kick delivers
 * an event that another PE makes pending meanwhile.
 */
typedef struct KVMArmSdei {
    QemuMutex lock;
    Sdei state;
    uint32_t number[SDEI_EVENTS];   /* of @state's events, for streams */
} KVMArmSdei;

static KVMArmSdei sdei;

bool kvm_arm_sdei_enabled(void)
{
    return ARM_CPU(first_cpu)->sdei;
}

/* Registers, accessed by the vCPU's own thread */

#define CORE_REG(x) (KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE | \
                     KVM_REG_ARM_CORE_REG(x))
#define GPR(n)      (CORE_REG(regs.regs[0]) + (n) * (CORE_REG(regs.regs[1]) - \
                                                     CORE_REG(regs.regs[0])))
#define SCTLR_EL1   ARM64_SYS_REG(3, 0, 1, 0, 0)

/* The first @n of x0 to x17, which KVM has while QEMU has no copy */
static void kvm_arm_sdei_get_gprs(ARMCPU *cpu, SdeiRegs *regs, int n)
{
    CPUState *cs = CPU(cpu);

    int ret = 0;

    for (int i = 0; i < n; i++) {
        ret |= kvm_get_one_reg(cs, GPR(i), &regs->x[i]);
    }
    g_assert(!ret);
}

/* All of @regs, by some twenty ioctls */
static void kvm_arm_sdei_get_regs(ARMCPU *cpu, SdeiRegs *regs)
{
    CPUState *cs = CPU(cpu);
    uint64_t sctlr;
    int ret;

    kvm_arm_sdei_get_gprs(cpu, regs, SDEI_GPRS);
    ret = kvm_get_one_reg(cs, CORE_REG(regs.pc), &regs->pc) |
          kvm_get_one_reg(cs, CORE_REG(regs.pstate), &regs->pstate) |
          kvm_get_one_reg(cs, CORE_REG(elr_el1), &regs->elr) |
          kvm_get_one_reg(cs, CORE_REG(spsr[KVM_SPSR_EL1]), &regs->spsr) |
          kvm_get_one_reg(cs, SCTLR_EL1, &sctlr);
    /* Every processor has these registers */
    g_assert(!ret);

    /* The bits that an exception to EL1 keeps, and sets */
    regs->pstate_kept = PSTATE_PAN;
    if (!(regs->pstate & PSTATE_nRW)) {
        regs->pstate_kept |= PSTATE_DIT;
    }
    regs->pstate_set = PSTATE_DAIF | aarch64_pstate_mode(1, true);
    if (cpu_isar_feature(aa64_pan, cpu) && !(sctlr & SCTLR_SPAN)) {
        regs->pstate_set |= PSTATE_PAN;
    }
    if (cpu_isar_feature(aa64_ssbs, cpu) && (sctlr & SCTLR_DSSBS_64)) {
        regs->pstate_set |= PSTATE_SSBS;
    }
    if (cpu_isar_feature(aa64_mte, cpu)) {
        regs->pstate_set |= PSTATE_TCO;
    }
}

static int kvm_arm_sdei_set_reg(CPUState *cs, uint64_t id, uint64_t was,
                                uint64_t value)
{
    return value == was ? 0 : kvm_set_one_reg(cs, id, &value);
}

/* Writes registers that differ from @was, KVM's values.  Returns -errno. */
static int kvm_arm_sdei_set_regs(ARMCPU *cpu, const SdeiRegs *was,
                                 const SdeiRegs *regs)
{
    CPUState *cs = CPU(cpu);
    int ret;

    /*
     * PSTATE first: while it is 32-bit, KVM truncates x0 to x14 and the PC.  A
     * stream can contain a mode that this host lacks.
     */
    ret = kvm_arm_sdei_set_reg(cs, CORE_REG(regs.pstate), was->pstate,
                               regs->pstate);
    if (ret) {
        error_report("kvm-sdei: KVM refuses PSTATE 0x%" PRIx64 ": %s",
                     regs->pstate, strerror(-ret));
        return ret;
    }
    for (int i = 0; i < SDEI_GPRS; i++) {
        ret |= kvm_arm_sdei_set_reg(cs, GPR(i), was->x[i], regs->x[i]);
    }
    ret |= kvm_arm_sdei_set_reg(cs, CORE_REG(regs.pc), was->pc, regs->pc) |
           kvm_arm_sdei_set_reg(cs, CORE_REG(elr_el1), was->elr, regs->elr) |
           kvm_arm_sdei_set_reg(cs, CORE_REG(spsr[KVM_SPSR_EL1]), was->spsr,
                                regs->spsr);
    g_assert(!ret);
    return 0;
}

/* Delivery */

static bool kvm_arm_sdei_has_next(ARMCPU *cpu)
{
    QEMU_LOCK_GUARD(&sdei.lock);
    return sdei_next(&sdei.state, cpu->sdei) >= 0;
}

/* In the vCPU's thread, without the lock.  Returns -errno. */
static int kvm_arm_sdei_delivered(ARMCPU *cpu, int event, const SdeiRegs *was,
                                  const SdeiRegs *regs)
{
    trace_kvm_arm_sdei_deliver(CPU(cpu)->cpu_index,
                               sdei.state.event[event].number, was->pc,
                               was->pstate, regs->pc);
    return kvm_arm_sdei_set_regs(cpu, was, regs);
}

/* In the vCPU's thread, without the lock.  Reports an error before -errno. */
static int kvm_arm_sdei_deliver(ARMCPU *cpu)
{
    SdeiRegs was, regs;
    int event;

    if (!kvm_arm_sdei_has_next(cpu)) {
        return 0;
    }
    kvm_arm_sdei_get_regs(cpu, &was);
    regs = was;
    WITH_QEMU_LOCK_GUARD(&sdei.lock) {
        event = sdei_deliver(&sdei.state, cpu->sdei, &regs);
    }
    /* Another PE may have taken the event meanwhile */
    return event < 0 ? 0 : kvm_arm_sdei_delivered(cpu, event, &was, &regs);
}

static bool kvm_arm_sdei_is_on(CPUState *cs)
{
    struct kvm_mp_state state;

    return !kvm_vcpu_ioctl(cs, KVM_GET_MP_STATE, &state) &&
           state.mp_state != KVM_MP_STATE_STOPPED;
}

static void kvm_arm_sdei_kick(void);

/* In the vCPU's thread, with the BQL */
static void kvm_arm_sdei_work(CPUState *cs, run_on_cpu_data data)
{
    ARMCPU *cpu = ARM_CPU(cs);

    WITH_QEMU_LOCK_GUARD(&sdei.lock) {
        cpu->sdei->kicked = false;
        /* A start of the VM kicks the vCPU again */
        if (!runstate_is_running() ||
            sdei_next(&sdei.state, cpu->sdei) < 0) {
            return;
        }
    }
    /*
     * KVM turns vCPUs off and on without QEMU.  A vCPU that is off restarts as
     * after a reset.
     */
    if (!kvm_arm_sdei_is_on(cs)) {
        QEMU_LOCK_GUARD(&sdei.lock);
        sdei_reset_pe(cpu->sdei);
        /* Another vCPU can take a shared event that this one had */
        kvm_arm_sdei_kick();
        return;
    }
    if (cs->vcpu_dirty) {
        if (kvm_arch_put_registers(cs, KVM_PUT_RUNTIME_STATE, NULL)) {
            /* kvm_cpu_exec() finds the error and stops the VM */
            return;
        }
        cs->vcpu_dirty = false;
    }
    if (kvm_arm_sdei_deliver(cpu)) {
        vm_stop(RUN_STATE_INTERNAL_ERROR);
    }
}

/* Kicks each vCPU that can take an event.  With the lock held. */
static void kvm_arm_sdei_kick(void)
{
    CPUState *cs;

    RCU_READ_LOCK_GUARD();
    CPU_FOREACH(cs) {
        ARMCPU *cpu = ARM_CPU(cs);

        if (cpu->sdei && !cpu->sdei->kicked &&
            sdei_next(&sdei.state, cpu->sdei) >= 0) {
            trace_kvm_arm_sdei_kick(cs->cpu_index);
            cpu->sdei->kicked = true;
            async_run_on_cpu(cs, kvm_arm_sdei_work, RUN_ON_CPU_NULL);
        }
    }
}

bool kvm_arm_sdei_inject(ARMCPU *cpu, uint32_t number)
{
    int event = sdei_find(&sdei.state, number);
    bool pending;

    g_assert(event >= 0);
    QEMU_LOCK_GUARD(&sdei.lock);
    pending = sdei_make_pending(&sdei.state, cpu->sdei, event);
    trace_kvm_arm_sdei_inject(CPU(cpu)->cpu_index, number, pending);
    kvm_arm_sdei_kick();
    return pending;
}

bool kvm_arm_sdei_can_take(ARMCPU *cpu, uint32_t number)
{
    int event = sdei_find(&sdei.state, number);

    g_assert(event >= 0);
    QEMU_LOCK_GUARD(&sdei.lock);
    return sdei_next(&sdei.state, cpu->sdei) < 0 &&
           sdei_could_take(&sdei.state, cpu->sdei, event);
}

bool kvm_arm_sdei_is_registered(ARMCPU *cpu, uint32_t number)
{
    int event = sdei_find(&sdei.state, number);

    g_assert(event >= 0);
    QEMU_LOCK_GUARD(&sdei.lock);
    return cpu->sdei->own[event].registered;
}

bool kvm_arm_sdei_take(ARMCPU *cpu, uint32_t number)
{
    int event = sdei_find(&sdei.state, number);
    SdeiRegs was, regs;

    g_assert(event >= 0);
    kvm_arm_sdei_get_regs(cpu, &was);
    regs = was;
    /* Checks again, under the lock: another event may have become the next */
    WITH_QEMU_LOCK_GUARD(&sdei.lock) {
        if (sdei_next(&sdei.state, cpu->sdei) >= 0 ||
            !sdei_could_take(&sdei.state, cpu->sdei, event)) {
            return false;
        }
        sdei_make_pending(&sdei.state, cpu->sdei, event);
        sdei_deliver(&sdei.state, cpu->sdei, &regs);
    }
    /* KVM accepts EL1's PSTATE */
    kvm_arm_sdei_delivered(cpu, event, &was, &regs);
    return true;
}

static void kvm_arm_sdei_vm_state_change(void *opaque, bool running,
                                         RunState state)
{
    if (!running) {
        return;
    }
    if (migration_inject_fail("sdei-inject")) {
        kvm_arm_sdei_inject(ARM_CPU(first_cpu), TEST_EVENT);
    }
    QEMU_LOCK_GUARD(&sdei.lock);
    kvm_arm_sdei_kick();
}

/* The filter passes on calls by HVC and by SMC: both are served */
int kvm_arm_sdei_exit(ARMCPU *cpu, const struct kvm_run *run)
{
    uint32_t function = run->hypercall.nr - SDEI_FN_BASE;
    SdeiRegs was = { }, regs;
    int ret;

    if (function == SDEI_EVENT_COMPLETE ||
        function == SDEI_EVENT_COMPLETE_AND_RESUME) {
        kvm_arm_sdei_get_regs(cpu, &was);
    } else {
        /* Other functions only take parameters and change x0 */
        kvm_arm_sdei_get_gprs(cpu, &was, 6);
    }
    regs = was;
    WITH_QEMU_LOCK_GUARD(&sdei.lock) {
        if (sdei_call(&sdei.state, cpu->sdei, function, &regs)) {
            kvm_arm_sdei_kick();
        }
    }
    trace_kvm_arm_sdei_call(CPU(cpu)->cpu_index, function, was.x[1], regs.x[0]);
    ret = kvm_arm_sdei_set_regs(cpu, &was, &regs);
    return ret ?: kvm_arm_sdei_deliver(cpu);
}

/* Start and reset */

int kvm_arm_forward_calls(uint32_t base, uint32_t functions)
{
    struct kvm_smccc_filter filter = {
        .base = base,
        .nr_functions = functions,
        .action = KVM_SMCCC_FILTER_FWD_TO_USER,
    };
    struct kvm_device_attr attr = {
        .group = KVM_ARM_VM_SMCCC_CTRL,
        .attr = KVM_ARM_VM_SMCCC_FILTER,
        .addr = (uintptr_t)&filter,
    };

    /* Kernels without the filter return different errors, by version */
    if (migration_inject_fail("sdei-no-filter") ||
        kvm_vm_ioctl(kvm_state, KVM_HAS_DEVICE_ATTR, &attr)) {
        return -ENOTSUP;
    }
    return kvm_vm_ioctl(kvm_state, KVM_SET_DEVICE_ATTR, &attr);
}

static int kvm_arm_sdei_events_pre_save(void *opaque)
{
    for (int i = 0; i < SDEI_EVENTS; i++) {
        sdei.number[i] = i < sdei.state.events ? sdei.state.event[i].number :
                         NO_EVENT;
    }
    return 0;
}

static int kvm_arm_sdei_events_post_load(void *opaque, int version_id)
{
    for (int i = 0; i < SDEI_EVENTS; i++) {
        uint32_t number = i < sdei.state.events ? sdei.state.event[i].number :
                          NO_EVENT;

        if (sdei.number[i] != number) {
            error_report("kvm-sdei: the source has other events than this "
                         "QEMU: number %d is 0x%" PRIx32 " there and 0x%" PRIx32
                         " here", i, sdei.number[i], number);
            return -EINVAL;
        }
    }
    return 0;
}

static bool kvm_arm_sdei_shared_needed(void *opaque)
{
    for (int i = 0; i < sdei.state.events; i++) {
        if (sdei.state.shared[i].registered) {
            return true;
        }
    }
    return false;
}

static const VMStateDescription vmstate_sdei_handler = {
    .name = "sdei-handler",
    .version_id = 1,
    .minimum_version_id = 1,
    .fields = (const VMStateField[]) {
        VMSTATE_BOOL(registered, SdeiHandler),
        VMSTATE_BOOL(enabled, SdeiHandler),
        VMSTATE_BOOL(pending, SdeiHandler),
        VMSTATE_BOOL(to_pe, SdeiHandler),
        VMSTATE_UINT64(entry, SdeiHandler),
        VMSTATE_UINT64(argument, SdeiHandler),
        VMSTATE_UINT64(affinity, SdeiHandler),
        VMSTATE_END_OF_LIST()
    }
};

static const VMStateDescription vmstate_kvm_arm_sdei_shared = {
    .name = "kvm-sdei/shared",
    .version_id = 1,
    .minimum_version_id = 1,
    .needed = kvm_arm_sdei_shared_needed,
    .fields = (const VMStateField[]) {
        VMSTATE_STRUCT_ARRAY(state.shared, KVMArmSdei, SDEI_EVENTS, 1,
                             vmstate_sdei_handler, SdeiHandler),
        VMSTATE_END_OF_LIST()
    }
};

static const VMStateDescription vmstate_kvm_arm_sdei_events = {
    .name = "kvm-sdei",
    .version_id = 1,
    .minimum_version_id = 1,
    .pre_save = kvm_arm_sdei_events_pre_save,
    .post_load = kvm_arm_sdei_events_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT32_ARRAY(number, KVMArmSdei, SDEI_EVENTS),
        VMSTATE_END_OF_LIST()
    },
    .subsections = (const VMStateDescription * const []) {
        &vmstate_kvm_arm_sdei_shared,
        NULL
    }
};

static int kvm_arm_sdei_init_vm(void)
{
    int ret = kvm_arm_forward_calls(SDEI_FN_BASE, SDEI_FUNCTIONS);

    trace_kvm_arm_sdei_init(ret);
    if (ret == -ENOTSUP) {
        error_report("kvm-sdei=on: this host's KVM does not support "
                     "KVM_ARM_VM_SMCCC_FILTER, which Linux has since 6.4");
        return ret;
    }
    if (ret) {
        error_report("kvm-sdei=on: KVM does not hand calls of SDEI to QEMU: %s",
                     strerror(-ret));
        return ret;
    }
    qemu_mutex_init(&sdei.lock);
    for (int i = 0; i < ARRAY_SIZE(kvm_arm_sdei_events); i++) {
        sdei_add_event(&sdei.state, &kvm_arm_sdei_events[i]);
    }
    vmstate_register(NULL, 0, &vmstate_kvm_arm_sdei_events, &sdei);
    qemu_add_vm_change_state_handler(kvm_arm_sdei_vm_state_change, NULL);
    return 0;
}

int kvm_arm_sdei_init_vcpu(ARMCPU *cpu)
{
    bool first = CPU(cpu) == first_cpu;

    if (!first && cpu->kvm_sdei != kvm_arm_sdei_enabled()) {
        error_report("kvm-sdei must be the same for all vCPUs");
        return -EINVAL;
    }
    if (!cpu->kvm_sdei) {
        return 0;
    }
    if (!arm_feature(&cpu->env, ARM_FEATURE_AARCH64)) {
        error_report("kvm-sdei=on: a guest of 32 bits cannot call SDEI");
        return -EINVAL;
    }
    if (first) {
        int ret = kvm_arm_sdei_init_vm();

        if (ret) {
            return ret;
        }
    }
    cpu->sdei = g_new0(SdeiPE, 1);
    QEMU_LOCK_GUARD(&sdei.lock);
    sdei_add_pe(&sdei.state, cpu->sdei);
    return 0;
}

void kvm_arm_sdei_reset_vcpu(ARMCPU *cpu)
{
    if (!cpu->sdei) {
        return;
    }
    trace_kvm_arm_sdei_reset(CPU(cpu)->cpu_index);
    QEMU_LOCK_GUARD(&sdei.lock);
    cpu->sdei->affinity = cpu->mp_affinity;     /* KVM has reported it */
    sdei_reset_pe(cpu->sdei);
    if (CPU(cpu) == first_cpu) {
        sdei_reset_shared(&sdei.state);
    }
}

void kvm_arm_sdei_add_event(const SdeiEvent *event)
{
    g_assert(bql_locked() && kvm_arm_sdei_enabled());
    sdei_add_event(&sdei.state, event);
}

/* A vCPU's state */

/* Refuses a mode that KVM would refuse too late, when the handler completes */
static int sdei_context_post_load(void *opaque, int version_id)
{
    SdeiContext *context = opaque;
    uint64_t mode = context->pstate & (PSTATE_nRW | PSTATE_M);

    if (context->running && mode != PSTATE_MODE_EL0t &&
        mode != PSTATE_MODE_EL1t && mode != PSTATE_MODE_EL1h &&
        mode != ARM_CPU_MODE_USR) {
        error_report("kvm-sdei: the interrupted mode 0x%" PRIx64
                     " is not a guest's", mode);
        return -EINVAL;
    }
    return 0;
}

static const VMStateDescription vmstate_sdei_context = {
    .name = "sdei-context",
    .version_id = 1,
    .minimum_version_id = 1,
    .post_load = sdei_context_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_BOOL(running, SdeiContext),
        VMSTATE_UINT32(event, SdeiContext),
        VMSTATE_UINT64_ARRAY(x, SdeiContext, SDEI_GPRS),
        VMSTATE_UINT64(pc, SdeiContext),
        VMSTATE_UINT64(pstate, SdeiContext),
        VMSTATE_END_OF_LIST()
    }
};

static const VMStateDescription vmstate_sdei_pe = {
    .name = "sdei-pe",
    .version_id = 1,
    .minimum_version_id = 1,
    .fields = (const VMStateField[]) {
        VMSTATE_BOOL(masked, SdeiPE),
        VMSTATE_STRUCT_ARRAY(own, SdeiPE, SDEI_EVENTS, 1, vmstate_sdei_handler,
                             SdeiHandler),
        VMSTATE_STRUCT_ARRAY(context, SdeiPE, SDEI_PRIORITIES, 1,
                             vmstate_sdei_context, SdeiContext),
        VMSTATE_END_OF_LIST()
    }
};

static bool kvm_arm_sdei_needed(void *opaque)
{
    ARMCPU *cpu = opaque;

    return cpu->sdei;
}

static int kvm_arm_sdei_pre_load(void *opaque)
{
    ARMCPU *cpu = opaque;

    if (!cpu->sdei) {
        error_report("CPU property kvm-sdei is on on the source: start the "
                     "destination with the same");
        return -EINVAL;
    }
    return 0;
}

const VMStateDescription vmstate_kvm_arm_sdei = {
    .name = "cpu/kvm_sdei",
    .version_id = 1,
    .minimum_version_id = 1,
    .needed = kvm_arm_sdei_needed,
    .pre_load = kvm_arm_sdei_pre_load,
    .fields = (const VMStateField[]) {
        VMSTATE_STRUCT_POINTER(sdei, ARMCPU, vmstate_sdei_pe, SdeiPE),
        VMSTATE_END_OF_LIST()
    }
};

/* The property */

static bool kvm_arm_sdei_get(Object *obj, Error **errp)
{
    return ARM_CPU(obj)->kvm_sdei;
}

static void kvm_arm_sdei_set(Object *obj, bool value, Error **errp)
{
    ARM_CPU(obj)->kvm_sdei = value;
}

void kvm_arm_sdei_add_properties(ARMCPU *cpu)
{
    Object *obj = OBJECT(cpu);

    object_property_add_bool(obj, "kvm-sdei", kvm_arm_sdei_get,
                             kvm_arm_sdei_set);
    object_property_set_description(obj, "kvm-sdei",
                                    "Set on to give the guest the Software "
                                    "Delegated Exception Interface.");
}
