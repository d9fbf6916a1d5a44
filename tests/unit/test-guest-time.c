/*
 * Guest time: arithmetic on TSC values, and the length of a blackout
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "migration/guest-time.h"
#include "target/i386/kvm/guest-time-math.h"

#define S           1000000000LL
#define YEAR        (365 * 86400 * S)
#define KHZ         2593905
#define HZ          (KHZ * 1000ULL)

static const GuestTscScale unscaled;

static void test_cycles(void)
{
    g_assert_cmpuint(guest_time_ticks(0, HZ), ==, 0);
    g_assert_cmpuint(guest_time_ticks(1000000, HZ), ==, KHZ);
    /* Rounds to the nearest: 2.593905 and 5.18781 */
    g_assert_cmpuint(guest_time_ticks(1, HZ), ==, 3);
    g_assert_cmpuint(guest_time_ticks(2, HZ), ==, 5);
    g_assert_cmpuint(guest_time_ticks(1, 500000 * 1000ULL), ==, 1);
    g_assert_cmpuint(guest_time_ticks(1, 499999 * 1000ULL), ==, 0);
    g_assert_cmpuint(guest_time_ticks(-1, HZ), ==, -3ULL);
    g_assert_cmpuint(guest_time_ticks(-1000000, HZ), ==, -(uint64_t)KHZ);
    /* Products over 64 bits; 200 years at 4 GHz also as a result */
    g_assert_cmpuint(guest_time_ticks(10 * YEAR, 5000000 * 1000ULL), ==,
                     10 * YEAR / 1000000 * 5000000);
    g_assert_cmpuint(guest_time_ticks(200 * YEAR, 4000000 * 1000ULL), ==,
                     (uint64_t)(200 * YEAR) * 4);
    g_assert_cmpuint(guest_time_ticks(INT64_MIN, 1000000000), ==, 1ULL << 63);
}

static void test_offset(void)
{
    g_assert_cmpuint(guest_tsc_offset(1000, -100ULL, 50, 3000), ==, -2050ULL);
    g_assert_cmpuint(guest_tsc_offset(5000, -100ULL, 50, 3000), ==, 1950);
    /* The guest's TSC wraps in the blackout; then the host's has wrapped */
    g_assert_cmpuint(guest_tsc_offset(10, -11ULL, 3, 7), ==, -5ULL);
    g_assert_cmpuint(guest_tsc_offset(-10ULL, 4, 0, 100), ==, -106ULL);

    /* Differences between vCPUs stay */
    g_assert_cmpuint(guest_tsc_offset(77, 500, 9, 1234) -
                     guest_tsc_offset(77, -20ULL, 9, 1234), ==, 520);
}

static void test_scaled(void)
{
    GuestTscScale half = { .ratio = 1ULL << 31, .frac_bits = 32 };
    GuestTscScale twice = { .ratio = 1ULL << 49, .frac_bits = 48 };
    uint64_t from, to;

    g_assert_cmpuint(guest_tsc_scaled(12345, unscaled), ==, 12345);
    g_assert_cmpuint(guest_tsc_scaled(-1ULL, unscaled), ==, -1ULL);
    g_assert_cmpuint(guest_tsc_scaled(1000, half), ==, 500);
    g_assert_cmpuint(guest_tsc_scaled(1001, half), ==, 500);
    g_assert_cmpuint(guest_tsc_scaled(1000, twice), ==, 2000);
    /* The product needs 128 bits; the result is modulo 2^64 */
    g_assert_cmpuint(guest_tsc_scaled(1ULL << 63, half), ==, 1ULL << 62);
    g_assert_cmpuint(guest_tsc_scaled((1ULL << 63) + 3, twice), ==, 6);

    /* One offset moves a 2 GHz guest from a host of 3 GHz to one of 2.5 GHz */
    from = guest_tsc_scaled(3 * S, (GuestTscScale) { (2ULL << 32) / 3, 32 });
    to = guest_tsc_scaled(10 * S, (GuestTscScale) { (4ULL << 48) / 5, 48 });
    g_assert_cmpuint(from, ==, 1999999999);
    g_assert_cmpuint(to, ==, 7999999999);
    g_assert_cmpuint(guest_tsc_offset(from, 5, 100, to) + to, ==, 2000000104);
}

static void check_found(uint32_t guest_khz, uint32_t host_khz, uint64_t at,
                        uint64_t scaled, uint64_t off_by)
{
    GuestTscScale scale;
    uint64_t found;

    g_assert_true(guest_tsc_find_scale(at - 2000, at + 2000, scaled, guest_khz,
                                       host_khz, &scale));
    found = guest_tsc_scaled(at, scale);
    g_assert_cmpuint(MAX(found, scaled) - MIN(found, scaled), <=, off_by);
}

static void test_find_scale(void)
{
    GuestTscScale scale;

    /* Not scaled, also across a wrap */
    g_assert_true(guest_tsc_find_scale(1000, 2000, 1500, KHZ, 0, &scale));
    g_assert_cmpuint(scale.frac_bits, ==, 0);
    g_assert_true(guest_tsc_find_scale(-500ULL, 500, 3, KHZ, KHZ, &scale));
    g_assert_cmpuint(scale.frac_bits, ==, 0);

    /* 3000000 kHz, 32 bits */
    check_found(2000000, 0, 1125899906842624, 750599937720320, 0);
    /* 3000000 kHz, 48 bits */
    check_found(2000000, 0, 1125899906842624, 750599937895080, 0);
    /* 2000000 kHz, 32 bits */
    check_found(3000000, 0, 288230376151711744, 432345564227567616, 0);
    /* 2000000 kHz, 48 bits */
    check_found(3000001, 2000018, 288230376151711744, 432345708342755328, 0);
    /* 3999999 kHz, 48 bits */
    check_found(1000001, 3999999, 3153600000000000000, 788400985500243996, 0);
    /* 2596122 kHz, 32 bits */
    check_found(2000000, 2596122, 5000000000, 3851899100, 0);
    /* 2596122 kHz, 32 bits */
    check_found(2000000, 0, 5000000000, 3851899100, 2000);

    /* A TSC that has just begun, and a value that no host's TSC gives */
    g_assert_false(guest_tsc_find_scale(1 << 20, (1 << 20) + 1000, 5, KHZ, KHZ,
                                        &scale));
    g_assert_false(guest_tsc_find_scale(1ULL << 40, (1ULL << 40) + 10, 1 << 22,
                                        KHZ, KHZ, &scale));
}

static uint32_t pvclock_khz(uint32_t mul, int8_t shift)
{
    GuestPvclock pv = { .tsc_to_system_mul = mul, .tsc_shift = shift };

    return guest_pvclock_khz(&pv);
}

static void test_pvclock(void)
{
    GuestPvclock pv = {
        .tsc_timestamp = 1000, .system_time = 5 * S,
        .tsc_to_system_mul = 3308733193U, .tsc_shift = -1,
    };

    /* As KVM computes them for TSCs of 2596140 kHz, 500 MHz and 5 GHz */
    g_assert_cmpuint(pvclock_khz(3308733193U, -1), ==, 2596140);
    g_assert_cmpuint(pvclock_khz(1U << 31, 2), ==, 500000);
    g_assert_cmpuint(pvclock_khz(3435973836U, -2), ==, 5000000);
    /* Invalid parameters */
    g_assert_cmpuint(pvclock_khz(0, 0), ==, 0);
    g_assert_cmpuint(pvclock_khz(1, 0), ==, 0);
    g_assert_cmpuint(pvclock_khz(UINT32_MAX, -13), ==, 0);
    g_assert_cmpuint(pvclock_khz(UINT32_MAX, 32), ==, 0);
    g_assert_cmpuint(pvclock_khz(UINT32_MAX, -12), ==, 4096000001);
    g_assert_cmpuint(pvclock_khz(UINT32_MAX, 31), ==, 0);

    g_assert_cmpuint(guest_pvclock_ns(&pv, 1000), ==, 5 * S);
    /* One second, rounded down */
    g_assert_cmpuint(guest_pvclock_ns(&pv, 2596141000), ==, 6 * S - 1);
    pv.tsc_shift = 1;
    g_assert_cmpuint(guest_pvclock_ns(&pv, 1000 + 649035000), ==, 6 * S - 1);
    pv.tsc_timestamp = -7ULL;
    g_assert_cmpuint(guest_pvclock_ns(&pv, 649035000 - 7), ==, 6 * S - 1);
}

#define NEGATIVE    "is negative"
#define LONG        "is longer than guest-time-max-gap"
#define SOURCE      "is not certain: the source's clock is not synchronized"
#define HERE        "is not certain: this host's clock is not synchronized"
#define TAI         "is not certain: the hosts do not agree on TAI - UTC"
#define WAITED      "does not agree with how long both ends have waited"
#define SHORT       "is shorter than the hosts' clocks may be wrong"

static const uint64_t then_ns = 1800000000 * S;

static GuestTimeOfDay host(int64_t ns, int tai, uint32_t error_us)
{
    return (GuestTimeOfDay) { then_ns + ns, tai, error_us, true, false };
}

/* @why: the reason not to count the gap, or NULL */
static void check_gap(GuestTimeOfDay then, GuestTimeOfDay now,
                      const GuestTimeLimits *limits, int64_t is,
                      uint64_t error_ns, const char *why)
{
    /* Unless the gap is to be checked, only its length matters */
    bool always = !g_strcmp0(why, NEGATIVE) || !g_strcmp0(why, LONG);
    GuestTimeGap gap;

    for (int check = 0; check < 2; check++) {
        g_assert_cmpstr(guest_time_gap(&then, &now, limits, 10000, check, &gap),
                        ==, check || always ? why : NULL);
        g_assert_cmpint(gap.ns, ==, is);
        g_assert_cmpuint(gap.error_ns, ==, error_ns);
    }
}

static void test_gap(void)
{
    GuestTimeOfDay none = { then_ns }, then = host(0, 0, 0);
    GuestTimeOfDay later = host(3 * S, 0, 0), leap;

    check_gap(then, then, NULL, 0, 0, NULL);
    check_gap(then, later, NULL, 3 * S, 0, NULL);
    check_gap(then, host(10 * S, 0, 0), NULL, 10 * S, 0, NULL);
    check_gap(then, host(-1, 0, 0), NULL, -1, 0, NEGATIVE);
    check_gap(then, host(11 * S, 0, 0), NULL, 11 * S, 0, LONG);
    check_gap(then, host(YEAR, 0, 0), NULL, YEAR, 0, LONG);

    /* The error of one host is unknown */
    check_gap(none, later, NULL, 3 * S, UINT64_MAX, SOURCE);
    check_gap(then, none, NULL, 0, UINT64_MAX, HERE);

    /* Errors add up; large ones must be less than the blackout */
    check_gap(host(0, 0, 1000000), host(3 * S, 0, 2000000), NULL, 3 * S, 3 * S,
              NULL);
    check_gap(host(0, 0, 1000001), host(3 * S, 0, 2000000), NULL, 3 * S,
              3 * S + 1000, SHORT);
    check_gap(host(0, 0, UINT32_MAX), host(3 * S, 0, UINT32_MAX), NULL, 3 * S,
              2000ULL * UINT32_MAX, SHORT);

    /* Short blackouts, with errors as long after the hosts' last NTP poll */
    check_gap(host(0, 0, 600000), host(S / 20, 0, 600000), NULL, S / 20,
              1200000000, NULL);
    check_gap(host(0, 0, 600001), host(S / 20, 0, 600000), NULL, S / 20,
              1200001000, SHORT);

    /* A leap second was inserted: UTC had the same second twice */
    leap = host(S, 38, 0);
    check_gap(host(0, 37, 0), leap, NULL, S, 0, TAI);
    leap.leap = true;
    check_gap(host(0, 37, 0), leap, NULL, 2 * S, 0, NULL);
    leap = host(-S / 2, 38, 0);
    leap.leap = true;
    check_gap(host(0, 37, 0), leap, NULL, S / 2, 0, NULL);
    /* A leap second was deleted */
    leap = host(2 * S, 36, 0);
    leap.leap = true;
    check_gap(host(0, 37, 0), leap, NULL, S, 0, NULL);
    /* No sum overflows */
    leap = host(0, INT32_MAX, 0);
    leap.leap = true;
    check_gap(host(0, INT32_MIN, 0), leap, NULL, UINT32_MAX * S, 0, LONG);
    /* TAI is unknown to one host */
    check_gap(host(0, 37, 0), host(S, 0, 0), NULL, S, 0, NULL);
    check_gap(host(0, 0, 0), host(S, 37, 0), NULL, S, 0, NULL);
}

static void test_limits(void)
{
    GuestTimeLimits limits;

    /* Asked at 1 s, answered at 1.01 s, stopped at 5 s; runs 7 s later */
    limits = guest_time_limits(4 * S, 3990000000, 7 * S, 7 * S + 1000);
    g_assert_cmpint(limits.least, ==, 3 * S - 7000000);
    g_assert_cmpint(limits.most, ==, 3010000000 + 7000000 + 1000 + 1);

    /* The limits bound the error better than the hosts' clocks, or worse */
    check_gap(host(0, 0, 100), host(3 * S, 0, 100), &limits, 3 * S, 200000,
              NULL);
    check_gap(host(0, 0, 1000000), host(3 * S, 0, 1000000), &limits, 3 * S,
              limits.most - 3 * S, NULL);
    check_gap(host(0, 0, 4000000), host(3 * S, 0, 4000000), &limits, 3 * S,
              limits.most - 3 * S, NULL);

    /* A clock's real error is larger than the host states */
    check_gap(host(0, 0, 100), host(limits.most + 200000, 0, 100), &limits,
              limits.most + 200000, 200000, NULL);
    check_gap(host(0, 0, 100), host(limits.most + 200001, 0, 100), &limits,
              limits.most + 200001, 200000, WAITED);
    check_gap(host(0, 0, 100), host(limits.least - 200000, 0, 100), &limits,
              limits.least - 200000, 200000, NULL);
    check_gap(host(0, 0, 100), host(limits.least - 200001, 0, 100), &limits,
              limits.least - 200001, 200000, WAITED);

    /* Limits of a peer that sends wrong values */
    limits = guest_time_limits(INT64_MAX / 8, 0, 0, 0);
    check_gap(host(0, 0, UINT32_MAX), host(S, 0, UINT32_MAX), &limits, S,
              2000ULL * UINT32_MAX, SHORT);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/guest-time/cycles", test_cycles);
    g_test_add_func("/guest-time/offset", test_offset);
    g_test_add_func("/guest-time/scaled", test_scaled);
    g_test_add_func("/guest-time/find-scale", test_find_scale);
    g_test_add_func("/guest-time/pvclock", test_pvclock);
    g_test_add_func("/guest-time/gap", test_gap);
    g_test_add_func("/guest-time/limits", test_limits);
    return g_test_run();
}
