/* SPDX-License-Identifier: GPL-2.0-or-later */
/* QEMU's machine virt: processors, GICv3, PL011 and fw_cfg. */
#include "touch.h"

#define SIDE_FILE       "opt/side"

#define GICD_CTLR       0x0
#define GICD_ENABLE     0x12            /* affinity routing, group 1 */
#define GICR_SIZE       0x20000         /* registers of one processor */
#define GICR_WAKER      0x14
#define WAKER_SLEEP     0x2
#define WAKER_ASLEEP    0x4
#define GICR_IGROUPR0   0x10080
#define GICR_ISENABLER0 0x10100
#define ICC_PMR         s3_0_c4_c6_0
#define ICC_SGI1R       s3_0_c12_c11_5
#define ICC_IAR1        s3_0_c12_c12_0
#define ICC_EOIR1       s3_0_c12_c12_1
#define ICC_SRE         s3_0_c12_c12_5
#define ICC_IGRPEN1     s3_0_c12_c12_7
#define SGI_OTHERS      (1ull << 40)    /* interrupt 0 */

#define UART_DR         0x0
#define UART_CR         0x30
#define UART_ON         0x101           /* only the transmitter */

#define FW_CFG_DATA     0x0
#define FW_CFG_SELECT   0x8

void (*timer_expired)(uint32_t cpu, uint32_t interrupt);

/*
 * Accesses to devices must be plain instructions for KVM, not those with which
 * a compiler advances a pointer.
 */
#define load(instruction, address) ({ \
    uint32_t value_; \
    asm volatile(instruction " %w0, [%1]" \
                 : "=r"(value_) : "r"((uintptr_t)(address)) : "memory"); \
    value_; \
})

#define store(instruction, address, value) \
    asm volatile(instruction " %w0, [%1]" \
                 : : "rZ"((uint32_t)(value)), "r"((uintptr_t)(address)) \
                 : "memory")

/* QEMU numbers processors by clusters of 16. */
uint64_t affinity(uint32_t cpu)
{
    return (cpu / 16) << 8 | cpu % 16;
}

uint32_t this_cpu(void)
{
    uint64_t mpidr = read_sysreg(mpidr_el1);

    return (mpidr >> 8 & 0xff) * 16 + (mpidr & 0xff);
}

_Noreturn void exception(void)
{
    report("'exception', 'esr': '%x', 'elr': '%x', 'far': '%x'",
           read_sysreg(esr_el1), read_sysreg(elr_el1), read_sysreg(far_el1));
    die("exception in the guest");
}

/* boot.S calls this. */
void interrupt(void)
{
    uint32_t number = read_sysreg(ICC_IAR1);

    if (timer_expired && (number == VIRTUAL_TIMER || number == PHYSICAL_TIMER)) {
        timer_expired(this_cpu(), number);
    }
    if (number < 1020) {                /* not spurious */
        write_sysreg(ICC_EOIR1, number);
        isb();
    }
}

/* Called by every processor. Interrupts are off outside of wait_for_wake(). */
void set_up_interrupts(void)
{
    uint32_t cpu = this_cpu();
    uintptr_t gicr = GICR + cpu * GICR_SIZE;

    if (cpu == 0) {
        store("str", UART + UART_CR, UART_ON);
        store("str", GICD + GICD_CTLR, GICD_ENABLE);
    }
    store("str", gicr + GICR_WAKER,
          load("ldr", gicr + GICR_WAKER) & ~WAKER_SLEEP);
    while (load("ldr", gicr + GICR_WAKER) & WAKER_ASLEEP) {
    }
    store("str", gicr + GICR_IGROUPR0, ~0);
    store("str", gicr + GICR_ISENABLER0,
          1 | 1u << VIRTUAL_TIMER | 1u << PHYSICAL_TIMER);
    write_sysreg(ICC_SRE, 7);
    isb();
    write_sysreg(ICC_PMR, 0xff);
    write_sysreg(ICC_IGRPEN1, 1);
    isb();
}

void wake_others(void)
{
    asm volatile("dsb ish" : : : "memory");
    write_sysreg(ICC_SGI1R, SGI_OTHERS);
    isb();
}

/* A pending interrupt ends the wait, too. */
void wait_for_wake(void)
{
    asm volatile("dsb ish; wfi; msr daifclr, #2; isb; msr daifset, #2"
                 : : : "memory");
}

/* A call of PSCI or SDEI */
int64_t call(uint32_t function, uint64_t a, uint64_t b, uint64_t c, uint64_t d,
             uint64_t e)
{
    register uint64_t x0 asm("x0") = function;
    register uint64_t x1 asm("x1") = a;
    register uint64_t x2 asm("x2") = b;
    register uint64_t x3 asm("x3") = c;
    register uint64_t x4 asm("x4") = d;
    register uint64_t x5 asm("x5") = e;

    asm volatile("hvc #0" : "+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3), "+r"(x4),
                 "+r"(x5)
                 : : "memory", "x6", "x7", "x8", "x9", "x10", "x11", "x12",
                 "x13", "x14", "x15", "x16", "x17");
    return x0;
}

void start_cpus(void)
{
    for (uint32_t cpu = 1; cpu < par.cpus; cpu++) {
        /* The entry point is in the ROM, at address 0 */
        if (call(PSCI_CPU_ON, affinity(cpu), 0, cpu, 0, 0)) {
            die("PSCI refuses to turn on a processor");
        }
    }
    wait_for_started();
}

_Noreturn void power_off(void)
{
    call(PSCI_OFF, 0, 0, 0, 0, 0);
    die("PSCI does not turn the machine off");
}

uint64_t measure_khz(void)
{
    return read_sysreg(cntfrq_el0) / 1000;
}

/* A guest of this machine cannot make KVM forget mappings of RAM. */
void drop_mappings(void)
{
}

void smi_increment(volatile uint64_t *word)
{
    die("this processor has no SMM");
}

/* Reads QEMU's file for it; another processor meanwhile gets the last value. */
uint8_t side(void)
{
    static uint16_t key;
    static uint8_t last = SIDE_SOURCE;
    static bool busy;       /* protects @key, and the device's state */

    if (!__atomic_exchange_n(&busy, true, __ATOMIC_ACQUIRE)) {
        uint32_t size;

        if (!key) {
            key = fw_cfg_file(SIDE_FILE, &size);
        }
        fw_cfg_select(key);
        fw_cfg_read(&last, 1);
        __atomic_store_n(&busy, false, __ATOMIC_RELEASE);
    }
    return __atomic_load_n(&last, __ATOMIC_SEQ_CST);
}

void write_console(const char *s, size_t size)
{
    while (size--) {
        store("str", UART + UART_DR, (uint8_t)*s++);
    }
}

void fw_cfg_select(uint16_t key)
{
    store("strh", FW_CFG + FW_CFG_SELECT, __builtin_bswap16(key));
}

void fw_cfg_read(void *buffer, size_t size)
{
    for (uint8_t *to = buffer; size--; to++) {
        *to = load("ldrb", FW_CFG + FW_CFG_DATA);
    }
}
