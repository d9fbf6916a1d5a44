/*
 * Postcopy: where a page is received, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "exec/ramblock.h"
#include "postcopy-mirror.h"
#include "postcopy-place.h"
#include "postcopy-ram.h"
#include "postcopy-receive.h"
#include "postcopy-request.h"
#include "trace.h"

int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *page,
                           RAMBlock *rb)
{
    ram_addr_t start = page->host_addr - (void *)rb->host;
    void *mirror = postcopy_mirror(rb, start);
    int ret;

    page->buffer = page->tmp_huge_page;
    page->drop = !postcopy_request_claim(mis->page_requests, rb, start,
                                         page->host_addr, &page->wake,
                                         &page->writable);
    if (page->drop) {
        /* The guest uses the page, or the other channel fills it: hands off */
        trace_postcopy_receive_twice(rb->idstr, start);
        return 0;
    }
    if (!mirror) {
        return 0;
    }
    page->buffer = mirror;
    ret = postcopy_mirror_populate(mirror, qemu_ram_pagesize(rb));
    if (ret) {
        error_report("postcopy: no memory for the page at offset 0x"
                     RAM_ADDR_FMT " of %s: %s", start, rb->idstr,
                     strerror(-ret));
    }
    return ret;
}

/*
 * @from: as for postcopy_place()
 * @writable: the kernel maps its zero page read-only, which a vCPU that waits
 *     would leave KVM_RUN for once more
 */
static int place(MigrationIncomingState *mis, RAMBlock *rb, ram_addr_t start,
                 void *from, bool wake, bool writable)
{
    void *host = rb->host + start;
    int ret;

    if (!from && (writable || !qemu_ram_is_uf_zeroable(rb))) {
        from = mis->postcopy_tmp_zero_page;
    }
    ret = postcopy_place(mis->page_requests, mis->userfault_fd, rb, start, host,
                         from, qemu_ram_pagesize(rb), wake);
    if (ret) {
        postcopy_request_unclaim(mis->page_requests, host);
        return ret;
    }
    return postcopy_notify_shared_wake(rb, start);
}

int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *page,
                         RAMBlock *rb, void *data)
{
    ram_addr_t start = page->host_addr - (void *)rb->host;

    if (page->drop) {
        return 0;
    }
    if (page->all_zero && !postcopy_mirror(rb, start)) {
        data = NULL;
    }
    return place(mis, rb, start, data, page->wake, page->writable);
}

int postcopy_receive_zero(MigrationIncomingState *mis, RAMBlock *rb,
                          ram_addr_t start)
{
    bool wake, writable;
    int ret = 0;

    if (!postcopy_requests_enter(mis->page_requests)) {
        return 0;
    }
    if (postcopy_request_claim(mis->page_requests, rb, start, rb->host + start,
                               &wake, &writable)) {
        ret = place(mis, rb, start, NULL, wake, writable);
    }
    postcopy_requests_leave(mis->page_requests);
    return ret;
}

void postcopy_receive_abort(MigrationIncomingState *mis)
{
    postcopy_requests_unclaim_all(mis->page_requests);
}
