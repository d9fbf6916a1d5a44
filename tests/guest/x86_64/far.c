/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest for tests of memory devices, above 4 GiB: `mem` MiB. Unless zero=100,
 * its processors write there until it moves; with a seed, the same to all
 * pages. On the destination they wait until the byte CMOS_GO of the CMOS is not
 * zero, and then touch all pages there once, the last ones first.
 */
#include "touch.h"

#define FAR         0x100000000ull
#define PRESENT     3           /* and writable */
#define LARGE       0x80
#define CMOS_GO     0x40

static uint64_t far_dir[512] __attribute__((aligned(4096)));
static uint64_t far_pages;
static uint64_t bad_pages;

static volatile uint64_t *far(uint64_t page)
{
    return (volatile uint64_t *)(FAR + (page << PAGE_SHIFT));
}

/* Adds 1 GiB to the identity map. */
static void map_far(void)
{
    uint64_t *pml4, *pdpt;

    asm volatile("mov %%cr3, %0" : "=r"(pml4));
    pdpt = (uint64_t *)(uintptr_t)(pml4[0] & ~0xfffull);
    for (uint64_t i = 0; i < 512; i++) {
        far_dir[i] = (FAR + (i << 21)) | LARGE | PRESENT;
    }
    pdpt[FAR >> 30] = (uintptr_t)far_dir | PRESENT;
}

static uint64_t value_of(uint64_t page)
{
    return par.seed ? par.seed : page + 1;
}

static bool may_go(void)
{
    outb(0x70, CMOS_GO);
    return inb(0x71);
}

_Noreturn void cpu_main(uint32_t cpu)
{
    bool writes;

    set_up_interrupts();
    if (cpu == 0) {
        measure_khz();
        read_parameters();
        map_far();
        far_pages = (uint64_t)par.mem_mb << (20 - PAGE_SHIFT);
        start_cpus();
    }
    barrier();
    writes = par.zero_percent < 100;
    for (uint64_t i = cpu; writes && i < far_pages; i += par.cpus) {
        far(i)[0] = value_of(i);
    }
    barrier();
    if (cpu == 0) {
        print("{\"event\": \"ready\"}\n");
    }
    for (uint64_t i = cpu; side() == SIDE_SOURCE; i += par.cpus) {
        if (writes) {
            far(i % far_pages)[0] = value_of(i % far_pages);
        }
    }
    barrier();
    if (cpu == 0) {
        print("{\"event\": \"timing\"}\n");
        while (!may_go()) {
            pause();
        }
    }
    barrier();
    for (uint64_t i = far_pages - 1 - cpu; i < far_pages; i -= par.cpus) {
        far(i)[1]++;
        if (far(i)[0] != (writes ? value_of(i) : 0)) {
            __atomic_add_fetch(&bad_pages, 1, __ATOMIC_SEQ_CST);
        }
    }
    barrier();
    if (cpu == 0) {
        print("{\"event\": \"end\", \"checked_pages\": %u, \"bad_pages\": %u, "
              "\"bad_regions\": 0}\n", far_pages, bad_pages);
    }
    halt();
}
