/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef TOUCH_H
#define TOUCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "layout.h"

#define PAGE_WORDS  512
#define PAGE_SHIFT  12
/* Of touches by their ticks: eight for each power of two */
#define BUCKETS     512

enum pattern { DISJOINT, SHARED, SAMEHUGE, ZEROWRITE, SMM, PATTERNS };

/* io.c: ports, debug console, fw_cfg */
static inline void outb(uint16_t port, uint8_t value)
{
    asm volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline uint8_t inb(uint16_t port)
{
    uint8_t value;
    asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static inline void outw(uint16_t port, uint16_t value)
{
    asm volatile("outw %0, %1" : : "a"(value), "Nd"(port));
}

static inline void outl(uint16_t port, uint32_t value)
{
    asm volatile("outl %0, %1" : : "a"(value), "Nd"(port));
}

static inline uint32_t inl(uint16_t port)
{
    uint32_t value;
    asm volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static inline void pause(void)
{
    asm volatile("pause" : : : "memory");
}

/* Reads the counter after all earlier loads and stores took effect. */
static inline uint64_t tsc(void)
{
    uint32_t lo, hi;
    asm volatile("mfence; lfence; rdtsc; lfence"
                 : "=a"(lo), "=d"(hi) : : "memory");
    return (uint64_t)hi << 32 | lo;
}

void print(const char *format, ...);        /* %s %u (64 bit) %x (64 bit) */
_Noreturn void die(const char *message);
void read_parameters(void);
bool on_destination(void);

struct parameters {
    uint64_t ram_bytes;
    uint32_t cpus;
    enum pattern pattern;
    uint64_t seed;
    uint32_t mem_mb;            /* under test; 0: all that is left */
    uint32_t zero_percent;      /* pages that stay zero on the source */
    uint32_t passes;            /* of load before the check; 0: until moved */
    uint32_t time;              /* count the ticks of each touch of the load */
    uint64_t adjust;            /* clock.c: to IA32_TSC_ADJUST of processor 1 */
    uint32_t deadline_ms;       /* clock.c: let a timer expire; 0: none */
};
extern struct parameters par;
extern const char *const pattern_names[PATTERNS];

/* smp.c: processors and clocks */
extern uint32_t cpus_started;
void set_up_interrupts(void);
void start_cpus(void);
void barrier(void);
void smi_increment(volatile uint64_t *word);
uint64_t measure_tsc_khz(void);
void drop_mappings(void);

/* memory.c: what each page must hold, and the check */
extern uint64_t first_page;         /* of the memory under test */
extern uint64_t pages;
extern uint32_t *samples[2];        /* per pass: TSC ticks of each touch */
extern uint32_t *times;             /* per processor: touches by their ticks */
void memory_layout(void);
void fill(uint32_t cpu);
bool stays_zero(uint64_t page);
void touch(uint64_t page);
void touch_and_count(uint64_t page, uint32_t *times_of_cpu);
uint64_t timed_touch(uint64_t page, bool read_first, bool by_smi);
void rom_remember(void);
void rom_check(void);
void check(uint32_t cpu);
void report_check(void);

#endif
