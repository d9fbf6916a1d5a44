/*
 * Postcopy: pages that an x86 vCPU touches first when it resumes
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/units.h"
#include "qemu/bitops.h"
#include "cpu.h"
#include "exec/address-spaces.h"
#include "migration/postcopy/first.h"

/* The bytes of the stack that are read, from the stack pointer on */
#define STACK_BYTES 512

/*
 * Kernels have per-processor data from GS's base on.  These bytes are the most
 * used: Linux's static per-CPU data, and Windows' KPCR.
 */
#define PER_CPU_BYTES (256 * KiB)

/*
 * Limits, since a guest can have any number of them: how deep calls are
 * followed; how many functions and data; how many bytes of a function are read,
 * and how far from it a callee or its data may be
 */
#define CALLS_DEPTH     4
#define CALLS_MOST      1024
#define NAMES_MOST      4096
#define FUNCTION_BYTES  1024
#define FUNCTION_ALIGN  16
#define IMAGE_BYTES     (64 * MiB)

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

/* Call @found for each handler of interrupts and exceptions */
static void x86_handlers(CPUX86State *env, const PageTables *t,
                         void (*found)(void *opaque, vaddr at), void *opaque)
{
    unsigned size = env->hflags & HF_LMA_MASK ? 16 : 8;
    uint8_t gates[256 * 16] = { };
    size_t length = MIN(MIN((uint64_t)env->idt.limit + 1, 256 * size),
                        sizeof(gates));

    if (!(env->cr[0] & CR0_PE_MASK) ||
        !postcopy_first_read(t, env->idt.base, gates, length)) {
        return;
    }
    for (size_t at = 0; at + size <= length; at += size) {
        uint64_t handler = lduw_le_p(gates + at) |
                           (uint64_t)lduw_le_p(gates + at + 6) << 16;

        if (size == 16) {
            handler |= (uint64_t)ldl_le_p(gates + at + 8) << 32;
        }
        if (lduw_le_p(gates + at + 4) & 0x8000) {
            found(opaque, handler);
        }
    }
}

#ifdef TARGET_X86_64
/* @functions, each once; the first @read of them have been read */
typedef struct Calls {
    GHashTable *seen;
    GArray *functions;
    guint read;
    /* How many addresses of data they contain */
    unsigned names;
    PostcopyFirstPages *to;
    const PageTables *tables;
} Calls;

static void calls_add(void *opaque, vaddr function)
{
    Calls *calls = opaque;

    if (calls->functions->len < CALLS_MOST &&
        g_hash_table_add(calls->seen, (void *)(uintptr_t)function)) {
        g_array_append_val(calls->functions, function);
    }
}

static bool in_image(vaddr function, vaddr target)
{
    return target - function + IMAGE_BYTES < 2 * IMAGE_BYTES;
}

static void calls_name(Calls *calls, vaddr function, vaddr data)
{
    if (in_image(function, data) && calls->names++ < NAMES_MOST) {
        postcopy_first_add_virtual(calls->to, calls->tables, data);
    }
}

/*
 * Adds callees of @function and its data, by the bytes of its code.  Some bytes
 * only look like such an instruction: then a page is sent early in vain.
 */
static void calls_read(Calls *calls, vaddr function)
{
    uint8_t code[FUNCTION_BYTES];

    if (!postcopy_first_read(calls->tables, function, code, sizeof(code))) {
        return;
    }
    for (unsigned i = 1; i + 8 <= sizeof(code); i++) {
        vaddr relative = function + i + 5 +
                         (int32_t)ldl_le_p(code + i + 1);

        /* A word of padding between two functions */
        if (ldl_le_p(code + i) == 0xcccccccc ||
            ldq_le_p(code + i) == 0x9090909090909090) {
            break;
        }
        if ((code[i] & 0xfe) == 0xe8) {
            /* CALL and JMP */
            if (in_image(function, relative) &&
                relative % FUNCTION_ALIGN == 0) {
                calls_add(calls, relative);
            }
        } else if ((code[i] & 0xc7) == 5 &&
                   (code[i - 1] == 0x8b || code[i - 1] == 0x89 ||
                    code[i - 1] == 0x8d)) {
            /* MOV and LEA with an address relative to RIP */
            calls_name(calls, function, relative);
        } else if ((code[i - 1] & 0xc7) == 4 && (code[i] & 0xc7) == 0xc5) {
            /* MOV and LEA with a base of 32 bits and an index of 8 bytes */
            calls_name(calls, function, (int32_t)ldl_le_p(code + i + 1));
        }
    }
}

/* A vCPU whose page tables map the whole kernel, if there is one */
static CPUX86State *x86_kernel_state(void)
{
    CPUX86State *found = NULL;
    CPUState *cs;

    CPU_FOREACH(cs) {
        CPUX86State *env = &X86_CPU(cs)->env;

        if (env->hflags & HF_LMA_MASK &&
            !(env->hflags & (HF_GUEST_MASK | HF_SMM_MASK))) {
            found = env;
            /* In ring 3, page tables may map less of the kernel */
            if (!(env->hflags & HF_CPL_MASK)) {
                break;
            }
        }
    }
    return found;
}

/*
 * The code of all interrupt handlers, and its data.  They are scattered over
 * some 180 pages of a guest's kernel, and the vCPU that serves an interrupt
 * first would miss a page every few calls, with interrupts off.
 */
static void x86_first_code(PostcopyFirstPages *to)
{
    CPUX86State *env = x86_kernel_state();
    g_autoptr(GHashTable) seen = g_hash_table_new(NULL, NULL);
    g_autoptr(GArray) functions = g_array_new(false, false, sizeof(vaddr));
    PageTables t;
    Calls calls = {
        .seen = seen, .functions = functions, .to = to, .tables = &t
    };

    if (!env) {
        return;
    }
    t = x86_page_tables(env);
    x86_handlers(env, &t, calls_add, &calls);
    for (unsigned depth = 0; depth <= CALLS_DEPTH; depth++) {
        for (guint n = functions->len; calls.read < n; calls.read++) {
            vaddr function = g_array_index(functions, vaddr, calls.read);

            postcopy_first_add_virtual(to, &t, function);
            if (depth < CALLS_DEPTH) {
                calls_read(&calls, function);
            }
        }
    }
}

static void x86_first_register(void)
{
    postcopy_first_shared(x86_first_code);
}

type_init(x86_first_register)
#endif

typedef struct FirstHandler {
    PostcopyFirstPages *to;
    const PageTables *tables;
    uint64_t last;
} FirstHandler;

/* Handlers lie in a few pages: adds each page once */
static void first_add_handler(void *opaque, vaddr at)
{
    FirstHandler *first = opaque;

    if (at >> TARGET_PAGE_BITS != first->last) {
        first->last = at >> TARGET_PAGE_BITS;
        postcopy_first_add_virtual(first->to, first->tables, at);
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
    /* A nested guest's addresses, and SMM's, are not translated here */
    if (env->hflags & (HF_GUEST_MASK | HF_SMM_MASK)) {
        return;
    }

    postcopy_first_add_virtual(to, &t, env->segs[R_CS].base + env->eip);
    postcopy_first_add_virtual(to, &t, rsp);
    postcopy_first_add_virtual(to, &t, rsp - STACK_BYTES);

    /* Pages that the kernel's entry for interrupts touches */
    postcopy_first_add_virtual(to, &t, env->idt.base);
    postcopy_first_add_virtual(to, &t, env->idt.base + env->idt.limit);
    postcopy_first_add_virtual(to, &t, env->gdt.base);
    postcopy_first_add_virtual(to, &t, env->tr.base);
    if (postcopy_first_read(&t, env->tr.base + 4, rsp0,
                            env->hflags & HF_LMA_MASK ? 8 : 4)) {
        postcopy_first_add_virtual(to, &t, ldq_le_p(rsp0) - 1);
    }
    x86_handlers(env, &t, first_add_handler, &(FirstHandler) { to, &t, -1 });
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

    /* Addresses that the interrupted code may use next, or return to */
    for (unsigned i = 0; i < CPU_NB_REGS; i++) {
        postcopy_first_add_virtual(to, &t, env->regs[i]);
    }
    if (env->hflags & HF_LMA_MASK &&
        postcopy_first_read(&t, rsp, stack, sizeof(stack))) {
        for (unsigned i = 0; i < ARRAY_SIZE(stack); i++) {
            postcopy_first_add_virtual(to, &t, le64_to_cpu(stack[i]));
        }
    }
}
