/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef ARCH_H
#define ARCH_H

#include <stdbool.h>
#include <stdint.h>

#define SIDE_SOURCE 0xe9    /* of side(); other values: the destination */

/* Constant memory, for the check */
#define CONSTANT_REGIONS \
    { "rom", (void *)0xffff0000, (void *)0x100000000 }, \
    { "rom below 1 MiB", (void *)0xf0000, (void *)0x100000 },

/* machine.c: for all processors; user: a task in ring 3 may call it by "int" */
void set_handler(uint8_t vector, const void *handler, bool user);
void end_of_interrupt(void);

#define PORT_ACCESS(suffix, bits) \
    static inline void out##suffix(uint16_t port, uint##bits##_t value) \
    { \
        asm volatile("out" #suffix " %0, %1" : : "a"(value), "Nd"(port)); \
    } \
    static inline uint##bits##_t in##suffix(uint16_t port) \
    { \
        uint##bits##_t value; \
        asm volatile("in" #suffix " %1, %0" : "=a"(value) : "Nd"(port)); \
        return value; \
    }

PORT_ACCESS(b, 8)
PORT_ACCESS(w, 16)
PORT_ACCESS(l, 32)

#define LAPIC_REG(reg) (*(volatile uint32_t *)(uintptr_t)(LAPIC + (reg)))

static inline void pause(void)
{
    asm volatile("pause" : : : "memory");
}

/* Reads the counter after all earlier loads and stores took effect. */
static inline uint64_t ticks(void)
{
    uint32_t lo, hi;
    asm volatile("mfence; lfence; rdtsc; lfence"
                 : "=a"(lo), "=d"(hi) : : "memory");
    return (uint64_t)hi << 32 | lo;
}

static inline _Noreturn void halt(void)
{
    for (;;) {
        asm volatile("cli; hlt");
    }
}

static inline uint64_t rdmsr(uint32_t msr)
{
    uint32_t lo, hi;

    asm volatile("rdmsr" : "=a"(lo), "=d"(hi) : "c"(msr));
    return (uint64_t)hi << 32 | lo;
}

static inline void wrmsr(uint32_t msr, uint64_t value)
{
    asm volatile("wrmsr" : : "c"(msr), "a"((uint32_t)value),
                 "d"((uint32_t)(value >> 32)) : "memory");
}

#endif
