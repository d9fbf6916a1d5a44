/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef CLOCKS_H
#define CLOCKS_H

#include "layout.h"

#define CLOCK_0     "tsc"
#define CLOCK_1     "clock"     /* the kvmclock */

/* Written by KVM; the layout is the guest's interface. */
struct pvclock {
    volatile uint32_t version;
    uint32_t pad;
    uint64_t tsc_timestamp;
    uint64_t system_time;
    uint32_t mul;
    int8_t shift;
    uint8_t flags;
    uint8_t pad2[2];
} __attribute__((aligned(64)));

extern struct pvclock pv_pages[MAX_CPUS];

/* KVM's parameters of the kvmclock */
#define CLOCK_FORMAT "'pv_tsc': %u, 'pv_time': %u, 'pv_mul': %u, " \
                     "'pv_shift': %u, 'pv_flags': %u"
#define CLOCK_VALUES(cpu) \
    pv_pages[cpu].tsc_timestamp, pv_pages[cpu].system_time, \
    (uint64_t)pv_pages[cpu].mul, (uint64_t)(uint8_t)pv_pages[cpu].shift, \
    (uint64_t)pv_pages[cpu].flags

#endif
