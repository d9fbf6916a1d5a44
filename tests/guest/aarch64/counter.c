/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that reads each of its counters READINGS times in a row, and reports
 * how long a reading took, by the difference to the next one.
 */
#include "touch.h"

#define READINGS    10000
#define FIRST       100         /* not counted: caches and TLBs fill */

static uint32_t took[READINGS];

#define READ_IN_A_ROW(name) do { \
    uint64_t last = 0; \
    for (int i = -FIRST; i < READINGS; i++) { \
        uint64_t now; \
        isb(); \
        now = read_sysreg(name); \
        took[i < 0 ? 0 : i] = now - last; \
        last = now; \
    } \
} while (0)

static void sort(void)
{
    for (int gap = READINGS / 2; gap; gap /= 2) {
        for (int i = gap; i < READINGS; i++) {
            uint32_t value = took[i];
            int at = i;

            while (at >= gap && took[at - gap] > value) {
                took[at] = took[at - gap];
                at -= gap;
            }
            took[at] = value;
        }
    }
}

static void report_counter(const char *name)
{
    uint64_t sum = 0, squares = 0;

    sort();
    for (int i = 0; i < READINGS; i++) {
        sum += took[i];
        squares += (uint64_t)took[i] * took[i];
    }
    report("'counter', 'counter': '%s', 'hz': %u, 'readings': %u, 'sum': %u, "
           "'sum_of_squares': %u, 'median': %u, 'p95': %u, 'most': %u",
           name, read_sysreg(cntfrq_el0), (uint64_t)READINGS, sum, squares,
           (uint64_t)took[READINGS / 2],
           (uint64_t)took[READINGS * 95 / 100], (uint64_t)took[READINGS - 1]);
}

void run_payload(uint32_t cpu)
{
    READ_IN_A_ROW(cntvct_el0);
    report_counter("virtual");
    READ_IN_A_ROW(cntpct_el0);
    report_counter("physical");
    power_off();
}
