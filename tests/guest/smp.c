/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Synchronisation of processors. */
#include "touch.h"

/* The first processor waits for the start of all others. */
void wait_for_started(uint64_t khz)
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
