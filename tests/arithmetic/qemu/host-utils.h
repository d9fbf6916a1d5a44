/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef QEMU_HOST_UTILS_H
#define QEMU_HOST_UTILS_H

static inline void mulu64(uint64_t *low, uint64_t *high, uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;

    *low = product;
    *high = product >> 64;
}

/* The quotient takes the dividend's place; returns the rest */
static inline uint64_t divu128(uint64_t *low, uint64_t *high, uint64_t divisor)
{
    unsigned __int128 dividend = (unsigned __int128)*high << 64 | *low;

    *low = dividend / divisor;
    *high = dividend / divisor >> 64;
    return dividend % divisor;
}

#endif
