/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest with a nested guest, by AMD's SVM with nested paging. When it has
 * moved, the nested guest touches the last page of those of pages.h before the
 * guest's processors touch them all.
 */
#define PAGES           0x1000000ull
#include "async.h"
#include "pages.h"

#define MSR_EFER        0xc0000080
#define MSR_HSAVE       0xc0010117
#define EFER_SVME       0x1000
#define EXIT_VMMCALL    0x81

static uint8_t vmcb[4096] __attribute__((aligned(4096)));
static uint8_t host_save[4096] __attribute__((aligned(4096)));
static uint8_t nested_stack[4096] __attribute__((aligned(4096)));
/* Identity map of 1 GiB */
static uint64_t npt[3][512] __attribute__((aligned(4096)));
extern const char wake_interrupt[];
static struct async_data async_data __attribute__((aligned(64)));

#define FIELD(bits, at) (*(uint##bits##_t *)(vmcb + (at)))

static void put_segment(unsigned at, uint16_t selector, uint16_t attributes)
{
    FIELD(16, at) = selector;
    FIELD(16, at + 2) = attributes;
    FIELD(32, at + 4) = 0xffffffff;
}

static void put_table(unsigned at, const void *descriptor)
{
    FIELD(32, at + 4) = *(const uint16_t *)descriptor;
    FIELD(64, at + 8) = *(const uint64_t *)((const uint8_t *)descriptor + 2);
}

/* AMD64 Architecture Programmer's Manual, volume 2, appendix B */
static void set_up_nested(void)
{
    uint8_t gdt[10], idt[10];
    uint64_t cr0, cr3, cr4;

    asm volatile("mov %%cr0, %0; mov %%cr3, %1; mov %%cr4, %2"
                 : "=r"(cr0), "=r"(cr3), "=r"(cr4));
    asm volatile("sgdt %0; sidt %1" : "=m"(gdt), "=m"(idt));
    wrmsr(MSR_EFER, rdmsr(MSR_EFER) | EFER_SVME);
    wrmsr(MSR_HSAVE, (uintptr_t)host_save);

    npt[0][0] = (uintptr_t)npt[1] | 7;
    npt[1][0] = (uintptr_t)npt[2] | 7;
    for (uint64_t i = 0; i < 512; i++) {
        npt[2][i] = i << 21 | 0x87;
    }

    FIELD(32, 0x008) = 0xffffffff;      /* leave by exceptions, */
    FIELD(32, 0x00c) = 1u << 31;        /* shutdown, */
    FIELD(32, 0x010) = 3;               /* VMRUN, VMMCALL */
    FIELD(32, 0x058) = 1;               /* ASID */
    FIELD(64, 0x090) = 1;               /* nested paging */
    FIELD(64, 0x0b0) = (uintptr_t)npt[0];
    asm volatile("vmsave %%rax" : : "a"(vmcb) : "memory");
    put_segment(0x400, 16, 0xc93);      /* ES */
    put_segment(0x410, 8, 0xa9b);       /* CS */
    put_segment(0x420, 16, 0xc93);      /* SS */
    put_segment(0x430, 16, 0xc93);      /* DS */
    put_table(0x460, gdt);
    put_table(0x480, idt);
    FIELD(64, 0x4d0) = rdmsr(MSR_EFER);
    FIELD(64, 0x548) = cr4;
    FIELD(64, 0x550) = cr3;
    FIELD(64, 0x558) = cr0;
    FIELD(64, 0x560) = 0x400;           /* DR7 */
    FIELD(64, 0x568) = 0xffff0ff0;      /* DR6 */
    FIELD(64, 0x570) = 2;               /* RFLAGS */
    FIELD(64, 0x5d8) = (uintptr_t)nested_stack + sizeof(nested_stack);
    FIELD(64, 0x668) = 0x0007040600070406;  /* PAT */
}

/* The nested guest's code: adds one to the word at RDI. */
extern const char nested_code[];
asm("nested_code: lock incq (%rdi)\n"
    "vmmcall\n");

/* Lets it add one to a word that is 0; only the nested guest touches it. */
static void nested_increment(volatile uint64_t *word)
{
    uint64_t exit;

    FIELD(64, 0x578) = (uintptr_t)nested_code;  /* RIP */
    asm volatile("push %%rbp; clgi; vmload %%rax; vmrun %%rax; vmsave %%rax; "
                 "stgi; pop %%rbp"
                 : : "a"(vmcb), "D"(word)
                 : "rbx", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11",
                   "r12", "r13", "r14", "r15", "cc", "memory");
    exit = FIELD(64, 0x070);
    if (exit != EXIT_VMMCALL) {
        report("'exit', 'code': '%x'", exit);
        die("the nested guest left by something else than VMMCALL");
    }
    if (*word != 1) {
        die("the nested guest has not written");
    }
}

void run_payload(uint32_t cpu)
{
    uint64_t last = number_of_pages() - 1;

    if (cpu == 0) {
        set_up_nested();
        page(0)[0] = 0;
        nested_increment(page(0));
        start_cpus();
    }
    write_until_moved(cpu);
    if (cpu == 0) {
        if (par.async & ASYNC_NESTED) {
            /* KVM interrupts to wake all waiting tasks: there are none */
            set_handler(ASYNC_VECTOR, wake_interrupt, false);
            async_enable(&async_data);
        }
        nested_increment(page(last) + 2);
        if (par.async & ASYNC_NESTED) {
            wrmsr(MSR_ASYNC_PF_EN, 0);
        }
        report("'timing'");
    }
    touch_downwards(cpu);
}
