/*
 * The vmclock device: the relation of the guest's counter to the time of day
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef HW_ACPI_VMCLOCK_TIME_H
#define HW_ACPI_VMCLOCK_TIME_H

#include "migration/guest-time.h"

struct vmclock_abi;

/*
 * Writes @now, the guest's counter and its time of day, to @clk, whose seqlock
 * the caller holds.  @now is NULL if that is unknown.
 */
void vmclock_set_time(struct vmclock_abi *clk, const GuestTimeNow *now);

#endif
