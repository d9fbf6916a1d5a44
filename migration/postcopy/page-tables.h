/*
 * Postcopy: addresses of a guest's page tables, and of a virtual address
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PAGE_TABLES_H
#define MIGRATION_POSTCOPY_PAGE_TABLES_H

#include "exec/hwaddr.h"
#include "exec/vaddr.h"

/* A tree of tables, with the parameters in which x86 and AArch64 differ */
typedef struct PageTables {
    /* Of the uppermost table; at least aligned to the size of an entry */
    hwaddr root;
    /* 0: addresses are physical */
    unsigned levels;
    /* Bits of an address: all that count, of the page offset, of each index */
    unsigned va_bits, page_bits, index_bits;
    /* Bytes of an entry, of which bit 0 shows that it is valid */
    unsigned entry_size;
    /* Bits of an entry that are the address of a table or of a page */
    uint64_t address_mask;
    /*
     * Up to level @largest, an entry with @large_value in @large_mask is a
     * large page; entries of level 1 are pages
     */
    uint64_t large_mask, large_value;
    unsigned largest;
} PageTables;

#define PAGE_TABLES_LEVELS 5

/* Returns an entry of guest memory, zero-extended */
typedef uint64_t PageTablesRead(void *opaque, hwaddr address, unsigned size);

/*
 * Fill in @path with the addresses of the entries that lead to @address, from
 * the root on, and then its own.  Returns how many; 0 if it is not mapped.
 */
unsigned page_tables_walk(const PageTables *tables, vaddr address,
                          PageTablesRead *read, void *opaque,
                          hwaddr path[PAGE_TABLES_LEVELS + 1]);

#endif
