/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The payload fills memory, and touches it until it is on the destination.
 * There it times one touch of each page, then another with all memory present
 * but not mapped by KVM, checks every word, and reports.
 */
#include "touch.h"

#define BLOCK_PAGES     512     /* pages of 2 MiB */
#define LOOK_EVERY      16      /* touches between two calls of side() */
#define LOOK_SELDOM     4096    /* if touches are timed: side() takes the BQL */
#define MEET_EVERY      64      /* shared pages; faults keep step in between */
#define STRIDE          4       /* pages of a step of STRIDED */
#define HOT_SHARE       8       /* one page of so many is hot */
#define COLD_EVERY      16      /* passes */
#define HOT_KEY         0x5eed  /* key of the choice of hot pages */

static bool moved;
/* By processor, ticks(): of the last look on the source; when all was timed */
static uint64_t seen[MAX_CPUS], timed[MAX_CPUS];

/* A permutation of 0 ... n-1 that looks random; each key gives another one. */
static uint64_t permute(uint64_t i, uint64_t n, uint64_t key)
{
    int bits = n > 1 ? 64 - __builtin_clzll(n - 1) : 1;
    uint64_t mask = (1ull << bits) - 1;
    int shift = bits / 2 + 1;

    do {
        i = (i ^ key) & mask;
        i ^= i >> shift;
        i = i * 0x9e3779b97f4a7c15 & mask;
        i ^= i >> shift;
        i = i * 0xd1342543de82ef95 & mask;
        i ^= i >> shift;
    } while (i >= n);
    return i;
}

static uint64_t slice_start(uint32_t cpu)
{
    return pages * cpu / par.cpus;
}

static uint64_t pages_of_cpu(uint32_t cpu)
{
    switch (par.pattern) {
    case SHARED:
        return pages;
    case SAMEHUGE:
        return pages / BLOCK_PAGES
               * ((BLOCK_PAGES - cpu + par.cpus - 1) / par.cpus);
    default:
        return slice_start(cpu + 1) - slice_start(cpu);
    }
}

/* How many pages are timed on the destination: those of the first steps. */
static uint64_t timed_of_cpu(uint32_t cpu)
{
    return pages_of_cpu(cpu) / (par.pattern == HOT ? HOT_SHARE : 1);
}

static uint64_t first_sample(uint32_t cpu)
{
    return cpu * (par.pattern == SHARED
                  ? pages : pages / par.cpus + pages / BLOCK_PAGES);
}

/* Of n pages: number i in steps of STRIDE, then the pages between the steps. */
static uint64_t stride(uint64_t i, uint64_t n)
{
    uint64_t steps = n / STRIDE;

    return i < steps * STRIDE ? i % steps * STRIDE + i / steps : i;
}

/* Of n pages: first the hot ones, at random addresses, then the others. */
static uint64_t hot_first(uint64_t i, uint64_t n, uint64_t key)
{
    uint64_t hot = n / HOT_SHARE;

    i = i < hot ? permute(i, hot, key) : hot + permute(i - hot, n - hot, key);
    return permute(i, n, HOT_KEY);
}

/* The page of step i of a processor; processors meet before it if *together. */
static uint64_t page_of_step(uint32_t cpu, uint64_t i, uint64_t key,
                             bool *together)
{
    uint64_t per_block;

    *together = false;
    switch (par.pattern) {
    case SHARED:
        *together = i % MEET_EVERY == 0;
        return permute(i, pages, key);
    case SAMEHUGE:
        per_block = pages_of_cpu(cpu) / (pages / BLOCK_PAGES);
        *together = i % per_block == 0;
        return permute(i / per_block, pages / BLOCK_PAGES, key) * BLOCK_PAGES
               + cpu + i % per_block * par.cpus;
    case SEQUENTIAL:
        return slice_start(cpu) + i;
    case STRIDED:
        return slice_start(cpu) + stride(i, pages_of_cpu(cpu));
    case HOT:
        return slice_start(cpu) + hot_first(i, pages_of_cpu(cpu), key);
    default:
        return slice_start(cpu) + permute(i, pages_of_cpu(cpu), key);
    }
}

/* On the source: touch memory until moved, or `passes` times. */
static void load(uint32_t cpu)
{
    unsigned look_every = par.time ? LOOK_SELDOM : LOOK_EVERY;
    bool together;

    for (uint64_t pass = 0; !par.passes || pass < par.passes; pass++) {
        for (uint64_t i = 0; i < pages_of_cpu(cpu); i++) {
            /* With HOT, a cold page in some passes */
            bool cold = par.pattern == HOT && i >= timed_of_cpu(cpu) &&
                        (pass % COLD_EVERY || i > timed_of_cpu(cpu));
            uint64_t page = page_of_step(cpu, i, par.seed + pass, &together);

            if (i % look_every == 0) {
                uint64_t now = ticks();

                if (side() == SIDE_SOURCE) {
                    seen[cpu] = now;
                } else if (!__atomic_exchange_n(&moved, true,
                                                __ATOMIC_SEQ_CST)) {
                    report("'moved'");
                }
            }
            if (__atomic_load_n(&moved, __ATOMIC_SEQ_CST)) {
                return;
            }
            if (cold || stays_zero(page)) {
                continue;
            }
            if (par.time) {
                touch_and_count(page, times + cpu * BUCKETS);
            } else {
                touch(page);
            }
        }
    }
}

/* On the destination: times one touch of each page, or of each hot one. */
static void measure(uint32_t cpu, int pass)
{
    uint32_t *sample = samples[pass] + first_sample(cpu);
    bool by_smi = par.pattern == SMM && cpu == 0;
    bool together;

    for (uint64_t i = 0; i < timed_of_cpu(cpu); i++) {
        uint64_t page = page_of_step(cpu, i, ~par.seed, &together);
        uint64_t took;

        sample[i] = 0;          /* no fault here while others wait */
        if (together && pass == 0) {
            barrier();
        }
        took = timed_touch(page, par.pattern == ZEROWRITE, by_smi);
        sample[i] = took < UINT32_MAX ? took : UINT32_MAX;
    }
    if (pass == 0) {
        timed[cpu] = ticks();
    }
}

static void report_samples(void)
{
    uint64_t left = 0;          /* the last known tick on the source */

    for (uint64_t cpu = 0; cpu < par.cpus; cpu++) {
        left = seen[cpu] > left ? seen[cpu] : left;
    }
    for (uint64_t cpu = 0; cpu < par.cpus; cpu++) {
        report("'samples', 'cpu': %u, 'count': %u, 'ticks': %u, "
               "'pass1_address': %u, 'pass2_address': %u",
               cpu, timed_of_cpu(cpu), timed[cpu] - left,
               (uint64_t)(uintptr_t)(samples[0] + first_sample(cpu)),
               (uint64_t)(uintptr_t)(samples[1] + first_sample(cpu)));
    }
}

void run_payload(uint32_t cpu)
{
    if (cpu == 0) {
        memory_layout();
        rom_remember();
        report("'boot', 'cpus': %u, 'test_address': %u, 'test_pages': %u, "
               "'tsc_khz': %u, 'times_address': %u",
               par.cpus, first_page << PAGE_SHIFT, pages, khz,
               (uint64_t)(uintptr_t)times);
        start_cpus();
    }
    barrier();

    fill(cpu);
    meet_and_report(cpu, "ready");
    barrier();

    load(cpu);
    if (cpu == 0 && !par.late_rom) {
        rom_check();        /* while pages of the ROM are missing */
    }
    meet_and_report(cpu, "timing");
    measure(cpu, 0);
    barrier();
    if (cpu == 0) {
        if (par.late_rom) {
            rom_check();
        }
        drop_mappings();
    }
    barrier();
    measure(cpu, 1);
    barrier();
    check(cpu);
    barrier();
    if (cpu == 0) {
        report_samples();
        report_check();
    }
}
