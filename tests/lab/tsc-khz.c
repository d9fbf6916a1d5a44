/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Prints the frequency of the TSC by CLOCK_MONOTONIC, in kHz; takes 0.2 s. */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

struct reading {
    uint64_t tsc, ns;
};

static uint64_t monotonic(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* Both clocks at one time: of many readings that with which least time passed. */
static struct reading read_both(void)
{
    struct reading best = { 0 };
    uint64_t least = UINT64_MAX;

    for (int i = 0; i < 100; i++) {
        uint64_t before = __rdtsc();
        uint64_t ns = monotonic();
        uint64_t took = __rdtsc() - before;

        if (took < least) {
            least = took;
            best = (struct reading) { before + took / 2, ns };
        }
    }
    return best;
}

int main(void)
{
    struct timespec wait = { .tv_nsec = 200000000 };
    struct reading a = read_both(), b;

    nanosleep(&wait, NULL);
    b = read_both();
    printf("%.0f\n", (b.tsc - a.tsc) * 1e6 / (b.ns - a.ns));
    return 0;
}
