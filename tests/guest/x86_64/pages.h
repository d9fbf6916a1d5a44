/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Payloads with `mem` MiB under test from PAGES on, which they define. Each
 * processor writes its share of the pages until the guest moves, then touches
 * it once. With a seed, all pages are the same; with zero=100, they stay zero.
 */
#ifndef PAGES_H
#define PAGES_H

#include "touch.h"

static inline volatile uint64_t *page(uint64_t i)
{
    return (volatile uint64_t *)(PAGES + (i << PAGE_SHIFT));
}

static inline uint64_t number_of_pages(void)
{
    return par.mem_mb << (20 - PAGE_SHIFT);
}

/* The first word of a page */
static inline uint64_t value_of(uint64_t i)
{
    return par.zero_percent == 100 ? 0 : par.seed ? par.seed : i + 1;
}

static inline void write_page(uint64_t i)
{
    if (value_of(i)) {
        page(i)[0] = value_of(i);
    }
}

static inline void write_until_moved(uint32_t cpu)
{
    uint64_t n = number_of_pages();

    barrier();
    for (uint64_t i = cpu; i < n; i += par.cpus) {
        write_page(i);
    }
    meet_and_report(cpu, "ready");
    for (uint64_t i = cpu; side() == SIDE_SOURCE; i += par.cpus) {
        write_page(i % n);
    }
    barrier();
}

/* Downwards: the background sends pages upwards */
static inline void touch_downwards(uint32_t cpu)
{
    static uint64_t bad_pages;
    uint64_t n = number_of_pages();

    barrier();
    for (uint64_t i = n - 1 - cpu; i < n; i -= par.cpus) {
        page(i)[1]++;
        if (page(i)[0] != value_of(i)) {
            __atomic_add_fetch(&bad_pages, 1, __ATOMIC_SEQ_CST);
        }
    }
    barrier();
    if (cpu == 0) {
        report("'end', 'checked_pages': %u, 'bad_pages': %u, 'bad_regions': 0",
               n, bad_pages);
    }
}

#endif
