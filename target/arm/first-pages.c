/*
 * Postcopy: pages that an AArch64 vCPU touches first when it resumes
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bitops.h"
#include "cpu.h"
#include "internals.h"
#include "exec/address-spaces.h"
#include "migration/postcopy/first.h"
#ifdef CONFIG_KVM
#include <linux/kvm.h>
#include "system/kvm.h"
#endif

/* The bytes of the stack that are read, from the stack pointer on */
#define STACK_BYTES 512

/* One half of the address space, by fields of TCR_EL1; no levels if disabled */
static PageTables arm_page_tables(uint64_t ttbr, unsigned tsz,
                                  unsigned page_bits, bool off)
{
    PageTables t = {
        .root = ttbr & MAKE_64BIT_MASK(5, 43),
        .va_bits = 64 - tsz,
        .page_bits = page_bits,
        .index_bits = page_bits - 3,
        .entry_size = 8,
        .address_mask = MAKE_64BIT_MASK(page_bits, 48 - page_bits),
        /* An entry with bit 1 clear is a block, not a table */
        .large_mask = 2,
        .large_value = 0,
        .largest = 3,
    };

    if (!off && tsz >= 12 && tsz < 48) {
        t.levels = DIV_ROUND_UP(t.va_bits - page_bits, t.index_bits);
    }
    return t;
}

static void arm_first_virtual(PostcopyFirstPages *to, const PageTables half[2],
                              uint64_t address)
{
    const PageTables *t = &half[extract64(address, 55, 1)];

    if (t->levels) {
        postcopy_first_add_virtual(to, t, address);
    }
}

static void arm_first_steal_time(CPUState *cs, PostcopyFirstPages *to)
{
#ifdef CONFIG_KVM
    uint64_t address = 0;
    struct kvm_device_attr attr = {
        .group = KVM_ARM_VCPU_PVTIME_CTRL,
        .attr = KVM_ARM_VCPU_PVTIME_IPA,
        .addr = (uintptr_t)&address,
    };

    if (kvm_enabled() && !kvm_vcpu_ioctl(cs, KVM_GET_DEVICE_ATTR, &attr)) {
        postcopy_first_add(to, &address_space_memory, address, 1);
    }
#endif
}

void arm_cpu_first_pages(CPUState *cs, PostcopyFirstPages *to)
{
    static const unsigned granule0[] = { 12, 16, 14, 12 };
    static const unsigned granule1[] = { 12, 14, 12, 16 };
    CPUARMState *env = &ARM_CPU(cs)->env;
    uint64_t tcr = env->cp15.tcr_el[1];
    const PageTables half[2] = {
        arm_page_tables(env->cp15.ttbr0_el[1], extract64(tcr, 0, 6),
                        granule0[extract64(tcr, 14, 2)], extract64(tcr, 7, 1)),
        arm_page_tables(env->cp15.ttbr1_el[1], extract64(tcr, 16, 6),
                        granule1[extract64(tcr, 30, 2)], extract64(tcr, 23, 1)),
    };
    uint64_t sp = env->xregs[31], stack[STACK_BYTES / sizeof(uint64_t)];

    arm_first_steal_time(cs, to);
    /* Other translations, such as a nested guest's, are not walked here */
    if (!is_a64(env) || arm_current_el(env) > 1 ||
        !(env->cp15.sctlr_el[1] & SCTLR_M)) {
        return;
    }

    arm_first_virtual(to, half, env->pc);
    arm_first_virtual(to, half, sp);
    arm_first_virtual(to, half, sp - STACK_BYTES);
    /* Pages that the kernel's entry for interrupts touches */
    arm_first_virtual(to, half, env->cp15.vbar_el[1]);
    arm_first_virtual(to, half, env->sp_el[1] - 1);
    arm_first_virtual(to, half, env->sp_el[0]);
    arm_first_virtual(to, half, env->cp15.tpidr_el[1]);

    /* Addresses that the interrupted code may use next, or return to */
    for (unsigned i = 0; i < 31; i++) {
        arm_first_virtual(to, half, env->xregs[i]);
    }
    if (half[extract64(sp, 55, 1)].levels &&
        postcopy_first_read(&half[extract64(sp, 55, 1)], sp, stack,
                            sizeof(stack))) {
        for (unsigned i = 0; i < ARRAY_SIZE(stack); i++) {
            arm_first_virtual(to, half, le64_to_cpu(stack[i]));
        }
    }
}
