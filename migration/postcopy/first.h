/*
 * Postcopy: what a guest must touch before all else when it runs again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FIRST_H
#define MIGRATION_POSTCOPY_FIRST_H

#include "exec/memory.h"
#include "page-tables.h"

/* Of one vCPU, of all vCPUs, or of all devices: the most urgent pages first */
typedef struct PostcopyFirstPages PostcopyFirstPages;

/*
 * Where the background begins.  Of the migration thread, but for the
 * migration's begin and end.
 */
typedef struct PostcopyFirst {
    /* Each page once; or NULL */
    GArray *list;
    /* Those before have been sent */
    guint next;
} PostcopyFirst;

/*
 * The guest has stopped, and the devices' state has been sent: find out what
 * the guest will touch first.  Migration thread, with the BQL.
 */
void postcopy_first_begin(MigrationState *s);

/* There is no list, or none any more.  BQL, no migration thread. */
void postcopy_first_reset(PostcopyFirst *first);

/*
 * Where the background goes on: if such a page is still to be sent, @rb and
 * @page are changed to it, the first target page of a host page.  Migration
 * thread, with RAMState.bitmap_mutex.
 */
void postcopy_first_choose(PostcopyFirst *first, RAMBlock **rb,
                           unsigned long *page);

/* Whether @page is what postcopy_first_choose() has chosen.  The same. */
bool postcopy_first_is(const PostcopyFirst *first, RAMBlock *rb,
                       unsigned long page);

/* What SysemuCPUOps.first_pages and devices call, with the BQL */

/* @length bytes from the physical address @address on, if they are RAM */
void postcopy_first_add(PostcopyFirstPages *to, AddressSpace *as,
                        hwaddr address, hwaddr length);

/* The page of a virtual address, and before it the tables on its way */
void postcopy_first_add_virtual(PostcopyFirstPages *to,
                                const PageTables *tables, vaddr address);

/*
 * Read @length bytes from a virtual address on.  Returns false if not all of it
 * is RAM: reading a device could change it.
 */
bool postcopy_first_read(const PageTables *tables, vaddr address, void *buf,
                         size_t length);

/* Let @add be called for the devices of a kind.  From type_init. */
void postcopy_first_devices(void (*add)(PostcopyFirstPages *to));

/* The same for what all vCPUs share */
void postcopy_first_shared(void (*add)(PostcopyFirstPages *to));

#endif
