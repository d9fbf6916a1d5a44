/*
 * Postcopy: where a page is received, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "exec/ramblock.h"
#include "migration/postcopy-ram.h"
#include "migration/ram.h"
#include "fault.h"
#include "incoming.h"
#include "mirror.h"
#include "place.h"
#include "receive.h"
#include "request.h"
#include "trace.h"

int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                           RAMBlock *rb)
{
    PostcopyPage page = postcopy_page(rb, tmp->host_addr - (void *)rb->host);
    void *mirror = postcopy_mirror(rb, page.start);
    PostcopyClaim claim;
    int ret;

    tmp->buffer = tmp->tmp_huge_page;
    postcopy_request_claim(mis->postcopy->requests, &page, 1, false, &claim);
    tmp->drop = claim.drop;
    tmp->wake = claim.uffd;
    tmp->writable = claim.vcpu;
    tmp->asked = claim.asked;
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
                                  const PostcopyPage *page, unsigned n,
                                  void *from, bool wake, bool writable)
{
    int ret;

    if (!from && (writable || !qemu_ram_is_uf_zeroable(page->rb))) {
        from = mis->postcopy_tmp_zero_page;
    }
    ret = postcopy_place(mis->postcopy->requests, mis->userfault_fd, page, n,
                         from, wake);
    for (unsigned i = 0; i < n; i++) {
        ram_addr_t at = page->start + i * page->size;

        /* After an error, those before it have come nevertheless */
        if (!ret || ramblock_recv_bitmap_test_byte_offset(page->rb, at)) {
            ret = postcopy_notify_shared_wake(page->rb, at) ?: ret;
        }
    }
    return ret;
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
    return postcopy_receive_place(mis, &page, 1, data, tmp->wake,
                                  tmp->writable);
}

int postcopy_receive_unasked(const PostcopyPage *page)
{
    error_report("postcopy: a page came that was not requested: offset 0x"
                 RAM_ADDR_FMT " of %s", page->start,
                 qemu_ram_get_idstr(page->rb));
    return -EINVAL;
}

int postcopy_receive_pages(MigrationIncomingState *mis,
                           const PostcopyPage *page, unsigned n, void *data,
                           bool requested)
{
    PostcopyPage first = *page;
    bool zero = !data;

    while (n) {
        /* Zeros that are copied are those of one page */
        unsigned most = zero && !qemu_ram_is_uf_zeroable(first.rb) ? 1 : n;
        PostcopyClaim claim;
        unsigned alike;
        int ret = 0;

        alike = postcopy_request_claim(mis->postcopy->requests, &first, most,
                                       zero, &claim);
        if (!claim.drop && requested && !claim.asked) {
            ret = postcopy_receive_unasked(&first);
        }
        if (!claim.drop && !ret) {
            ret = postcopy_receive_place(mis, &first, alike, data, claim.uffd,
                                         claim.vcpu);
        }
        if (ret) {
            return ret;
        }
        first = postcopy_page_at(&first, alike);
        data += zero ? 0 : alike * first.size;
        n -= alike;
    }
    return 0;
}

int postcopy_receive_zero(MigrationIncomingState *mis, const PostcopyPage *page)
{
    PostcopyClaim claim;
    int ret = 0;

    if (!postcopy_requests_enter(mis->postcopy->requests)) {
        return 0;
    }
    postcopy_request_claim(mis->postcopy->requests, page, 1, true, &claim);
    if (!claim.drop) {
        ret = postcopy_receive_place(mis, page, 1, NULL, claim.uffd,
                                     claim.vcpu);
    }
    postcopy_requests_leave(mis->postcopy->requests);
    return ret;
}

void postcopy_receive_abort(MigrationIncomingState *mis)
{
    postcopy_requests_unclaim_all(mis->postcopy->requests);
}
