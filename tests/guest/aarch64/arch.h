/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef ARCH_H
#define ARCH_H

#include <stdint.h>

#define SIDE_SOURCE 's'     /* of side(); other values: the destination */

/* Constant memory, for the check; without page 0 */
#define CONSTANT_REGIONS \
    { "rom", (void *)0x1000, (void *)ROM_SIZE },

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

#define read_sysreg(name) ({ \
    uint64_t value_; \
    asm volatile("mrs %0, " TEXT(name) : "=r"(value_) : : "memory"); \
    value_; \
})

#define write_sysreg(name, value) \
    asm volatile("msr " TEXT(name) ", %x0" \
                 : : "rZ"((uint64_t)(value)) : "memory")

static inline void isb(void)
{
    asm volatile("isb" : : : "memory");
}

static inline void pause(void)
{
    asm volatile("yield" : : : "memory");
}

/* Reads the counter after all earlier loads and stores took effect. */
static inline uint64_t ticks(void)
{
    uint64_t now;

    asm volatile("dsb ish; isb; mrs %0, cntvct_el0; isb"
                 : "=r"(now) : : "memory");
    return now;
}

static inline _Noreturn void halt(void)
{
    for (;;) {
        asm volatile("wfi");
    }
}

/* machine.c calls this function, if it is set, at an interrupt of a timer */
#define VIRTUAL_TIMER   27
#define PHYSICAL_TIMER  30
extern void (*timer_expired)(uint32_t cpu, uint32_t interrupt);
_Noreturn void power_off(void);
uint64_t affinity(uint32_t cpu);
uint32_t this_cpu(void);

#define PSCI_CPU_OFF        0x84000002
#define PSCI_OFF            0x84000008
#define PSCI_CPU_ON         0xc4000003
#define PSCI_AFFINITY_INFO  0xc4000004
int64_t call(uint32_t function, uint64_t a, uint64_t b, uint64_t c, uint64_t d,
             uint64_t e);

#endif
