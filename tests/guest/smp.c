/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Synchronisation of processors. */
#include "touch.h"

uint64_t khz;

_Noreturn void cpu_main(uint32_t cpu)
{
    set_up_interrupts();
    if (cpu == 0) {
        khz = measure_khz();
        read_parameters();
    }
    run_payload(cpu);
    halt();
}

void delay_ms(uint64_t ms)
{
    uint64_t start = ticks();

    pause_while(ticks() - start < ms * khz);
}

/* The first processor waits for the start of all others. */
void wait_for_started(void)
{
    uint64_t start = ticks();

    while (__atomic_load_n(&cpus_started, __ATOMIC_SEQ_CST) < par.cpus) {
        if (ticks() - start > 20000 * khz) {
            die("not all processors started");
        }
        pause();
    }
}

/*
 * Returns when all processors have called it. Waiting processors sleep: the lab
 * has fewer real processors, and spinning ones would delay the others.
 */
void barrier(void)
{
    static uint32_t arrived, generation;
    uint32_t mine = __atomic_load_n(&generation, __ATOMIC_SEQ_CST);

    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST) == par.cpus) {
        __atomic_store_n(&arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&generation, mine + 1, __ATOMIC_SEQ_CST);
        wake_others();
        return;
    }
    while (__atomic_load_n(&generation, __ATOMIC_SEQ_CST) == mine) {
        wait_for_wake();
    }
}

/* All processors meet; then the first one reports this event. */
void meet_and_report(uint32_t cpu, const char *event)
{
    barrier();
    if (cpu == 0) {
        report("'%s'", event);
    }
}
