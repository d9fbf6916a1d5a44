/*
 * Postcopy: where a page is received, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/madvise.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "postcopy-mirror.h"
#include "postcopy-ram.h"
#include "postcopy-receive.h"
#include "postcopy-request.h"
#include "trace.h"

int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *page,
                           RAMBlock *rb, bool zero)
{
    ram_addr_t start = page->host_addr - (void *)rb->host;
    void *mirror = postcopy_mirror(rb, start);

    page->buffer = page->tmp_huge_page;
    if (!mirror) {
        return 0;
    }
    if (!postcopy_request_claim(mis->page_requests, rb, start,
                                page->host_addr)) {
        /* The guest uses the page, or the other channel fills it: hands off */
        trace_postcopy_receive_twice(rb->idstr, start);
        return 0;
    }
    page->buffer = mirror;
    /*
     * A write to the mirror would get a page as well, but where there is none
     * it would end QEMU by SIGBUS.  Zeros need no page to be received into.
     */
    while (!zero && qemu_madvise(mirror, qemu_ram_pagesize(rb),
                                 QEMU_MADV_POPULATE_WRITE)) {
        int err = errno;

        if (err == EINTR || err == EAGAIN) {
            continue;
        }
        error_report("postcopy: no memory for the page at offset 0x"
                     RAM_ADDR_FMT " of %s: %s", start, rb->idstr,
                     strerror(err));
        return -err;
    }
    return 0;
}

int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *page,
                         RAMBlock *rb, void *data)
{
    ram_addr_t start = page->host_addr - (void *)rb->host;
    void *mirror = postcopy_mirror(rb, start);

    if (mirror && page->buffer != mirror) {
        return 0;
    }
    /* Small zero pages were not written to the mirror */
    if (page->all_zero &&
        (!mirror || qemu_ram_pagesize(rb) == qemu_target_page_size())) {
        return postcopy_place_page_zero(mis, page->host_addr, rb);
    }
    return postcopy_place_page(mis, page->host_addr, data, rb);
}

void postcopy_receive_abort(MigrationIncomingState *mis)
{
    postcopy_requests_unclaim_all(mis->page_requests);
}
