/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef TOUCH_H
#define TOUCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "arch.h"
#include "layout.h"

#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#define pause_while(condition) ({ \
    while (condition) { \
        pause(); \
    } \
})

/* Not each payload or architecture needs the parameters of a shared type */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define PAGE_WORDS  512
#define PAGE_SHIFT  12
/* Buckets of durations of touches: eight for each power of two */
#define BUCKETS     512

/* The numbers of guest.py's PATTERNS */
enum { DISJOINT, SHARED, SAMEHUGE, ZEROWRITE, SMM, SEQUENTIAL, STRIDED, HOT };

/* io.c: the guest's reports and parameters */
/* {"event": FORMAT}, with ' for "; %s, and of 64 bits %u and %x */
void report(const char *format, ...);
_Noreturn void die(const char *message);
bool equal(const char *a, const char *b);
void read_parameters(void);
uint16_t fw_cfg_file(const char *name, uint32_t *size);

struct parameters {
    uint64_t ram_mb;
    uint64_t cpus;
    uint64_t pattern;
    uint64_t seed;
    uint64_t mem_mb;            /* memory under test; 0: the rest of RAM */
    uint64_t zero_percent;      /* pages that stay zero on the source */
    uint64_t passes;            /* of load() before the check; 0: until moved */
    uint64_t time;              /* count the touches of load() by duration */
    uint64_t late_rom;          /* touch.c: check the ROM after timing all */
    uint64_t vmclock;           /* x86_64/clocks.c: processor 0 reads it */
    uint64_t adjust;            /* x86_64/clocks.c: processor 1's TSC_ADJUST */
    uint64_t deadline_ms;       /* clocks.c: let a timer expire; 0: none */
    uint64_t async;             /* x86_64/async.h: ways of missing pages */
};
extern struct parameters par;

/* Each processor runs it, with its number from 0 on, and then halts. */
void run_payload(uint32_t cpu);

/* smp.c: synchronisation of processors */
extern uint64_t khz;                /* rate of ticks() */
extern uint32_t cpus_started;
void delay_ms(uint64_t ms);
void barrier(void);
void meet_and_report(uint32_t cpu, const char *event);
void wait_for_started(void);

/* ARCH/machine.c: processors, the counter of ticks(), devices */
void set_up_interrupts(void);
void start_cpus(void);
void wake_others(void);
void wait_for_wake(void);
void smi_increment(volatile uint64_t *word);
uint64_t measure_khz(void);
void drop_mappings(void);
uint8_t side(void);                 /* differs between a migration's QEMUs */
void write_console(const char *s, size_t size);
void fw_cfg_select(uint16_t key);
void fw_cfg_read(void *buffer, size_t size);

/* memory.c: the contents of each page, and the check */
extern uint64_t first_page;         /* number, of the memory under test */
extern uint64_t pages;
extern uint32_t *samples[2];        /* per pass: ticks of each touch */
extern uint32_t *times;             /* per processor: touches by duration */
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
