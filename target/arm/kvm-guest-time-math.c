/*
 * Guest time: arithmetic on the system counter
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "kvm-guest-time-math.h"

void guest_counter_narrow(GuestCounterOffset *offset, uint64_t before,
                          uint64_t after, uint64_t guest)
{
    GuestCounterOffset seen = { before - guest, after - before };
    /* The ends of @seen relative to the start of @offset */
    int64_t low = seen.low - offset->low;
    int64_t high = low + (int64_t)(seen.width - offset->width);

    if (offset->width == UINT64_MAX ||
        low > (int64_t)offset->width || low < -(int64_t)seen.width) {
        *offset = seen;
        return;
    }
    if (low > 0) {
        offset->low += low;
        offset->width -= low;
    }
    if (high < 0) {
        offset->width += high;
    }
}

uint64_t guest_counter_offset(const GuestCounterOffset *offset)
{
    return offset->low + offset->width / 2;
}
