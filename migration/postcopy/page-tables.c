/*
 * Postcopy: addresses of a guest's page tables, and of a virtual address
 *
 * QEMU translates addresses for its debugger, but does not report the tables
 * that it has read for that, and they are missed, too.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bitops.h"
#include "page-tables.h"

unsigned page_tables_walk(const PageTables *tables, vaddr address,
                          PageTablesRead *read, void *opaque,
                          hwaddr path[PAGE_TABLES_LEVELS + 1])
{
    uint64_t va = address & MAKE_64BIT_MASK(0, tables->va_bits);
    hwaddr table = tables->root;
    unsigned n = 0;

    assert(tables->levels <= PAGE_TABLES_LEVELS);
    for (unsigned level = tables->levels; level; level--) {
        unsigned shift = tables->page_bits + (level - 1) * tables->index_bits;
        uint64_t index = extract64(va, shift, tables->index_bits);
        uint64_t entry;

        path[n] = table + index * tables->entry_size;
        entry = read(opaque, path[n++], tables->entry_size);
        if (!(entry & 1)) {
            return 0;
        }
        table = entry & tables->address_mask;
        if (level == 1 ||
            (level <= tables->largest &&
             (entry & tables->large_mask) == tables->large_value)) {
            va = (table & ~MAKE_64BIT_MASK(0, shift)) |
                 (va & MAKE_64BIT_MASK(0, shift));
            break;
        }
    }
    path[n++] = va;
    return n;
}
