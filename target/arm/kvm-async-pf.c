/*
 * Async page faults for KVM's arm64 guests, served by QEMU
 *
 * KVM has none for arm64.  A private event of SDEI notifies the guest of a
 * missing page, whose token the guest reads in its data block; a PPI notifies
 * it of placed pages.  By SMCCC calls, the guest sets the address of the block,
 * and takes the tokens of placed pages: docs/devel/async-pf.md.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/rcu.h"
#include "exec/address-spaces.h"
#include "exec/memory.h"
#include "hw/arm/bsa.h"
#include "hw/arm/fdt.h"
#include "hw/core/cpu.h"
#include "migration/postcopy-async-ops.h"
#include "migration/vmstate.h"
#include "system/device_tree.h"
#include "system/kvm.h"
#include "cpu.h"
#include "kvm_arm.h"
#include "kvm-async-pf.h"
#include "kvm-sdei.h"
#include "trace.h"

/* SMCCC calls of a hypervisor, 64-bit, far from those that KVM itself serves */
#define FN_BASE         0xc6005100
#define FN_NUMBER       0x10

typedef enum Function {
    FN_ENABLE,
    FN_DISABLE,
    FN_TAKEN,
} Function;

/* A private event of the hypervisor, which has chosen its number */
#define MISSING_EVENT   0x40400001
/* A PPI that neither Arm's BSA nor our machines use */
#define READY_INTID     18

/* Results of calls */
#define SUCCESS         0
#define NOT_SUPPORTED   (-1)
#define NOT_REQUIRED    (-2)
#define INVALID         (-3)

/* The guest's data block: a token of 32 bits, the rest is reserved */
#define BLOCK_SIZE      64
#define ALL_TOKENS      UINT32_MAX

#define CORE_REG(x) (KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE | \
                     KVM_REG_ARM_CORE_REG(x))

/* Whether KVM can suspend a vCPU until an interrupt; set before vCPUs run */
static bool async_pf_can_suspend;

static void async_pf_set_line(ARMCPU *cpu, bool up)
{
    if (cpu->async_pf.up != up) {
        cpu->async_pf.up = up;
        kvm_arm_set_irq(CPU(cpu)->cpu_index, KVM_ARM_IRQ_TYPE_PPI, READY_INTID,
                        up);
    }
}

/* Invalidates all tokens of the guest */
static void async_pf_forget(ARMCPU *cpu)
{
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(CPU(cpu));

    async_pf_set_line(cpu, false);
    cpu->async_pf.wake_all = false;
    if (v) {
        postcopy_async_forget(v);
        postcopy_async_drained();
    }
}

static int64_t async_pf_disable(ARMCPU *cpu)
{
    if (!cpu->async_pf.enabled) {
        return NOT_REQUIRED;
    }
    async_pf_forget(cpu);
    cpu->async_pf.enabled = false;
    return SUCCESS;
}

static unsigned async_pf_id(CPUState *cs)
{
    return cs->cpu_index;
}

static PostcopyAsyncRefusal async_pf_can(CPUState *cs, bool *halt,
                                         bool *around, hwaddr *data)
{
    ARMCPU *cpu = ARM_CPU(cs);
    uint64_t pstate;

    if (cs->singlestep_enabled ||
        kvm_get_one_reg(cs, CORE_REG(regs.pstate), &pstate)) {
        return POSTCOPY_ASYNC_EVENT;
    }
    /* In EL0, PSTATE_M is EL0t also of 32 bits */
    *around = cpu->async_pf.enabled && (pstate & PSTATE_M) != PSTATE_MODE_EL0t;
    if (pstate & PSTATE_I) {
        return POSTCOPY_ASYNC_EVENT;
    }
    *halt = async_pf_can_suspend;
    if (!cpu->async_pf.enabled ||
        !kvm_arm_sdei_is_registered(cpu, MISSING_EVENT)) {
        return POSTCOPY_ASYNC_WITHOUT;
    }
    if (*around) {
        return POSTCOPY_ASYNC_KERNEL;
    }
    if (cpu->async_pf.wake_all) {
        return POSTCOPY_ASYNC_BUSY;
    }
    if (!kvm_arm_sdei_can_take(cpu, MISSING_EVENT)) {
        return POSTCOPY_ASYNC_EVENT;
    }
    *data = cpu->async_pf.block;
    return POSTCOPY_ASYNC_CAN;
}

/* The handler of the last event has read the token that this one overwrites */
static PostcopyAsyncRefusal async_pf_announce(CPUState *cs, uint32_t number)
{
    ARMCPU *cpu = ARM_CPU(cs);
    hwaddr block = cpu->async_pf.block;

    if (!postcopy_async_is_ram(block, BLOCK_SIZE)) {
        /* The block's memory was unplugged, or the stream was wrong */
        async_pf_disable(cpu);
        return POSTCOPY_ASYNC_WITHOUT;
    }
    /* This vCPU is out of KVM_RUN, and no other vCPU uses its block */
    address_space_stl_le(&address_space_memory, block, number,
                         MEMTXATTRS_UNSPECIFIED, NULL);
    return kvm_arm_sdei_take(cpu, MISSING_EVENT) ? POSTCOPY_ASYNC_CAN :
           POSTCOPY_ASYNC_EVENT;
}

/*
 * A reset by another vCPU stops this one.  If that happens between the two
 * ioctls, the guest runs on until QEMU resets it.
 */
static bool async_pf_set_mp_state(CPUState *cs, uint32_t from, uint32_t to)
{
    struct kvm_mp_state state;

    if (kvm_vcpu_ioctl(cs, KVM_GET_MP_STATE, &state) ||
        state.mp_state != from) {
        return false;
    }
    state.mp_state = to;
    return !kvm_vcpu_ioctl(cs, KVM_SET_MP_STATE, &state);
}

static bool async_pf_suspend(CPUState *cs)
{
    ARM_CPU(cs)->async_pf.suspended =
        async_pf_set_mp_state(cs, KVM_MP_STATE_RUNNABLE,
                              KVM_MP_STATE_SUSPENDED);
    return ARM_CPU(cs)->async_pf.suspended;
}

/* Hides the suspension from all but KVM: the guest then exits as before */
void kvm_arm_async_pf_post_run(ARMCPU *cpu)
{
    if (unlikely(cpu->async_pf.suspended)) {
        cpu->async_pf.suspended = false;
        async_pf_set_mp_state(CPU(cpu), KVM_MP_STATE_SUSPENDED,
                              KVM_MP_STATE_RUNNABLE);
    }
}

void kvm_arm_async_pf_pre_run(ARMCPU *cpu)
{
    PostcopyAsyncVCPU *v;

    if (likely(!cpu->async_pf.enabled) || cpu->async_pf.up) {
        return;
    }
    v = postcopy_async_vcpu(CPU(cpu));
    if (cpu->async_pf.wake_all || (v && postcopy_async_pending(v))) {
        async_pf_set_line(cpu, true);
    }
}

static int64_t async_pf_enable(ARMCPU *cpu, uint64_t address)
{
    if (address % BLOCK_SIZE || !postcopy_async_is_ram(address, BLOCK_SIZE)) {
        return INVALID;
    }
    async_pf_forget(cpu);
    cpu->async_pf.enabled = true;
    cpu->async_pf.block = address;
    return SUCCESS;
}

/* Takes one token; kvm_arm_async_pf_pre_run() raises the line for others */
static int64_t async_pf_taken(ARMCPU *cpu, uint64_t *number)
{
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(CPU(cpu));

    async_pf_set_line(cpu, false);
    if (cpu->async_pf.wake_all) {
        cpu->async_pf.wake_all = false;
        *number = ALL_TOKENS;
    } else if (v && cpu->async_pf.enabled && postcopy_async_pending(v)) {
        *number = postcopy_async_next(v);
        postcopy_async_sent(v);
        postcopy_async_taken(v);
        postcopy_async_drained();
    } else {
        *number = 0;
    }
    trace_kvm_arm_async_pf_taken(CPU(cpu)->cpu_index, *number);
    return *number ? SUCCESS : NOT_REQUIRED;
}

void kvm_arm_async_pf_sdei_called(ARMCPU *cpu, const struct kvm_run *run)
{
    uint64_t function = run->hypercall.nr - SDEI_FN_BASE;

    if (function != SDEI_EVENT_UNREGISTER && function != SDEI_PRIVATE_RESET) {
        return;
    }
    if (cpu->async_pf.enabled &&
        !kvm_arm_sdei_is_registered(cpu, MISSING_EVENT)) {
        /* After kexec, for example, the block's memory has another use */
        async_pf_disable(cpu);
    }
}

bool kvm_arm_async_pf_exit(ARMCPU *cpu, const struct kvm_run *run)
{
    CPUState *cs = CPU(cpu);
    uint64_t function = run->hypercall.nr - FN_BASE;
    uint64_t x[2] = { NOT_SUPPORTED };
    int ret;

    if (function >= FN_NUMBER) {
        return false;
    }
    ret = kvm_get_one_reg(cs, CORE_REG(regs.regs[1]), &x[1]);
    trace_kvm_arm_async_pf_call(cs->cpu_index, function, x[1]);
    switch (function) {
    case FN_ENABLE:
        x[0] = async_pf_enable(cpu, x[1]);
        break;
    case FN_DISABLE:
        x[0] = async_pf_disable(cpu);
        break;
    case FN_TAKEN:
        x[0] = async_pf_taken(cpu, &x[1]);
        break;
    }
    ret |= kvm_set_one_reg(cs, CORE_REG(regs.regs[0]), &x[0]) |
           kvm_set_one_reg(cs, CORE_REG(regs.regs[1]), &x[1]);
    /* Every processor has both registers */
    g_assert(!ret);
    return true;
}

static bool async_pf_start(Error **errp)
{
    if (!kvm_irqchip_in_kernel()) {
        error_setg(errp, "the GIC is not in the kernel");
        return false;
    }
    return true;
}

static const PostcopyAsyncOps async_pf_ops = {
    .start = async_pf_start,
    .id = async_pf_id,
    .can = async_pf_can,
    .announce = async_pf_announce,
    .halt = async_pf_suspend,
};

void kvm_arm_async_pf_init(void)
{
    /* Linux 5.19 has this capability since it has KVM_MP_STATE_SUSPENDED */
    async_pf_can_suspend = kvm_check_extension(kvm_state,
                                               KVM_CAP_ARM_SYSTEM_SUSPEND);
    postcopy_async_set_ops(&async_pf_ops);
}

int kvm_arm_async_pf_init_vcpu(ARMCPU *cpu)
{
    int ret;

    if (cpu->kvm_async_pf != ARM_CPU(first_cpu)->kvm_async_pf) {
        error_report("x-kvm-async-pf must be the same for all vCPUs");
        return -EINVAL;
    }
    if (!cpu->kvm_async_pf || CPU(cpu) != first_cpu) {
        return 0;
    }
    if (!kvm_arm_sdei_enabled()) {
        error_report("x-kvm-async-pf=on needs kvm-sdei=on");
        return -EINVAL;
    }
    if (!kvm_irqchip_in_kernel()) {
        error_report("x-kvm-async-pf=on needs a GIC in the kernel: "
                     "-machine kernel-irqchip=on");
        return -EINVAL;
    }
    ret = kvm_arm_forward_calls(FN_BASE, FN_NUMBER);
    if (ret) {
        error_report("x-kvm-async-pf=on: KVM does not hand calls to QEMU: %s",
                     strerror(-ret));
        return ret;
    }
    kvm_arm_sdei_add_event(&(SdeiEvent) { .number = MISSING_EVENT });
    return 0;
}

void kvm_arm_async_pf_describe(void *fdt)
{
    const char *node = "/firmware/async-pf";

    if (!first_cpu || !ARM_CPU(first_cpu)->kvm_async_pf) {
        return;
    }
    qemu_fdt_add_subnode(fdt, node);
    qemu_fdt_setprop_string(fdt, node, "compatible", "qemu,x-kvm-async-pf");
    qemu_fdt_setprop_cell(fdt, node, "function-id", FN_BASE);
    qemu_fdt_setprop_cell(fdt, node, "sdei-event", MISSING_EVENT);
    qemu_fdt_setprop_cells(fdt, node, "interrupts", GIC_FDT_IRQ_TYPE_PPI,
                           INTID_TO_PPI(READY_INTID),
                           GIC_FDT_IRQ_FLAGS_LEVEL_HI);
}

void kvm_arm_async_pf_reset_vcpu(ARMCPU *cpu)
{
    async_pf_forget(cpu);
    cpu->async_pf.enabled = false;
}

/* State */

static bool async_pf_needed(void *opaque)
{
    ARMCPU *cpu = opaque;

    return cpu->async_pf.enabled;
}

static int async_pf_pre_load(void *opaque)
{
    ARMCPU *cpu = opaque;

    if (!cpu->kvm_async_pf) {
        error_report("CPU property x-kvm-async-pf is on on the source: start "
                     "the destination with the same");
        return -EINVAL;
    }
    return 0;
}

/*
 * The stream does not contain the guest's tokens and the state of the PPI.  So
 * the guest is notified to wake all tasks, which fault again on missing pages.
 */
static int async_pf_post_load(void *opaque, int version_id)
{
    ARMCPU *cpu = opaque;

    if (cpu->async_pf.block % BLOCK_SIZE) {
        error_report("x-kvm-async-pf: there is no data block at 0x%" PRIx64,
                     cpu->async_pf.block);
        return -EINVAL;
    }
    cpu->async_pf.enabled = true;
    cpu->async_pf.wake_all = true;
    return 0;
}

const VMStateDescription vmstate_kvm_arm_async_pf = {
    .name = "cpu/x_kvm_async_pf",
    .version_id = 1,
    .minimum_version_id = 1,
    .needed = async_pf_needed,
    .pre_load = async_pf_pre_load,
    .post_load = async_pf_post_load,
    .fields = (const VMStateField[]) {
        VMSTATE_UINT64(async_pf.block, ARMCPU),
        VMSTATE_END_OF_LIST()
    }
};

/* The property */

static bool async_pf_get(Object *obj, Error **errp)
{
    return ARM_CPU(obj)->kvm_async_pf;
}

static void async_pf_set(Object *obj, bool value, Error **errp)
{
    ARM_CPU(obj)->kvm_async_pf = value;
}

void kvm_arm_async_pf_add_properties(ARMCPU *cpu)
{
    Object *obj = OBJECT(cpu);

    object_property_add_bool(obj, "x-kvm-async-pf", async_pf_get, async_pf_set);
    object_property_set_description(obj, "x-kvm-async-pf",
                                    "Set on to notify the guest of "
                                    "missing pages in postcopy; needs "
                                    "kvm-sdei.");
}
