/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef CLOCKS_H
#define CLOCKS_H

#include "layout.h"

#define CLOCK_0     "virtual"   /* CNTVCT */
#define CLOCK_1     "physical"  /* CNTPCT */

/* By processor and clock: interrupts of the timer so far */
extern volatile uint32_t fired[MAX_CPUS][CLOCKS];

#define CLOCK_FORMAT "'fired_virtual': %u, 'fired_physical': %u"
#define CLOCK_VALUES(cpu) (uint64_t)fired[cpu][0], (uint64_t)fired[cpu][1]

#endif
