/*
 * Postcopy: where a page is received, and how it is placed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_RECEIVE_H
#define MIGRATION_POSTCOPY_RECEIVE_H

#include "migration/migration.h"
#include "request.h"

/*
 * Maximum number of small pages that are placed together, and that a fetch
 * channel sends together.  On the main channel, each page is copied once more
 * for that, but all take only one system call.
 */
#define POSTCOPY_RUN_PAGES 128

/**
 * postcopy_receive_begin: the first part of a host page has been announced
 *
 * @tmp: of the channel, with host_addr set
 *
 * Sets tmp->buffer, where the page's parts go: the page itself in the second
 * mapping that shared huge pages have, or the temporary page of the channel.
 * Called by the channel's thread, no locks needed.  Returns 0, or negative
 * errno after it has reported the error; the page can be sent again.
 */
int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                           RAMBlock *rb);

/**
 * postcopy_receive_end: all parts were received; make the page visible
 *
 * @f: the file from which they were read
 * @data: the page's content; tmp->buffer, or in @f's buffer
 *
 * A small page whose neighbour is in @f's buffer, or may be, is placed together
 * with it, or by postcopy_receive_run_end().  Returns 0, or negative errno
 * after it has reported the error.
 */
int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                         QEMUFile *f, RAMBlock *rb, void *data);

/* Place the pages that @channel has received but not placed; errors as above */
int postcopy_receive_run_end(MigrationIncomingState *mis, unsigned channel);

/**
 * postcopy_receive_pages: pages were received, each as a whole
 *
 * @page: the first one
 * @n: number of neighbouring pages; 1 for huge pages
 * @data: their content, NULL for zeros
 * @move: as for postcopy_place(), if all pages can be placed together
 *
 * Places those that were not received before, unless another thread does.
 * Returns 0, or negative errno after it has reported the error; they can be
 * placed later.
 */
int postcopy_receive_pages(MigrationIncomingState *mis,
                           const PostcopyPage *page, unsigned n, void *data,
                           bool move);

/* The same for one page of any size */
static inline int postcopy_receive_page(MigrationIncomingState *mis,
                                        const PostcopyPage *page, void *data)
{
    return postcopy_receive_pages(mis, page, 1, data, false);
}

/*
 * The connection is broken: pages of which only a part was received, and those
 * that were not placed, will be sent again.  No channel receives meanwhile.
 */
void postcopy_unclaim_all(MigrationIncomingState *mis);

#endif
