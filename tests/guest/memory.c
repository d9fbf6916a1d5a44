/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The contents of each page under test.
 *
 * The first and the last word of a page count its touches in their low half, so
 * that an old page shows its age, and a page of parts with different ages is
 * found; all other words are a function of seed, page and word. `touched`, away
 * from the page, has the count, too. A page that stays_zero() chooses holds
 * zeros instead, and is not touched before the guest has moved.
 */
#include "touch.h"

#define REPORTED    8           /* bad pages */
#define BLOCK       0x200000ull

uint64_t first_page, pages;
uint32_t *touched, *samples[2], *times;

struct region {
    const char *name;
    const uint64_t *start, *end;
    uint64_t sum;
};
extern const uint64_t text_start[], text_end[];
static struct region constant[] = {
    CONSTANT_REGIONS
    { "code", text_start, text_end },
};

static uint64_t bad_pages, bad_regions;

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15;
    x ^= x >> 29;
    x *= 0xd1342543de82ef95;
    return x ^ x >> 32;
}

bool stays_zero(uint64_t page)
{
    return mix(par.seed * 3 + page + 1) % 100 < par.zero_percent;
}

static volatile uint64_t *words(uint64_t page)
{
    return (volatile uint64_t *)((first_page + page) << PAGE_SHIFT);
}

static uint64_t word_step(uint64_t page)
{
    return mix(par.seed ^ page << 24) | 1;
}

/*
 * Low RAM after the payload: the touch counts; the samples of two passes; if
 * they are asked for, the durations of the load's touches; then the memory
 * under test, up to the end of RAM or as large as `mem`.
 */
void memory_layout(void)
{
    extern char image_end[];
    uint64_t most_mb = RAM_MOST >> 20;
    uint64_t ram_mb = par.ram_mb < most_mb ? par.ram_mb : most_mb;
    uint64_t mem_mb = par.mem_mb && par.mem_mb < ram_mb ? par.mem_mb : ram_mb;
    uint64_t at = (uintptr_t)image_end, end = RAM_START + (ram_mb << 20);
    uint64_t most = mem_mb << (20 - PAGE_SHIFT), room;

    touched = (void *)at;
    at += most * sizeof(touched[0]);
    for (int pass = 0; pass < 2; pass++) {
        samples[pass] = (void *)at;
        at += (par.pattern == SHARED ? most * par.cpus
                                     : most + par.cpus * (most / PAGE_WORDS))
              * sizeof(samples[0][0]);
    }
    times = (void *)at;
    at += par.time ? par.cpus * BUCKETS * sizeof(times[0]) : 0;
    at = (at + BLOCK - 1) & ~(BLOCK - 1);
    room = at < end ? (end - at) >> PAGE_SHIFT : 0;
    first_page = at >> PAGE_SHIFT;
    pages = (most < room ? most : room) & ~(BLOCK / 4096 - 1);
    if (!pages || (par.mem_mb && pages != most)) {
        die("not enough memory for this test");
    }
}

void fill(uint32_t cpu)
{
    for (uint64_t page = pages * cpu / par.cpus;
         page < pages * (cpu + 1) / par.cpus; page++) {
        volatile uint64_t *w = words(page);
        uint64_t step = word_step(page);

        if (stays_zero(page)) {
            continue;
        }
        for (int i = 1; i < PAGE_WORDS - 1; i++) {
            w[i] = step * i;
        }
        w[0] = w[PAGE_WORDS - 1] = step << 32;
    }
}

/* Counts a touch; the caller writes the page's first word. */
static void book(uint64_t page)
{
    __atomic_add_fetch(&words(page)[PAGE_WORDS - 1], 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&touched[page], 1, __ATOMIC_SEQ_CST);
}

void touch(uint64_t page)
{
    __atomic_add_fetch(&words(page)[0], 1, __ATOMIC_SEQ_CST);
    book(page);
}

static uint32_t bucket(uint64_t n)
{
    int log = n < 8 ? 3 : 63 - __builtin_clzll(n);

    return (log - 3) * 8 + (n >> (log - 3));
}

void touch_and_count(uint64_t page, uint32_t *times_of_cpu)
{
    uint64_t start = ticks();

    touch(page);
    times_of_cpu[bucket(ticks() - start)]++;
}

uint64_t timed_touch(uint64_t page, bool read_first, bool by_smi)
{
    volatile uint64_t *w = words(page);
    uint64_t start = ticks(), end;

    if (read_first) {
        (void)*w;
    }
    if (by_smi) {
        smi_increment(w);
    } else {
        __atomic_add_fetch(w, 1, __ATOMIC_SEQ_CST);
    }
    end = ticks();
    book(page);
    return end - start;
}

static uint64_t sum(const struct region *r)
{
    uint64_t s = 0;

    for (const uint64_t *p = r->start; p < r->end; p++) {
        s = mix(s + *p);
    }
    return s;
}

void rom_remember(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(constant); i++) {
        constant[i].sum = sum(&constant[i]);
    }
}

void rom_check(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(constant); i++) {
        if (sum(&constant[i]) != constant[i].sum) {
            report("'bad', 'region': '%s'", constant[i].name);
            bad_regions++;
        }
    }
}

static void check_page(uint64_t page)
{
    volatile uint64_t *w = words(page);
    bool zero = stays_zero(page);
    uint64_t step = zero ? 0 : word_step(page);

    for (int i = 0; i < PAGE_WORDS; i++) {
        uint64_t found = w[i];
        uint64_t expected = i == 0 || i == PAGE_WORDS - 1
                            ? (step << 32) + touched[page] : step * i;

        if (found != expected) {
            uint64_t n = __atomic_fetch_add(&bad_pages, 1, __ATOMIC_SEQ_CST);
            if (n < REPORTED) {
                report("'bad', 'address': '%x', 'found': '%x', "
                       "'expected': '%x'",
                       (uint64_t)(uintptr_t)&w[i], found, expected);
            }
            return;
        }
    }
}

void check(uint32_t cpu)
{
    for (uint64_t page = pages * cpu / par.cpus;
         page < pages * (cpu + 1) / par.cpus; page++) {
        check_page(page);
    }
}

void report_check(void)
{
    uint64_t touches = 0;

    for (uint64_t page = 0; page < pages; page++) {
        touches += touched[page];
    }
    report("'end', 'checked_pages': %u, 'touches': %u, "
           "'bad_pages': %u, 'bad_regions': %u",
           pages, touches, bad_pages, bad_regions);
}
