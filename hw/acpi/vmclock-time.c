/*
 * The vmclock device: the relation of the guest's counter to the time of day
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bswap.h"
#include "qemu/host-utils.h"
#include "standard-headers/linux/vmclock-abi.h"
#include "vmclock-time.h"

#define NS_PER_S    1000000000

/* In 2^-16 ppm.  NTP steers a rate by at most 500 ppm, and slews by more */
#define RATE_MAX    (500LL << 16)

/* @a / @b in units of 2^-64; @a must be less than @b */
static uint64_t vmclock_fraction(uint64_t a, uint64_t b)
{
    uint64_t low = 0, high = a;

    divu128(&low, &high, b);
    return low;
}

/*
 * Returns the period of a counter of @hz in units of 2^-(64 + *@shift) s, with
 * 63 significant bits.  @rate, in 2^-16 ppm, is by how much the time of day
 * runs faster than a counter of exactly @hz.
 */
static uint64_t vmclock_period(uint64_t hz, int64_t rate, uint8_t *shift)
{
    uint64_t period, low, high;

    *shift = 62 - clz64(hz);
    period = vmclock_fraction(1ULL << *shift, hz);
    mulu64(&low, &high, period, ABS(rate));
    divu128(&low, &high, 65536 * 1000000ULL);
    return rate < 0 ? period - low : period + low;
}

void vmclock_set_time(struct vmclock_abi *clk, const GuestTimeNow *now)
{
    uint64_t flags = 0;
    int32_t tai_offset;
    bool steady;
    uint8_t shift;

    /* The first known time sets both fields; they stay constant */
    if (now && clk->counter_id == VMCLOCK_COUNTER_INVALID) {
        clk->counter_id = VMCLOCK_COUNTER_X86_TSC;
        clk->time_type = now->time.tai_offset ? VMCLOCK_TIME_TAI
                                              : VMCLOCK_TIME_UTC;
    }
    if (!now || (clk->time_type == VMCLOCK_TIME_TAI && !now->time.tai_offset)) {
        clk->clock_status = VMCLOCK_STATUS_UNRELIABLE;
        clk->flags = 0;
        return;
    }
    /*
     * The page does not contain TAI - UTC: Linux's drivers apply it with the
     * wrong sign when they compute TAI from UTC, or (older ones) UTC from TAI.
     * Without it, they use TAI as it is, or refuse the page.
     */
    tai_offset = clk->time_type == VMCLOCK_TIME_TAI ? now->time.tai_offset : 0;
    /* A slewed clock does not keep this rate until the guest starts next */
    steady = ABS(now->time.rate) <= RATE_MAX;
    clk->counter_value = cpu_to_le64(now->counter);
    clk->counter_period_frac_sec =
        cpu_to_le64(vmclock_period(now->hz, steady ? now->time.rate : 0,
                                   &shift));
    clk->counter_period_shift = shift;
    clk->time_sec = cpu_to_le64(now->time.realtime / NS_PER_S +
                                tai_offset);
    clk->time_frac_sec = cpu_to_le64(
        vmclock_fraction(now->time.realtime % NS_PER_S, NS_PER_S));
    steady &= now->time.synchronized;
    clk->clock_status = steady ? VMCLOCK_STATUS_SYNCHRONIZED
                               : VMCLOCK_STATUS_FREERUNNING;
    if (steady) {
        flags |= VMCLOCK_FLAG_TIME_MAXERROR_VALID;
        clk->time_maxerror_nanosec =
            cpu_to_le64(now->time.max_error_us * 1000ULL);
    }
    clk->flags = cpu_to_le64(flags);
}
