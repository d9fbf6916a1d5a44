/*
 * Postcopy: what an x86 vCPU touches first when it runs again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/units.h"
#include "qemu/bitops.h"
#include "cpu.h"
#include "exec/address-spaces.h"
#include "migration/postcopy/first.h"

/* How much of the stack is read, from its top on */
#define STACK_BYTES 512

/*
 * Kernels have their data of each processor from GS's base on, of which these
 * bytes are the most used: Linux's static ones, and Windows' KPCR.
 */
#define PER_CPU_BYTES (256 * KiB)

static PageTables x86_page_tables(CPUX86State *env)
{
    PageTables t = {
        .root = env->cr[3] & MAKE_64BIT_MASK(12, 40),
        .va_bits = 32,
        .page_bits = 12,
        .index_bits = 9,
        .entry_size = 8,
        .address_mask = MAKE_64BIT_MASK(12, 40),
        .large_mask = PG_PSE_MASK,
        .large_value = PG_PSE_MASK,
        .largest = 2,
    };

    if (!(env->cr[0] & CR0_PG_MASK)) {
        return t;
    }
    if (env->hflags & HF_LMA_MASK) {
        t.levels = env->cr[4] & CR4_LA57_MASK ? 5 : 4;
        t.va_bits = 12 + 9 * t.levels;
        t.largest = 3;
    } else if (env->cr[4] & CR4_PAE_MASK) {
        t.levels = 3;
        t.root = env->cr[3] & MAKE_64BIT_MASK(5, 27);
    } else {
        t.levels = 2;
        t.index_bits = 10;
        t.entry_size = 4;
        t.root = env->cr[3] & MAKE_64BIT_MASK(12, 20);
        t.address_mask = MAKE_64BIT_MASK(12, 20);
        t.largest = env->cr[4] & CR4_PSE_MASK ? 2 : 0;
    }
    return t;
}

/* The handlers of interrupts and exceptions: they lie in a few pages */
static void x86_first_handlers(CPUState *cs, PostcopyFirstPages *to,
                               const PageTables *t)
{
    CPUX86State *env = &X86_CPU(cs)->env;
    unsigned size = env->hflags & HF_LMA_MASK ? 16 : 8;
    uint8_t gates[256 * 16] = { };
    size_t length = MIN(MIN((uint64_t)env->idt.limit + 1, 256 * size),
                        sizeof(gates));
    uint64_t last = -1;

    if (!(env->cr[0] & CR0_PE_MASK) ||
        cpu_memory_rw_debug(cs, env->idt.base, gates, length, false)) {
        return;
    }
    for (size_t at = 0; at + size <= length; at += size) {
        uint64_t handler = lduw_le_p(gates + at) |
                           (uint64_t)lduw_le_p(gates + at + 6) << 16;

        if (size == 16) {
            handler |= (uint64_t)ldl_le_p(gates + at + 8) << 32;
        }
        if (lduw_le_p(gates + at + 4) & 0x8000 &&
            handler >> TARGET_PAGE_BITS != last) {
            last = handler >> TARGET_PAGE_BITS;
            postcopy_first_add_virtual(to, t, handler);
        }
    }
}

void x86_cpu_first_pages(CPUState *cs, PostcopyFirstPages *to)
{
    CPUX86State *env = &X86_CPU(cs)->env;
    const uint64_t shared[] = {
        env->system_time_msr, env->steal_time_msr, env->async_pf_en_msr,
        env->pv_eoi_en_msr, env->msr_hv_vapic, env->msr_hv_tsc,
        env->msr_hv_synic_msg_page, env->msr_hv_synic_evt_page,
    };
    PageTables t = x86_page_tables(env);
    uint64_t rsp = env->segs[R_SS].base + env->regs[R_ESP];
    uint64_t stack[STACK_BYTES / sizeof(uint64_t)];
    uint8_t rsp0[8] = { };

    /* Pages that the hypervisor writes, if bit 0 of their MSR is set */
    for (size_t i = 0; i < ARRAY_SIZE(shared); i++) {
        if (shared[i] & 1) {
            postcopy_first_add(to, &address_space_memory, shared[i] & ~3ull, 1);
        }
    }
    /* Of a nested guest's addresses, and SMM's, nothing is known here */
    if (env->hflags & (HF_GUEST_MASK | HF_SMM_MASK)) {
        return;
    }

    postcopy_first_add_virtual(to, &t, env->segs[R_CS].base + env->eip);
    postcopy_first_add_virtual(to, &t, rsp);
    postcopy_first_add_virtual(to, &t, rsp - STACK_BYTES);

    /* An interrupt's way into the kernel */
    postcopy_first_add_virtual(to, &t, env->idt.base);
    postcopy_first_add_virtual(to, &t, env->idt.base + env->idt.limit);
    postcopy_first_add_virtual(to, &t, env->gdt.base);
    postcopy_first_add_virtual(to, &t, env->tr.base);
    if (!cpu_memory_rw_debug(cs, env->tr.base + 4, rsp0,
                             env->hflags & HF_LMA_MASK ? 8 : 4, false)) {
        postcopy_first_add_virtual(to, &t, ldq_le_p(rsp0) - 1);
    }
    x86_first_handlers(cs, to, &t);
#ifdef TARGET_X86_64
    if (env->hflags & HF_LMA_MASK) {
        uint64_t per_cpu = (env->hflags & HF_CPL_MASK) ? env->kernelgsbase
                                                       : env->segs[R_GS].base;

        for (uint64_t at = 0; at < PER_CPU_BYTES; at += TARGET_PAGE_SIZE) {
            postcopy_first_add_virtual(to, &t, per_cpu + at);
        }
        postcopy_first_add_virtual(to, &t, env->lstar);
    }
#endif
    postcopy_first_add_virtual(to, &t, env->segs[R_FS].base);

    /* What the interrupted code was about to use, and to return to, maybe */
    for (unsigned i = 0; i < CPU_NB_REGS; i++) {
        postcopy_first_add_virtual(to, &t, env->regs[i]);
    }
    if (env->hflags & HF_LMA_MASK &&
        !cpu_memory_rw_debug(cs, rsp, stack, sizeof(stack), false)) {
        for (unsigned i = 0; i < ARRAY_SIZE(stack); i++) {
            postcopy_first_add_virtual(to, &t, le64_to_cpu(stack[i]));
        }
    }
}
