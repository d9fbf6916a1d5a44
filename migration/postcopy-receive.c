/*
 * Postcopy: where a page is received, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "exec/ramblock.h"
#include "postcopy-fault.h"
#include "postcopy-mirror.h"
#include "postcopy-place.h"
#include "postcopy-ram.h"
#include "postcopy-receive.h"
#include "postcopy-request.h"
#include "trace.h"

int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                           RAMBlock *rb)
{
    PostcopyPage page = postcopy_page(rb, tmp->host_addr - (void *)rb->host);
    void *mirror = postcopy_mirror(rb, page.start);
    int ret;

    tmp->buffer = tmp->tmp_huge_page;
    tmp->drop = !postcopy_request_claim(mis->page_requests, &page, &tmp->wake,
                                        &tmp->writable);
    if (tmp->drop) {
        /* The guest uses the page, or the other channel fills it: hands off */
        trace_postcopy_receive_twice(rb->idstr, page.start);
        return 0;
    }
    if (!mirror) {
        return 0;
    }
    tmp->buffer = mirror;
    ret = postcopy_mirror_populate(mirror, page.size);
    if (ret) {
        error_report("postcopy: no memory for the page at offset 0x"
                     RAM_ADDR_FMT " of %s: %s", page.start, rb->idstr,
                     strerror(-ret));
    }
    return ret;
}

/*
 * @from: as for postcopy_place()
 * @writable: the kernel maps its zero page read-only, which a vCPU that waits
 *     would leave KVM_RUN for once more
 */
static int postcopy_receive_place(MigrationIncomingState *mis,
                                  const PostcopyPage *page, void *from,
                                  bool wake, bool writable)
{
    int ret;

    if (!from && (writable || !qemu_ram_is_uf_zeroable(page->rb))) {
        from = mis->postcopy_tmp_zero_page;
    }
    ret = postcopy_place(mis->page_requests, mis->userfault_fd, page, from,
                         wake);
    if (ret) {
        postcopy_request_unclaim(mis->page_requests, page);
        return ret;
    }
    return postcopy_notify_shared_wake(page->rb, page->start);
}

int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                         RAMBlock *rb, void *data)
{
    PostcopyPage page = postcopy_page(rb, tmp->host_addr - (void *)rb->host);

    if (tmp->drop) {
        return 0;
    }
    if (tmp->all_zero && !postcopy_mirror(rb, page.start)) {
        data = NULL;
    }
    return postcopy_receive_place(mis, &page, data, tmp->wake, tmp->writable);
}

int postcopy_receive_zero(MigrationIncomingState *mis, const PostcopyPage *page)
{
    bool wake, writable;
    int ret = 0;

    if (!postcopy_requests_enter(mis->page_requests)) {
        return 0;
    }
    if (postcopy_request_claim(mis->page_requests, page, &wake, &writable)) {
        ret = postcopy_receive_place(mis, page, NULL, wake, writable);
    }
    postcopy_requests_leave(mis->page_requests);
    return ret;
}

void postcopy_receive_abort(MigrationIncomingState *mis)
{
    postcopy_requests_unclaim_all(mis->page_requests);
}
