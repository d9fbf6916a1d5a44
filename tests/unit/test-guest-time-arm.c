/*
 * Guest time: arithmetic on arm64's system counter
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "target/arm/kvm-guest-time-math.h"

/* The guest has read @guest when the host's counter was @before to @after */
static void narrow(GuestCounterOffset *offset, uint64_t before, uint64_t after,
                   uint64_t guest, uint64_t low, uint64_t width)
{
    guest_counter_narrow(offset, before, after, guest);
    g_assert_cmpuint(offset->low, ==, low);
    g_assert_cmpuint(offset->width, ==, width);
}

static void test_narrow(void)
{
    GuestCounterOffset offset = GUEST_COUNTER_OFFSET_ANY;

    /* The offset is in 900 to 1000 */
    narrow(&offset, 5000, 5100, 4100, 900, 100);
    /* In 950 to 1030: only the upper half is possible */
    narrow(&offset, 6000, 6080, 5050, 950, 50);
    /* In 900 to 980: narrows from above */
    narrow(&offset, 7000, 7080, 6100, 950, 30);
    /* In 960 to 965: inside the known range */
    narrow(&offset, 8000, 8005, 7040, 960, 5);
    /* In 0 to 2000: the known range stays */
    narrow(&offset, 9000, 11000, 9000, 960, 5);
    g_assert_cmpuint(guest_counter_offset(&offset), ==, 962);

    /* In 965 to 970, then in 965 to 965: the ranges meet at their ends */
    narrow(&offset, 2000, 2005, 1035, 965, 0);
    narrow(&offset, 3000, 3000, 2035, 965, 0);
}

static void test_narrow_around_zero(void)
{
    GuestCounterOffset offset = GUEST_COUNTER_OFFSET_ANY;

    /* In -100 to 100, then in -20 to 200, then in -300 to 10 */
    narrow(&offset, 1000, 1200, 1100, -100ULL, 200);
    narrow(&offset, 2000, 2220, 2020, -20ULL, 120);
    narrow(&offset, 3000, 3310, 3300, -20ULL, 30);
    g_assert_cmpuint(guest_counter_offset(&offset), ==, -5ULL);

    /* The host's counter wraps */
    offset = GUEST_COUNTER_OFFSET_ANY;
    narrow(&offset, -10ULL, 10, -110ULL, 100, 20);
    narrow(&offset, 5, 15, -100ULL, 105, 10);
}

static void test_another_offset(void)
{
    GuestCounterOffset offset = GUEST_COUNTER_OFFSET_ANY;

    narrow(&offset, 5000, 5100, 4100, 900, 100);
    /* From 1001 on, then up to 899: contradictions replace the known range */
    narrow(&offset, 6000, 6010, 4999, 1001, 10);
    narrow(&offset, 7000, 7010, 6010, 990, 10);
    /* The offset is half of all values away */
    narrow(&offset, 1ULL << 63, (1ULL << 63) + 7, 0, 1ULL << 63, 7);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/guest-time-arm/narrow", test_narrow);
    g_test_add_func("/guest-time-arm/narrow-around-zero",
                    test_narrow_around_zero);
    g_test_add_func("/guest-time-arm/another-offset", test_another_offset);
    return g_test_run();
}
