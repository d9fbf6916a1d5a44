/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef CLOCK_H
#define CLOCK_H

#include <stdint.h>

#define CLOCKS  2

struct reading {
    uint64_t clock[CLOCKS];
};

/* ARCH/clocks.c */
void start_clocks(uint32_t cpu);
struct reading read_clocks(uint32_t cpu);
void have_reported(uint32_t cpu);
/* @move: the number of moves before the clocks were read */
void report_timers(uint32_t cpu, uint32_t move);

/* The clocks' names, and more values of a report: CLOCK_FORMAT, CLOCK_VALUES */
#include "clocks.h"

#endif
