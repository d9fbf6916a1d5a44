/*
 * SDEI 1.0, served by QEMU for KVM's guests
 *
 * KVM's SMCCC filter (Linux 6.4) hands a guest's calls of SDEI to QEMU.  To
 * deliver an event, QEMU changes the registers of a vCPU that has left KVM_RUN.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "hw/core/cpu.h"
#include "migration/inject.h"
#include "migration/vmstate.h"
#include "system/hw_accel.h"
#include "system/kvm.h"
#include "system/runstate.h"
#include "cpu.h"
#include "cpu-features.h"
#include "internals.h"
#include "kvm-sdei.h"
#include "trace.h"

/* Not the number of an event */
#define NO_EVENT    UINT32_MAX
/* Of builds for tests */
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
 * Of the VM, with each vCPU's SdeiPE: used with the BQL only.  A vCPU's
 * registers are changed by its own thread alone.
 */
typedef struct KVMArmSdei {
    Sdei state;
    uint32_t number[SDEI_EVENTS];   /* in a stream: of all events, in order */
} KVMArmSdei;

static KVMArmSdei sdei;

bool kvm_arm_sdei_enabled(void)
{
    return ARM_CPU(first_cpu)->sdei;
}

/* Registers, of the vCPU whose thread this is */

static void kvm_arm_sdei_get_regs(ARMCPU *cpu, SdeiRegs *regs)
{
    CPUARMState *env = &cpu->env;
    uint64_t sctlr;

    cpu_synchronize_state(CPU(cpu));
    sctlr = env->cp15.sctlr_el[1];
    if (!is_a64(env)) {
        aarch64_sync_32_to_64(env);
    }
    memcpy(regs->x, env->xregs, sizeof(regs->x));
    regs->pc = env->pc;
    regs->pstate = is_a64(env) ? pstate_read(env) : cpsr_read(env);
    regs->elr = env->elr_el[1];
    regs->spsr = env->banked_spsr[aarch64_banked_spsr_index(1)];

    /* As an exception that is taken to EL1 */
    regs->pstate_kept = is_a64(env) ? PSTATE_PAN | PSTATE_DIT : PSTATE_PAN;
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

static void kvm_arm_sdei_set_regs(ARMCPU *cpu, const SdeiRegs *regs)
{
    CPUARMState *env = &cpu->env;

    memcpy(env->xregs, regs->x, sizeof(regs->x));
    env->pc = regs->pc;
    env->elr_el[1] = regs->elr;
    env->banked_spsr[aarch64_banked_spsr_index(1)] = regs->spsr;
    /* SP is that of the mode; EL1 is always of 64 bits, EL0 may be of 32 */
    aarch64_save_sp(env, 1);
    env->aarch64 = !(regs->pstate & PSTATE_nRW);
    if (env->aarch64) {
        pstate_write(env, regs->pstate);
    } else {
        cpsr_write(env, regs->pstate, 0xffffffff, CPSRWriteRaw);
    }
    aarch64_restore_sp(env, 1);
    if (!env->aarch64) {
        aarch64_sync_64_to_32(env);
    }
}

/* Delivery */

static void kvm_arm_sdei_deliver(ARMCPU *cpu, SdeiRegs *regs)
{
    int event = sdei_deliver(&sdei.state, cpu->sdei, regs);

    if (event >= 0) {
        trace_kvm_arm_sdei_deliver(CPU(cpu)->cpu_index,
                                   sdei.state.event[event].number,
                                   regs->x[2], regs->x[3], regs->pc);
    }
}

static bool kvm_arm_sdei_is_on(CPUState *cs)
{
    struct kvm_mp_state state;

    return !kvm_vcpu_ioctl(cs, KVM_GET_MP_STATE, &state) &&
           state.mp_state != KVM_MP_STATE_STOPPED;
}

/* In the vCPU's thread, with the BQL */
static void kvm_arm_sdei_work(CPUState *cs, run_on_cpu_data data)
{
    ARMCPU *cpu = ARM_CPU(cs);
    SdeiRegs regs;

    cpu->sdei->kicked = false;
    /* When the VM goes on, this is asked for again */
    if (!runstate_is_running() || sdei_next(&sdei.state, cpu->sdei) < 0) {
        return;
    }
    /*
     * KVM turns vCPUs off and on without QEMU.  One that is off begins anew,
     * as after a reset.
     */
    if (!kvm_arm_sdei_is_on(cs)) {
        sdei_reset_pe(cpu->sdei);
        return;
    }
    kvm_arm_sdei_get_regs(cpu, &regs);
    kvm_arm_sdei_deliver(cpu, &regs);
    kvm_arm_sdei_set_regs(cpu, &regs);
}

/* Each vCPU that can take something shall do so */
static void kvm_arm_sdei_kick(void)
{
    CPUState *cs;

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

    g_assert(bql_locked() && event >= 0);
    pending = sdei_make_pending(&sdei.state, cpu->sdei, event);
    trace_kvm_arm_sdei_inject(CPU(cpu)->cpu_index, number, pending);
    kvm_arm_sdei_kick();
    return pending;
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
    kvm_arm_sdei_kick();
}

/* The filter lets through what came by HVC and by SMC: both are served */
void kvm_arm_sdei_exit(ARMCPU *cpu, const struct kvm_run *run)
{
    uint32_t function = run->hypercall.nr - SDEI_FN_BASE;
    SdeiRegs regs;
    uint64_t arg;

    /* Some hundred ioctls, of this vCPU alone */
    cpu_synchronize_state(CPU(cpu));
    bql_lock();
    kvm_arm_sdei_get_regs(cpu, &regs);
    arg = regs.x[1];
    sdei_call(&sdei.state, cpu->sdei, function, &regs);
    trace_kvm_arm_sdei_call(CPU(cpu)->cpu_index, function, arg, regs.x[0],
                            regs.pc);
    kvm_arm_sdei_deliver(cpu, &regs);
    kvm_arm_sdei_set_regs(cpu, &regs);
    kvm_arm_sdei_kick();
    bql_unlock();
}

/* Start and reset */

static int kvm_arm_sdei_set_filter(void)
{
    struct kvm_smccc_filter filter = {
        .base = SDEI_FN_BASE,
        .nr_functions = SDEI_FUNCTIONS,
        .action = KVM_SMCCC_FILTER_FWD_TO_USER,
    };
    struct kvm_device_attr attr = {
        .group = KVM_ARM_VM_SMCCC_CTRL,
        .attr = KVM_ARM_VM_SMCCC_FILTER,
        .addr = (uintptr_t)&filter,
    };

    /* The error of a kernel that does not know it depends on its version */
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
    int ret = kvm_arm_sdei_set_filter();

    trace_kvm_arm_sdei_init(ret);
    if (ret == -ENOTSUP) {
        error_report("kvm-sdei=on: this host's KVM does not know "
                     "KVM_ARM_VM_SMCCC_FILTER, which Linux has since 6.4");
        return ret;
    }
    if (ret) {
        error_report("kvm-sdei=on: KVM does not hand calls of SDEI to QEMU: %s",
                     strerror(-ret));
        return ret;
    }
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
    sdei_add_pe(&sdei.state, cpu->sdei);
    return 0;
}

void kvm_arm_sdei_reset_vcpu(ARMCPU *cpu)
{
    if (!cpu->sdei) {
        return;
    }
    trace_kvm_arm_sdei_reset(CPU(cpu)->cpu_index);
    cpu->sdei->affinity = cpu->mp_affinity;     /* KVM has told it by now */
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

/* What KVM would refuse when the handler completes, and the source is gone */
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
