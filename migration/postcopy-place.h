/*
 * Postcopy: making received pages visible to the guest
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_PLACE_H
#define MIGRATION_POSTCOPY_PLACE_H

#include "postcopy-request.h"

/**
 * postcopy_place: make a host page of RAM appear, and wake who waits for it
 *
 * @ufd: the userfaultfd with which the page is registered
 * @from: its content; NULL for zeros, where the kernel has UFFDIO_ZEROPAGE for
 *     such memory; the page's own address in the mirror (postcopy-mirror.h),
 *     if it was filled there
 * @wake: wake who waits in userfaultfd with the placement; what
 *     postcopy_request_claim() said
 *
 * The caller has claimed the page (postcopy_request_claim()).
 * Returns 0, or negative errno after it has reported the error: -ENOENT if the
 * memory is not registered (any more), -ESRCH if its process has ended, -ENOMEM
 * if there is none for the page, -EEXIST if there is a page that was never
 * received.  The page has not been received then, and can be placed later.
 * EAGAIN of the kernel is tried again, from where it stopped.
 * Any thread, no locks needed.
 */
int postcopy_place(PostcopyRequests *r, int ufd, const PostcopyPage *page,
                   void *from, bool wake);

#endif
