/*
 * Postcopy: where a page is received, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_RECEIVE_H
#define MIGRATION_POSTCOPY_RECEIVE_H

#include "migration/migration.h"
#include "request.h"

/*
 * So many small pages are placed at once, at most, and are sent together by a
 * fetch channel.  On the main channel that is a memory copy more for each, but
 * one call of the kernel for all, whose own work for a page takes no longer.
 */
#define POSTCOPY_RUN_PAGES 128

/**
 * postcopy_receive_begin: the first part of a host page has been announced
 *
 * @tmp: of the channel, with host_addr set
 *
 * Sets tmp->buffer, where its parts go: the page itself in the second mapping
 * that shared huge pages have, or the temporary page of the channel.  Called by
 * the channel's thread, no locks needed.  Returns 0, or negative errno after it
 * has reported the error; the page can be sent again.
 */
int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                           RAMBlock *rb);

/**
 * postcopy_receive_end: all parts have come; make the page visible
 *
 * @f: where from
 * @data: the page's content; tmp->buffer, or that of @f
 *
 * A small page that @f has a neighbour of in its buffer, or may have, is placed
 * with it, or by postcopy_receive_run_end().  Returns 0, or negative errno
 * after it has reported the error.
 */
int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                         QEMUFile *f, RAMBlock *rb, void *data);

/* The same of what @channel has received and not placed */
int postcopy_receive_run_end(MigrationIncomingState *mis, unsigned channel);

/**
 * postcopy_receive_pages: small pages have come
 *
 * @page: the first one; no huge page
 * @n: how many there are, side by side
 * @data: their content, NULL for zeros
 * @move: as for postcopy_place(); if all of them can be placed together
 *
 * Places those that have not been received.  Returns 0, or negative errno
 * after it has reported the error.
 */
int postcopy_receive_pages(MigrationIncomingState *mis,
                           const PostcopyPage *page, unsigned n, void *data,
                           bool move);

/**
 * postcopy_receive_page: a host page of any size has come, as a whole
 *
 * @data: its content, NULL for zeros
 *
 * Places it, unless it has been received or another thread does.  Returns 0, or
 * negative errno after it has reported the error; the page can be placed later.
 */
int postcopy_receive_page(MigrationIncomingState *mis, const PostcopyPage *page,
                          void *data);

/*
 * A page that is never sent was missed: place zeros, unless another thread does
 * or has.  Any thread, no locks needed.  Returns 0, or negative errno after it
 * has reported the error; the page can be placed later.
 */
int postcopy_receive_zero(MigrationIncomingState *mis,
                          const PostcopyPage *page);

/*
 * The connection is broken: pages of which only a part has come, and those that
 * have not been placed, will be sent again.  No channel receives meanwhile.
 */
void postcopy_receive_abort(MigrationIncomingState *mis);

#endif
