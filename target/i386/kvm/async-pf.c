/*
 * Async page faults that QEMU delivers in KVM's place
 *
 * KVM starts none for memory whose absence makes vCPUs exit.  The guest has
 * seen KVM's in CPUID, and has enabled them by KVM's MSRs.  So QEMU speaks the
 * same protocol (Linux: Documentation/virt/kvm/x86/msr.rst), under KVM's
 * conditions.  With KVM Userfault, KVM can start its own at the same time, for
 * pages that were swapped out: the tokens differ, and the side that finds the
 * slot in use waits for the guest's acknowledgement.
 *
 * Only the vCPU's thread accesses the guest's data block here, while it is out
 * of KVM_RUN.  KVM accesses the block within KVM_RUN, so that both cannot
 * collide, and the block stays at the address in the MSR.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include "qapi/error.h"
#include "exec/address-spaces.h"
#include "exec/memory.h"
#include "hw/i386/apic.h"
#include "hw/i386/apic-msidef.h"
#include "hw/i386/x86.h"
#include "migration/postcopy-async-ops.h"
#include "standard-headers/asm-x86/kvm_para.h"
#include "system/kvm.h"
#include "system/kvm_int.h"
#include "async-pf.h"
#include "kvm_i386.h"
#include "trace.h"

/* The guest's data block */
#define FLAGS_OFFSET 0
#define TOKEN_OFFSET 4
#define DATA_SIZE 8
#define PAGE_NOT_PRESENT 1

#define EN_ADDRESS (~0x3full)

typedef struct Msrs {
    uint64_t en;
    uint64_t vector;
} Msrs;

/* KVM copies these to kvm_run at each exit, which saves two ioctls */
#define SYNC_REGS (KVM_SYNC_X86_SREGS | KVM_SYNC_X86_EVENTS)

/* State of a vCPU, used only by its own thread */
static __thread struct {
    /* can() sets @msrs for announce() */
    Msrs msrs;
    /* announce() sets @announced to a token, or 0, until KVM_RUN returns */
    uint32_t announced;
    /* halt() sets @halted */
    bool halted;
    /* The guest has no tokens but those that QEMU has sent here */
    bool clean;
    /* If @looked: whether the guest had enabled them at the last look */
    bool enabled;
    bool looked;
} async_pf;

static int async_pf_set_msr(CPUState *cs, uint32_t index, uint64_t value)
{
    struct {
        struct kvm_msrs info;
        struct kvm_msr_entry entries[1];
    } msrs = {
        .info.nmsrs = 1,
        .entries[0] = { .index = index, .data = value },
    };

    return kvm_vcpu_ioctl(cs, KVM_SET_MSRS, &msrs);
}

/*
 * Returns false if the guest has not enabled async page faults by interrupt, or
 * has no RAM at the address of its data block, where KVM would refuse them too
 */
static bool async_pf_get_msrs(CPUState *cs, Msrs *m)
{
    const uint64_t wanted = KVM_ASYNC_PF_ENABLED |
                            KVM_ASYNC_PF_DELIVERY_AS_INT;
    struct {
        struct kvm_msrs info;
        struct kvm_msr_entry entries[2];
    } msrs = {
        .info.nmsrs = 2,
        .entries[0].index = MSR_KVM_ASYNC_PF_EN,
        .entries[1].index = MSR_KVM_ASYNC_PF_INT,
    };

    async_pf.enabled = false;
    async_pf.looked = true;
    if (!(X86_CPU(cs)->env.features[FEAT_KVM] & CPUID_KVM_ASYNCPF_INT) ||
        kvm_vcpu_ioctl(cs, KVM_GET_MSRS, &msrs) != 2) {
        return false;
    }
    m->en = msrs.entries[0].data;
    m->vector = msrs.entries[1].data & KVM_ASYNC_PF_VEC_MASK;
    async_pf.enabled = (m->en & wanted) == wanted &&
                       postcopy_async_is_ram(m->en & EN_ADDRESS, DATA_SIZE);
    return async_pf.enabled;
}

static uint32_t async_pf_read_data(const Msrs *m, unsigned offset)
{
    return address_space_ldl_le(&address_space_memory,
                                (m->en & EN_ADDRESS) + offset,
                                MEMTXATTRS_UNSPECIFIED, NULL);
}

static void async_pf_write_data(const Msrs *m, unsigned offset, uint32_t value)
{
    address_space_stl_le(&address_space_memory, (m->en & EN_ADDRESS) + offset,
                         value, MEMTXATTRS_UNSPECIFIED, NULL);
}

static unsigned async_pf_id(CPUState *cs)
{
    return X86_CPU(cs)->apic_id;
}

static bool async_pf_no_event(CPUState *cs)
{
    struct kvm_vcpu_events *events = &cs->kvm_run->s.regs.events;

    return !events->exception.injected && !events->exception.pending &&
           !events->interrupt.injected && !events->interrupt.shadow &&
           !events->nmi.injected && !events->smi.smm &&
           !events->triple_fault.pending;
}

/*
 * Reads the MSRs only if they were never read.  The filter sees each write of
 * the guest, but not an INIT: a stale result only costs time.
 */
static bool async_pf_is_enabled(CPUState *cs)
{
    Msrs m;

    return async_pf.looked ? async_pf.enabled : async_pf_get_msrs(cs, &m);
}

static PostcopyAsyncRefusal async_pf_can(CPUState *cs, bool *halt,
                                         bool *around, hwaddr *data)
{
    struct kvm_run *run = cs->kvm_run;
    struct kvm_sregs *sregs = &run->s.regs.sregs;
    bool nested = run->flags & KVM_RUN_X86_GUEST_MODE;
    bool kernel = !(sregs->cr0 & CR0_PG_MASK) || !sregs->ss.dpl;

    /* The tests need no system call, but for the first look at the MSRs */
    if (run->flags & KVM_RUN_X86_SMM || run->kvm_valid_regs != SYNC_REGS ||
        cs->singlestep_enabled) {
        return POSTCOPY_ASYNC_EVENT;
    }
    *around = kernel && !nested && async_pf_is_enabled(cs);
    if (!async_pf_no_event(cs)) {
        return POSTCOPY_ASYNC_EVENT;
    }
    if (nested) {
        /*
         * Only an exit from the nested guest could notify the hypervisor, and
         * userspace cannot make one.  The interrupts that end the halt are the
         * hypervisor's, whatever if_flag is.
         */
        *halt = true;
        return POSTCOPY_ASYNC_EVENT;
    }
    if (!run->if_flag || !(run->apic_base & MSR_IA32_APICBASE_ENABLE)) {
        return POSTCOPY_ASYNC_EVENT;
    }

    *halt = true;
    /* No guest uses KVM_ASYNC_PF_SEND_ALWAYS: by interrupts, Linux panics */
    if (*around) {
        return POSTCOPY_ASYNC_KERNEL;
    }
    if (kernel || !async_pf_get_msrs(cs, &async_pf.msrs)) {
        return POSTCOPY_ASYNC_WITHOUT;
    }
    *data = async_pf.msrs.en & EN_ADDRESS;
    return POSTCOPY_ASYNC_CAN;
}

static PostcopyAsyncRefusal async_pf_announce(CPUState *cs, uint32_t number)
{
    struct kvm_vcpu_events *events = &cs->kvm_run->s.regs.events;
    Msrs *m = &async_pf.msrs;

    if (async_pf_read_data(m, FLAGS_OFFSET)) {
        return POSTCOPY_ASYNC_BUSY;
    }
    /*
     * The guest may have tokens of another host, or of an earlier data block,
     * maybe with the same numbers.  KVM notifies it to forget them (~0) when it
     * first enters the guest afterwards; once the guest has, the slot is empty.
     */
    if (!async_pf.clean && async_pf_read_data(m, TOKEN_OFFSET)) {
        return POSTCOPY_ASYNC_BUSY;
    }
    async_pf.clean = true;
    async_pf_write_data(m, FLAGS_OFFSET, PAGE_NOT_PRESENT);

    /* The other fields stay, and so do events that other threads inject */
    events->flags = KVM_VCPUEVENT_VALID_PAYLOAD;
    events->exception.pending = 1;
    events->exception.nr = EXCP0E_PAGE;
    events->exception.has_error_code = 1;
    events->exception.error_code = 0;
    events->exception_has_payload = 1;
    events->exception_payload = number;
    if (kvm_vcpu_ioctl(cs, KVM_SET_VCPU_EVENTS, events) < 0) {
        async_pf_write_data(m, FLAGS_OFFSET, 0);
        return POSTCOPY_ASYNC_EVENT;
    }
    async_pf.announced = number;
    return POSTCOPY_ASYNC_CAN;
}

/*
 * KVM_RUN may return before it enters the guest, for example because the page
 * was placed.  The exception is pending then, and must not meet a machine check
 * or another change of the vCPU's state.  The guest faults again on the page.
 */
static void async_pf_withdraw(CPUState *cs)
{
    struct kvm_vcpu_events *events = &cs->kvm_run->s.regs.events;
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(cs);
    uint32_t number = async_pf.announced;

    async_pf.announced = 0;
    if (!v || !events->exception.pending ||
        events->exception.nr != EXCP0E_PAGE ||
        /* The guest's own fault has PFERR_USER, or another address */
        events->exception.error_code || events->exception_payload != number ||
        !postcopy_async_withdraw(v, number)) {
        return;
    }
    trace_kvm_async_pf_withdraw(cs->cpu_index, number);
    events->flags = KVM_VCPUEVENT_VALID_PAYLOAD;
    events->exception.pending = 0;
    events->exception_has_payload = 0;
    kvm_vcpu_ioctl(cs, KVM_SET_VCPU_EVENTS, events);
    async_pf_write_data(&async_pf.msrs, FLAGS_OFFSET, 0);
    postcopy_async_drained();
}

/*
 * A state that KVM only uses for other guests, so that neither QEMU nor KVM
 * mistakes it for a HLT: before that, KVM polls, and it reports a HLT to a
 * guest's hypervisor.  The events that end a HLT end this state.
 */
static bool async_pf_halt_until_kick(CPUState *cs)
{
    struct kvm_mp_state state = { .mp_state = KVM_MP_STATE_AP_RESET_HOLD };

    async_pf.halted = kvm_vcpu_ioctl(cs, KVM_SET_MP_STATE, &state) >= 0;
    return async_pf.halted;
}

/* Hides the halt from all but KVM: the guest then exits as before */
void kvm_async_pf_post_run(CPUState *cs)
{
    struct kvm_mp_state state;

    if (unlikely(async_pf.announced)) {
        async_pf_withdraw(cs);
    }
    if (likely(!async_pf.halted)) {
        return;
    }
    async_pf.halted = false;
    if (kvm_vcpu_ioctl(cs, KVM_GET_MP_STATE, &state) >= 0 &&
        state.mp_state == KVM_MP_STATE_AP_RESET_HOLD) {
        state.mp_state = KVM_MP_STATE_RUNNABLE;
        kvm_vcpu_ioctl(cs, KVM_SET_MP_STATE, &state);
    }
}

static int async_pf_send_interrupt(CPUState *cs, uint8_t vector)
{
    uint32_t id = X86_CPU(cs)->apic_id;
    struct kvm_msi msi = {
        .address_lo = APIC_DEFAULT_ADDRESS |
                      (id & 0xff) << MSI_ADDR_DEST_ID_SHIFT,
        /* KVM takes large IDs in this way: kvm_enable_x2apic() */
        .address_hi = id & ~0xff,
        .data = vector,
    };

    return kvm_vm_ioctl(kvm_state, KVM_SIGNAL_MSI, &msi);
}

void kvm_async_pf_pre_run(CPUState *cs)
{
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(cs);
    uint32_t number;
    Msrs m;
    int ret;

    cs->kvm_run->kvm_valid_regs = v ? SYNC_REGS : 0;
    if (likely(!v) || likely(!postcopy_async_pending(v))) {
        return;
    }
    if (!async_pf_get_msrs(cs, &m)) {
        /* An INIT has reset the MSRs: the filter would have seen a write */
        kvm_async_pf_reset(cs);
        return;
    }
    number = postcopy_async_next(v);
    if (async_pf_read_data(&m, TOKEN_OFFSET)) {
        /* Tried again when the guest acknowledges the token in the slot */
        postcopy_async_slot_busy(v);
        return;
    }
    async_pf_write_data(&m, TOKEN_OFFSET, number);
    ret = async_pf_send_interrupt(cs, m.vector);
    trace_kvm_async_pf_send(cs->cpu_index, number, ret);
    if (ret <= 0) {
        /* The guest has disabled its LAPIC for now */
        async_pf_write_data(&m, TOKEN_OFFSET, 0);
        return;
    }
    postcopy_async_sent(v);
}

/* The guest has taken a token, of QEMU's or of KVM's */
static bool async_pf_write_ack(X86CPU *cpu, uint32_t msr, uint64_t val)
{
    CPUState *cs = CPU(cpu);
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(cs);

    if (async_pf_set_msr(cs, msr, val) != 1) {
        return false;
    }
    if (v && val & 1) {
        postcopy_async_taken(v);
        postcopy_async_drained();
    }
    return true;
}

/* Any write makes the guest's tokens invalid, whether or not KVM accepts it */
static bool async_pf_write_en(X86CPU *cpu, uint32_t msr, uint64_t val)
{
    CPUState *cs = CPU(cpu);

    trace_kvm_async_pf_enable(cs->cpu_index, val);
    kvm_async_pf_reset(cs);
    return async_pf_set_msr(cs, msr, val) == 1;
}

void kvm_async_pf_reset(CPUState *cs)
{
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(cs);

    async_pf.clean = false;
    async_pf.looked = false;
    if (v) {
        postcopy_async_forget(v);
        postcopy_async_drained();
    }
}

void kvm_async_pf_destroy(CPUState *cs)
{
    PostcopyAsyncVCPU *v = postcopy_async_vcpu(cs);

    if (v) {
        postcopy_async_detach(v);
        postcopy_async_drained();
    }
}

static bool async_pf_start(Error **errp)
{
    X86MachineState *x86ms = X86_MACHINE(qdev_get_machine());
    int ret;

    if (!kvm_irqchip_in_kernel()) {
        error_setg(errp, "the LAPIC is not in the kernel");
        return false;
    }
    if (!kvm_has_exception_payload() || !kvm_vm_check_extension(kvm_state,
                                            KVM_CAP_X86_GUEST_MODE) ||
        (kvm_vm_check_extension(kvm_state, KVM_CAP_SYNC_REGS) & SYNC_REGS) !=
        SYNC_REGS) {
        error_setg(errp, "KVM lacks KVM_CAP_EXCEPTION_PAYLOAD, "
                   "KVM_CAP_X86_GUEST_MODE or KVM_CAP_SYNC_REGS");
        return false;
    }
    if (x86ms->apic_id_limit > POSTCOPY_ASYNC_MAX_ID + 1) {
        error_setg(errp, "APIC IDs up to %u", x86ms->apic_id_limit - 1);
        return false;
    }
    ret = kvm_filter_msr_writes(MSR_KVM_ASYNC_PF_EN, async_pf_write_en) ?:
          kvm_filter_msr_writes(MSR_KVM_ASYNC_PF_ACK, async_pf_write_ack);
    if (ret) {
        error_setg_errno(errp, -ret, "KVM does not filter MSRs");
    }
    return !ret;
}

static const PostcopyAsyncOps async_pf_ops = {
    .start = async_pf_start,
    .id = async_pf_id,
    .can = async_pf_can,
    .announce = async_pf_announce,
    .halt = async_pf_halt_until_kick,
};

void kvm_async_pf_init(void)
{
    postcopy_async_set_ops(&async_pf_ops);
}
