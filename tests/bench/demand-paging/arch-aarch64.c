/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <asm/kvm.h>
#include <sys/ioctl.h>

#include "arch.h"
#include "fail.h"

#define DONE_ADDRESS 0x8000ul           /* has no memory: to write there leaves KVM */

/* X0 address, X1 stride, X2 count, X3 samples, X4 DONE_ADDRESS; the byte 0x5a is TOUCHED. */
asm(".pushsection .rodata\n"
    ".balign 4\n"
    ".globl guest_program, guest_program_end\n"
    "guest_program:\n"
    "    mov w5, #0x5a\n"
    "1:  isb\n"
    "    mrs x6, cntvct_el0\n"
    "    strb w5, [x0]\n"
    "    isb\n"
    "    mrs x7, cntvct_el0\n"
    "    sub x7, x7, x6\n"
    "    str x7, [x3], #8\n"
    "    add x0, x0, x1\n"
    "    subs x2, x2, #1\n"
    "    b.ne 1b\n"
    "    str w5, [x4]\n"
    "2:  b 2b\n"
    "guest_program_end:\n"
    ".popsection\n");

/* With four-KiB granules and addresses of 39 bits, the first table has blocks of 1 GiB. */
void arch_make_tables(void *tables, uint64_t gpa)
{
    enum { BLOCK = 1, INNER_SHAREABLE = 3 << 8, ACCESSED = 1 << 10 };
    uint64_t *entries = tables;

    (void)gpa;
    for (uint64_t i = 0; i < 512; i++) {
        entries[i] = i << 30 | BLOCK | INNER_SHAREABLE | ACCESSED;
    }
}

static void set_register(int vcpu, uint64_t id, uint64_t value)
{
    struct kvm_one_reg reg = { .id = id, .addr = (uintptr_t)&value };

    if (ioctl(vcpu, KVM_SET_ONE_REG, &reg)) {
        fail("register %#llx of a vCPU: %m", (unsigned long long)id);
    }
}

#define CORE(name) (KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE | KVM_REG_ARM_CORE_REG(name))
#define SCTLR_EL1 ARM64_SYS_REG(3, 0, 1, 0, 0)
#define TTBR0_EL1 ARM64_SYS_REG(3, 0, 2, 0, 0)
#define TCR_EL1 ARM64_SYS_REG(3, 0, 2, 0, 2)
#define MAIR_EL1 ARM64_SYS_REG(3, 0, 10, 2, 0)

void arch_start_vcpu(int kvm, int vm, int vcpu, uint64_t program, uint64_t tables, const struct guest_job *job)
{
    /* Write-back, inner shareable, no TTBR1, physical addresses of 40 bits. */
    uint64_t tcr = 25 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2ull << 32;
    uint64_t sctlr = 0x30d00800 | 1 << 0 | 1 << 2 | 1 << 12;    /* RES1; MMU, caches */
    uint64_t pstate = 0x3c5;                                    /* EL1h, all masked */
    struct kvm_vcpu_init init;

    (void)kvm;
    if (ioctl(vm, KVM_ARM_PREFERRED_TARGET, &init) || ioctl(vcpu, KVM_ARM_VCPU_INIT, &init)) {
        fail("KVM_ARM_VCPU_INIT: %m");
    }
    set_register(vcpu, MAIR_EL1, 0xff);
    set_register(vcpu, TCR_EL1, tcr);
    set_register(vcpu, TTBR0_EL1, tables);
    set_register(vcpu, SCTLR_EL1, sctlr);
    set_register(vcpu, CORE(regs.pc), program);
    set_register(vcpu, CORE(regs.pstate), pstate);
    set_register(vcpu, CORE(regs.regs[0]), job->address);
    set_register(vcpu, CORE(regs.regs[1]), job->stride);
    set_register(vcpu, CORE(regs.regs[2]), job->count);
    set_register(vcpu, CORE(regs.regs[3]), job->samples);
    set_register(vcpu, CORE(regs.regs[4]), DONE_ADDRESS);
}

bool arch_is_done(const struct kvm_run *run)
{
    return run->exit_reason == KVM_EXIT_MMIO && run->mmio.phys_addr == DONE_ADDRESS;
}

double arch_ticks_per_us(int vcpu)
{
    uint64_t hz;

    (void)vcpu;
    asm volatile("mrs %0, cntfrq_el0" : "=r" (hz));
    return hz / 1e6;
}
