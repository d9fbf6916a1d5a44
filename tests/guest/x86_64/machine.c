/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A PC: processors, the TSC's rate, chipset, debug console and fw_cfg. */
#include "touch.h"

#define DEBUGCON        0xe9
#define FW_CFG_SELECT   0x510
#define FW_CFG_DATA     0x511
#define LAPIC_ID        0x20
#define LAPIC_EOI       0xb0
#define LAPIC_SVR       0xf0
#define LAPIC_ICR_LOW   0x300
#define LAPIC_ICR_HIGH  0x310
#define ICR_SMI         0x00004200
#define ICR_INIT_OTHERS 0x000c4500
#define ICR_SIPI_OTHERS 0x000c4600
#define ICR_OTHERS      0x000c4000
#define EXCEPTIONS      32
#define WAKE_VECTOR     32
#define VECTORS         256

extern volatile uint32_t smi_target;
extern const char wake_interrupt[];

static struct gate {
    uint16_t offset_low, selector, flags, offset_mid;
    uint32_t offset_high, reserved;
} idt[VECTORS];

static void exception(void)
{
    die("exception in the guest");
}

/* The handler runs with interrupts off. */
void set_handler(uint8_t vector, const void *handler, bool user)
{
    uintptr_t at = (uintptr_t)handler;

    idt[vector] = (struct gate) {
        .offset_low = at, .offset_mid = at >> 16,
        .selector = 8, .flags = user ? 0xee00 : 0x8e00,     /* interrupt gate */
    };
}

/* Each processor calls this. Interrupts are off outside of barrier(). */
void set_up_interrupts(void)
{
    struct { uint16_t limit; uint64_t base; } __attribute__((packed)) ptr = {
        sizeof(idt) - 1, (uintptr_t)idt,
    };

    for (int i = 0; i < EXCEPTIONS; i++) {
        set_handler(i, exception, false);
    }
    set_handler(WAKE_VECTOR, wake_interrupt, false);
    asm volatile("lidt %0" : : "m"(ptr));
    LAPIC_REG(LAPIC_SVR) = 0x1ff;               /* enable */
    /* Off, as with APICs: the PIC's timer would interrupt indefinitely */
    outb(0x21, 0xff);
    outb(0xa1, 0xff);
}

/*
 * Times 20 ms of the interval timer (1193182 Hz, channel 2), three times.
 * A disturbance makes the time longer, so that the shortest one is right.
 */
uint64_t measure_khz(void)
{
    const uint32_t count = 23864;
    uint64_t best = ~0ull;

    for (int i = 0; i < 3; i++) {
        uint64_t start, took;

        outb(0x61, (inb(0x61) & ~2) | 1);
        outb(0x43, 0xb0);
        outb(0x42, count & 0xff);
        start = ticks();
        outb(0x42, count >> 8);
        do {
            /* microvm lacks port 0x61, which has the output, too */
            outb(0x43, 0xe8);
        } while (!(inb(0x42) & 0x80));
        took = ticks() - start;
        if (took < best) {
            best = took;
        }
    }
    return best / 20;
}

/*
 * Makes KVM forget its mappings of guest memory. KVM does so when a memory slot
 * is deleted: slots change when the chipset is set to read the BIOS segment
 * (0xf0000) from RAM and then from the ROM again.
 */
void drop_mappings(void)
{
    const uint32_t bridge = 0x80000000;     /* PCI 00:00.0 */
    uint32_t reg = 0;                       /* with the segment's attributes */
    uint8_t old;

    outl(0xcf8, bridge);
    switch (inl(0xcfc)) {
    case 0x12378086:                        /* pc */
        reg = 0x59;
        break;
    case 0x29c08086:                        /* q35 */
        reg = 0x90;
        break;
    default:
        die("unknown chipset");
    }
    outl(0xcf8, bridge | (reg & ~3));
    old = inb(0xcfc + (reg & 3));
    outb(0xcfc + (reg & 3), old ^ 0x10);
    outb(0xcfc + (reg & 3), old);
}

void start_cpus(void)
{
    __atomic_store_n(&cpus_started, 1, __ATOMIC_SEQ_CST);
    if (par.cpus == 1) {
        return;
    }
    LAPIC_REG(LAPIC_ICR_HIGH) = 0;
    LAPIC_REG(LAPIC_ICR_LOW) = ICR_INIT_OTHERS;
    delay_ms(10);
    LAPIC_REG(LAPIC_ICR_LOW) = ICR_SIPI_OTHERS | AP_ADDR >> 12;
    wait_for_started();
}

void wake_others(void)
{
    LAPIC_REG(LAPIC_ICR_LOW) = ICR_OTHERS | WAKE_VECTOR;
}

void end_of_interrupt(void)
{
    LAPIC_REG(LAPIC_EOI) = 0;
}

void wait_for_wake(void)
{
    asm volatile("sti; hlt; cli" : : : "memory");
}

/* Makes this processor's SMI handler add one to the word. */
void smi_increment(volatile uint64_t *word)
{
    uint64_t start = ticks();

    smi_target = (uintptr_t)word;
    LAPIC_REG(LAPIC_ICR_HIGH) = LAPIC_REG(LAPIC_ID);
    LAPIC_REG(LAPIC_ICR_LOW) = ICR_SMI;
    while (smi_target) {
        if (ticks() - start > 20000 * khz) {
            die("the SMI did not come: is smm=on?");
        }
        pause();
    }
}

uint8_t side(void)
{
    return inb(DEBUGCON);
}

void write_console(const char *s, size_t size)
{
    asm volatile("rep outsb" : "+S"(s), "+c"(size) : "d"(DEBUGCON) : "memory");
}

void fw_cfg_select(uint16_t key)
{
    outw(FW_CFG_SELECT, key);
}

void fw_cfg_read(void *buffer, size_t size)
{
    asm volatile("rep insb"
                 : "+D"(buffer), "+c"(size) : "d"(FW_CFG_DATA) : "memory");
}
