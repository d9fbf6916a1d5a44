/*
 * Postcopy: making received pages visible to the guest
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PLACE_H
#define MIGRATION_POSTCOPY_PLACE_H

#include "request.h"

/**
 * postcopy_place: make host pages of RAM visible, and wake their waiters
 *
 * @ufd: the userfaultfd with which the pages are registered
 * @page: the first one
 * @n: number of neighbouring pages; 1 for huge pages
 * @from: their content; NULL for zeros, where the kernel has UFFDIO_ZEROPAGE
 *     for such memory; the page's own address in the mirror
 *     (mirror.h), if it was filled there
 * @move: @from is anonymous memory that the caller does not need any more: the
 *     kernel may take its pages, so that huge ones stay huge and nothing is
 *     copied
 * @wake: the placement wakes userfaultfd waiters; PostcopyClaim.uffd
 *
 * The caller has claimed the pages together (postcopy_request_claim()); the
 * claim has ended when this returns.
 * Returns 0, or negative errno after it has reported the error: -ENOENT if the
 * memory is not registered (any more), -ESRCH if its process has exited,
 * -ENOMEM if there is no memory for a page, -EEXIST if a page is present that
 * was never received.  The failed page and those behind it were not received
 * then, and can be placed later.
 * When the kernel returns EAGAIN, this continues where the kernel stopped.
 * Any thread, no locks needed.
 */
int postcopy_place(PostcopyRequests *r, int ufd, const PostcopyPage *page,
                   unsigned n, void *from, bool move, bool wake);

#endif
