/*
 * Guest time: arithmetic on TSC values
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/host-utils.h"
#include "guest-time-math.h"

/* @a * @b / 2^@shift modulo 2^64, for 0 < @shift < 64 */
static uint64_t guest_tsc_mul_shift(uint64_t a, uint64_t b, unsigned shift)
{
    uint64_t low, high;

    mulu64(&low, &high, a, b);
    return low >> shift | high << (64 - shift);
}

uint64_t guest_tsc_scaled(uint64_t host_tsc, GuestTscScale scale)
{
    if (!scale.frac_bits) {
        return host_tsc;
    }
    return guest_tsc_mul_shift(host_tsc, scale.ratio, scale.frac_bits);
}

/* @a * @b / @c, rounded down, modulo 2^64 */
static uint64_t guest_tsc_mul_div(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t low, high;

    mulu64(&low, &high, a, b);
    divu128(&low, &high, c);
    return low;
}

bool guest_tsc_find_scale(uint64_t before, uint64_t after, uint64_t scaled,
                          uint32_t guest_khz, uint32_t host_khz,
                          GuestTscScale *scale)
{
    /* Bits of the ratio's fraction: AMD's SVM, Intel's VMX */
    static const uint8_t frac_bits[] = { 32, 48 };
    uint64_t hosts[2] = { host_khz };

    *scale = (GuestTscScale) { 0 };
    if (scaled - before <= after - before) {
        return true;
    }
    if (scaled > guest_khz) {
        /* The nearest frequency, more exact the longer the host has run */
        hosts[1] = guest_tsc_mul_div(before + (after - before) / 2 +
                                     scaled / guest_khz / 2, guest_khz, scaled);
    }
    for (int i = 0; i < ARRAY_SIZE(hosts) * ARRAY_SIZE(frac_bits); i++) {
        uint64_t host = hosts[i / ARRAY_SIZE(frac_bits)], first, last;

        if (!host || host > UINT32_MAX) {
            continue;
        }
        scale->frac_bits = frac_bits[i % ARRAY_SIZE(frac_bits)];
        scale->ratio = guest_tsc_mul_div(1ULL << scale->frac_bits, guest_khz,
                                         host);
        first = guest_tsc_scaled(before, *scale);
        last = guest_tsc_scaled(after, *scale);
        if (scaled - first <= last - first) {
            return true;
        }
    }
    return false;
}

uint32_t guest_pvclock_khz(const GuestPvclock *pv)
{
    uint64_t per_ms = 1000000ULL << 32, mul = pv->tsc_to_system_mul, khz;

    /* 1000000 has 20 bits, so that no shift overflows */
    if (!mul || pv->tsc_shift < -12 || pv->tsc_shift > 31) {
        return 0;
    }
    if (pv->tsc_shift < 0) {
        per_ms <<= -pv->tsc_shift;
    } else {
        mul <<= pv->tsc_shift;
    }
    khz = (per_ms + mul / 2) / mul;
    return khz > UINT32_MAX ? 0 : khz;
}

uint64_t guest_pvclock_ns(const GuestPvclock *pv, uint64_t tsc)
{
    uint64_t ticks = tsc - pv->tsc_timestamp;

    ticks = pv->tsc_shift < 0 ? ticks >> -pv->tsc_shift
                              : ticks << pv->tsc_shift;
    return pv->system_time +
           guest_tsc_mul_shift(ticks, pv->tsc_to_system_mul, 32);
}

uint64_t guest_tsc_offset(uint64_t scaled_then, uint64_t offset_then,
                          uint64_t advance, uint64_t scaled_now)
{
    return scaled_then + offset_then + advance - scaled_now;
}
