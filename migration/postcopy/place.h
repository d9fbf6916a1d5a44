/*
 * Postcopy: making received pages visible to the guest
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PLACE_H
#define MIGRATION_POSTCOPY_PLACE_H

#include "request.h"

/**
 * postcopy_place: make host pages of RAM appear, and wake who waits for them
 *
 * @ufd: the userfaultfd with which the pages are registered
 * @page: the first one
 * @n: how many there are, side by side; 1 for huge pages
 * @from: their content; NULL for zeros, where the kernel has UFFDIO_ZEROPAGE
 *     for such memory; the page's own address in the mirror
 *     (mirror.h), if it was filled there
 * @move: @from is anonymous memory of the caller, who needs it no longer: the
 *     kernel may take its pages, so that huge ones stay huge and nothing is
 *     copied
 * @wake: wake who waits in userfaultfd with the placement; what
 *     postcopy_request_claim() said
 *
 * The caller has claimed the pages together (postcopy_request_claim()); the
 * claim has ended when this returns.
 * Returns 0, or negative errno after it has reported the error: -ENOENT if the
 * memory is not registered (any more), -ESRCH if its process has ended, -ENOMEM
 * if there is none for a page, -EEXIST if there is a page that was never
 * received.  That page, and those behind it, have not been received then, and
 * can be placed later.
 * EAGAIN of the kernel is tried again, from where it stopped.
 * Any thread, no locks needed.
 */
int postcopy_place(PostcopyRequests *r, int ufd, const PostcopyPage *page,
                   unsigned n, void *from, bool move, bool wake);

#endif
