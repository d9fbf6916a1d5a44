/*
 * Walks of page tables, in a simulated memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bitops.h"
#include "../migration/postcopy/page-tables.h"

typedef struct Entry {
    hwaddr address;
    uint64_t value;
} Entry;

/* An entry with an address of 0 ends the memory */
static uint64_t read_entry(void *opaque, hwaddr address, unsigned size)
{
    for (const Entry *e = opaque; e->address; e++) {
        if (e->address == address) {
            return size == 8 ? e->value : (uint32_t)e->value;
        }
    }
    return 0;
}

static void check(const PageTables *t, Entry *memory, vaddr address,
                  const hwaddr *expected, unsigned n)
{
    hwaddr path[PAGE_TABLES_LEVELS + 1];

    g_assert_cmpuint(page_tables_walk(t, address, read_entry, memory, path), ==,
                     n);
    for (unsigned i = 0; i < n; i++) {
        g_assert_cmphex(path[i], ==, expected[i]);
    }
}

#define CHECK(t, memory, address, ...) do { \
        const hwaddr expected[] = { __VA_ARGS__ }; \
        check(t, memory, address, expected, ARRAY_SIZE(expected)); \
    } while (0)

static PageTables x86(unsigned levels)
{
    return (PageTables) {
        .root = 0x1000,
        .levels = levels,
        .va_bits = 12 + 9 * levels,
        .page_bits = 12,
        .index_bits = 9,
        .entry_size = 8,
        .address_mask = MAKE_64BIT_MASK(12, 40),
        .large_mask = 0x80,
        .large_value = 0x80,
        .largest = 3,
    };
}

static void test_long(void)
{
    /* With bits around the address; a page has PAT in the place of PS */
    Entry memory[] = {
        { 0x1ff8, 0x8000000000002067 },
        { 0x2ff0, 0x3067 },
        { 0x3008, 0x4067 },
        { 0x4010, 0x80100000123450e7 },
        { 0x3010, 0x80000000400000e7 },
        { 0x2fe8, 0x80000000e7 },
        { }
    };
    PageTables t = x86(4);

    CHECK(&t, memory, 0xffffffff80202123,
          0x1ff8, 0x2ff0, 0x3008, 0x4010, 0x12345123);
    CHECK(&t, memory, 0xffffffff80454321, 0x1ff8, 0x2ff0, 0x3010, 0x40054321);
    CHECK(&t, memory, 0xffffffff7fedcba9, 0x1ff8, 0x2fe8, 0x803fedcba9);
    /* Not present, at two levels */
    check(&t, memory, 0xffffffff80203000, NULL, 0);
    check(&t, memory, 0x1000, NULL, 0);
}

static void test_five_levels(void)
{
    Entry memory[] = {
        { 0x1008, 0x2001 }, { 0x2010, 0x3001 }, { 0x3018, 0x4001 },
        { 0x4020, 0x5001 }, { 0x5028, 0x6001 }, { }
    };
    PageTables t = x86(5);

    CHECK(&t, memory, 1ull << 48 | 2ull << 39 | 3ull << 30 | 4 << 21 | 5 << 12,
          0x1008, 0x2010, 0x3018, 0x4020, 0x5028, 0x6000);
}

static void test_32_bits(void)
{
    /* PAE's uppermost table has four entries, and any 32-byte alignment */
    Entry pae[] = {
        { 0x1038, 0x2001 }, { 0x2000, 0x3001 }, { 0x3008, 0x100004001 }, { }
    };
    Entry two[] = {
        { 0x1c00, 0x2001 }, { 0x2004, 0xffff3001 }, { 0x1c04, 0x800081 }, { }
    };
    PageTables t = x86(3);

    t.root = 0x1020;
    t.va_bits = 32;
    t.largest = 2;
    CHECK(&t, pae, 0xffffffffc0001abc, 0x1038, 0x2000, 0x3008, 0x100004abc);

    t = x86(2);
    t.va_bits = 32;
    t.index_bits = 10;
    t.entry_size = 4;
    t.address_mask = MAKE_64BIT_MASK(12, 20);
    t.largest = 2;
    CHECK(&t, two, 0xc0001abc, 0x1c00, 0x2004, 0xffff3abc);
    CHECK(&t, two, 0xc0412345, 0x1c04, 0x812345);
    /* Without CR4.PSE, that bit has no meaning */
    t.largest = 0;
    check(&t, two, 0xc0412345, NULL, 0);

    t.levels = 0;
    CHECK(&t, two, 0x100012345, 0x12345);
}

static void test_arm(void)
{
    /* 64 KiB, 42 bits: two levels; a block has no bit 1 */
    Entry memory[] = {
        { 0x10008, 0x20003 }, { 0x20010, 0x30703 | 1ull << 54 },
        { 0x10010, 0x40000701 }, { }
    };
    PageTables t = {
        .root = 0x10000,
        .levels = 2,
        .va_bits = 42,
        .page_bits = 16,
        .index_bits = 13,
        .entry_size = 8,
        .address_mask = MAKE_64BIT_MASK(16, 32),
        .large_mask = 2,
        .largest = 3,
    };

    CHECK(&t, memory, 0xfffffc0020021234, 0x10008, 0x20010, 0x31234);
    CHECK(&t, memory, 0xfffffc0041234567, 0x10010, 0x41234567);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/page-tables/long", test_long);
    g_test_add_func("/page-tables/five-levels", test_five_levels);
    g_test_add_func("/page-tables/32-bits", test_32_bits);
    g_test_add_func("/page-tables/arm", test_arm);
    return g_test_run();
}
