/*
 * Postcopy: where a guest's page tables lie, and where an address does
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PAGE_TABLES_H
#define MIGRATION_POSTCOPY_PAGE_TABLES_H

#include "exec/hwaddr.h"
#include "exec/vaddr.h"

/* A tree of tables: what x86 and AArch64 have in common, and how they differ */
typedef struct PageTables {
    /* Of the uppermost table, in any case aligned to the size of an entry */
    hwaddr root;
    /* 0: addresses are physical */
    unsigned levels;
    /* Bits of an address: all that count, below a page's number, by level */
    unsigned va_bits, page_bits, index_bits;
    /* Bytes of an entry, which is valid if bit 0 is set */
    unsigned entry_size;
    /* Where an entry has the address of a table or of a page */
    uint64_t address_mask;
    /*
     * An entry is a large page if these bits have this value, up to the level
     * largest; entries of level 1 are pages
     */
    uint64_t large_mask, large_value;
    unsigned largest;
} PageTables;

#define PAGE_TABLES_LEVELS 5

/* Returns an entry of guest memory, zero-extended */
typedef uint64_t PageTablesRead(void *opaque, hwaddr address, unsigned size);

/*
 * Fill in @path with the addresses of the entries on the way to @address, from
 * the root on, and then its own.  Returns how many; 0 if it is not mapped.
 */
unsigned page_tables_walk(const PageTables *tables, vaddr address,
                          PageTablesRead *read, void *opaque,
                          hwaddr path[PAGE_TABLES_LEVELS + 1]);

#endif
