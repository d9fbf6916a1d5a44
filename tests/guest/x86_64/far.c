/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest for tests of memory devices: the pages of pages.h are above 4 GiB. On
 * the destination, it does not touch them before the byte CMOS_GO of the CMOS
 * is not zero.
 */
#define PAGES       0x100000000ull
#include "pages.h"

#define PRESENT     3           /* and writable */
#define LARGE       0x80
#define CMOS_GO     0x40

/* Adds 1 GiB to the identity map. */
static void map_pages(void)
{
    static uint64_t directory[512] __attribute__((aligned(4096)));
    uint64_t *pml4, *pdpt;

    asm volatile("mov %%cr3, %0" : "=r"(pml4));
    pdpt = (uint64_t *)(uintptr_t)(pml4[0] & ~0xfffull);
    for (uint64_t i = 0; i < 512; i++) {
        directory[i] = (PAGES + (i << 21)) | LARGE | PRESENT;
    }
    pdpt[PAGES >> 30] = (uintptr_t)directory | PRESENT;
}

void run_payload(uint32_t cpu)
{
    if (cpu == 0) {
        map_pages();
        start_cpus();
    }
    write_until_moved(cpu);
    if (cpu == 0) {
        report("'timing'");
        outb(0x70, CMOS_GO);
        pause_while(!inb(0x71));
    }
    touch_downwards(cpu);
}
