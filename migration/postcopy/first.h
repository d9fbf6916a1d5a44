/*
 * Postcopy: pages that a guest must touch first when it runs again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FIRST_H
#define MIGRATION_POSTCOPY_FIRST_H

#include "exec/memory.h"
#include "page-tables.h"

/* Pages in the order in which one vCPU, all vCPUs or all devices need them */
typedef struct PostcopyFirstPages PostcopyFirstPages;

/*
 * The pages with which the background begins.  Of the migration thread, except
 * at the migration's begin and end.
 */
typedef struct PostcopyFirst {
    /* Each page once; or NULL */
    GArray *list;
    /* Index of the first one that may not have been sent */
    guint next;
} PostcopyFirst;

/*
 * The guest has stopped, and the devices' state was sent: find the pages that
 * the guest will touch first.  Migration thread, with the BQL.
 */
void postcopy_first_begin(MigrationState *s);

/* Free the list, if there is one.  BQL, no migration thread. */
void postcopy_first_reset(PostcopyFirst *first);

/*
 * If a page of the list is still to be sent, change @rb and @page to it: the
 * first target page of a host page.  Migration thread, with
 * RAMState.bitmap_mutex.
 */
void postcopy_first_choose(PostcopyFirst *first, RAMBlock **rb,
                           unsigned long *page);

/* Whether postcopy_first_choose() has chosen @page.  Called as it is. */
bool postcopy_first_is(const PostcopyFirst *first, RAMBlock *rb,
                       unsigned long page);

/* SysemuCPUOps.first_pages and devices call these, with the BQL */

/* Add @length bytes from the physical @address on, if they are RAM */
void postcopy_first_add(PostcopyFirstPages *to, AddressSpace *as,
                        hwaddr address, hwaddr length);

/* Add the page of a virtual address, after the tables that map it */
void postcopy_first_add_virtual(PostcopyFirstPages *to,
                                const PageTables *tables, vaddr address);

/*
 * Read @length bytes from a virtual address on.  Returns false if not all of
 * them are RAM: to read a device could change it.
 */
bool postcopy_first_read(const PageTables *tables, vaddr address, void *buf,
                         size_t length);

/* Register @add for devices of a kind.  From type_init. */
void postcopy_first_devices(void (*add)(PostcopyFirstPages *to));

/* The same for pages that all vCPUs share */
void postcopy_first_shared(void (*add)(PostcopyFirstPages *to));

#endif
