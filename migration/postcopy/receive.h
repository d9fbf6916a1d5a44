/*
 * Postcopy: where a page is received, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_RECEIVE_H
#define MIGRATION_POSTCOPY_RECEIVE_H

#include "migration/migration.h"
#include "request.h"

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
 * @data: the page's content; tmp->buffer, or that of the QEMUFile
 *
 * Returns 0, or negative errno after it has reported the error.
 */
int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                         RAMBlock *rb, void *data);

/* Report that the source lies: @page was not requested.  Returns -EINVAL. */
int postcopy_receive_unasked(const PostcopyPage *page);

/**
 * postcopy_receive_pages: pages have come by a channel for requests
 *
 * @page: the first one; no huge page
 * @n: how many there are, side by side
 * @data: their content, NULL for zeros
 * @requested: they must have been requested
 *
 * Places those that have not been received.  Returns 0, or negative errno
 * after it has reported the error: -EINVAL for a page that was not requested.
 */
int postcopy_receive_pages(MigrationIncomingState *mis,
                           const PostcopyPage *page, unsigned n, void *data,
                           bool requested);

/*
 * A page that is never sent was missed: place zeros, unless another thread does
 * or has.  Any thread, no locks needed.  Returns 0, or negative errno after it
 * has reported the error; the page can be placed later.
 */
int postcopy_receive_zero(MigrationIncomingState *mis,
                          const PostcopyPage *page);

/*
 * The connection is broken: pages of which only a part has come will be sent
 * again.  No channel receives meanwhile.
 */
void postcopy_receive_abort(MigrationIncomingState *mis);

#endif
