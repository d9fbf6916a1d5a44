/*
 * Postcopy: where a page is received, and how it is placed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "migration/inject.h"
#include "migration/postcopy-ram.h"
#include "migration/qemu-file.h"
#include "migration/ram.h"
#include "fault.h"
#include "incoming.h"
#include "mirror.h"
#include "place.h"
#include "receive.h"
#include "request.h"
#include "trace.h"

/* Maximum size of a page's header in the stream, with the name of its block */
#define PAGE_HEADER (sizeof(uint64_t) + 1 + UINT8_MAX)

/* Small pages are claimed when a run of neighbours was received. */
static bool postcopy_receive_in_runs(const PostcopyPage *page)
{
    return page->size == qemu_target_page_size();
}

/*
 * @from: as for postcopy_place()
 * @writable: a vCPU waits for a page.  The kernel maps its zero page read-only,
 *     for which the vCPU would leave KVM_RUN once more.
 */
static int postcopy_receive_place(MigrationIncomingState *mis,
                                  const PostcopyPage *page, unsigned n,
                                  void *from, bool move, bool wake,
                                  bool writable)
{
    int ret;

    if (!from && (writable || !qemu_ram_is_uf_zeroable(page->rb))) {
        from = mis->postcopy_tmp_zero_page;
    }
    ret = postcopy_place(mis->postcopy->requests, mis->userfault_fd, page, n,
                         from, move, wake);
    for (unsigned i = 0; i < n; i++) {
        ram_addr_t at = page->start + i * page->size;

        /* After an error, the pages before it were received nevertheless */
        if (!ret || ramblock_recv_bitmap_test_byte_offset(page->rb, at)) {
            ret = postcopy_notify_shared_wake(page->rb, at) ?: ret;
        }
    }
    return ret;
}

int postcopy_receive_pages(MigrationIncomingState *mis,
                           const PostcopyPage *page, unsigned n, void *data,
                           bool move)
{
    PostcopyPage first = *page;
    bool zero = !data;

    while (n) {
        /* The zeros to copy are those of one page */
        unsigned most = zero && !qemu_ram_is_uf_zeroable(first.rb) ? 1 : n;
        PostcopyClaim claim;
        unsigned alike;
        int ret = 0;

        alike = postcopy_request_claim(mis->postcopy->requests, &first, most,
                                       zero, &claim);
        if (!claim.drop) {
            ret = postcopy_receive_place(mis, &first, alike, data,
                                         move && alike == n, claim.uffd,
                                         claim.vcpu);
        }
        if (ret) {
            return ret;
        }
        move = false;
        first = postcopy_page_at(&first, alike);
        data += zero ? 0 : alike * first.size;
        n -= alike;
    }
    return 0;
}

static int postcopy_receive_place_run(MigrationIncomingState *mis,
                                      PostcopyTmpPage *tmp)
{
    PostcopyPage first;
    unsigned n = tmp->run_pages;

    if (!n) {
        return 0;
    }
    first = postcopy_page(tmp->run_block, tmp->run_start);
    tmp->run_pages = 0;
    return postcopy_receive_pages(mis, &first, n,
                                  tmp->run_zero ? NULL : tmp->run, false);
}

/* Whether @page follows the last page of @tmp's run */
static bool postcopy_receive_continues(const PostcopyTmpPage *tmp,
                                       const PostcopyPage *page, bool zero)
{
    return tmp->run_pages < POSTCOPY_RUN_PAGES && tmp->run_zero == zero &&
           tmp->run_block == page->rb &&
           tmp->run_start + tmp->run_pages * page->size == page->start;
}

/*
 * Receive one page that is placed with its neighbours; @data NULL: zeros.  It
 * is placed at once unless @f has the whole next one in its buffer: to read
 * more may take a wait.
 */
static int postcopy_receive_run(MigrationIncomingState *mis,
                                PostcopyTmpPage *tmp, QEMUFile *f,
                                const PostcopyPage *page, void *data)
{
    bool last = qemu_file_buffered(f) < PAGE_HEADER + page->size ||
                migration_inject_without("neighbours");
    int ret = 0;

    if (!postcopy_receive_continues(tmp, page, !data)) {
        ret = postcopy_receive_place_run(mis, tmp);
        if (ret || last) {
            return ret ?: postcopy_receive_pages(mis, page, 1, data, false);
        }
        tmp->run_block = page->rb;
        tmp->run_start = page->start;
        tmp->run_zero = !data;
    }
    if (data) {
        memcpy(tmp->run + tmp->run_pages * page->size, data, page->size);
    }
    tmp->run_pages++;
    return last ? postcopy_receive_place_run(mis, tmp) : 0;
}

int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                           RAMBlock *rb)
{
    PostcopyPage page = postcopy_page(rb, tmp->host_addr - (void *)rb->host);
    void *mirror = postcopy_mirror(rb, page.start);
    PostcopyClaim claim;
    int ret;

    tmp->buffer = tmp->tmp_huge_page;
    if (postcopy_receive_in_runs(&page)) {
        return 0;
    }
    /* The run may be complete, and a vCPU may wait for its pages */
    ret = postcopy_receive_place_run(mis, tmp);
    if (ret) {
        return ret;
    }
    postcopy_request_claim(mis->postcopy->requests, &page, 1, false, &claim);
    tmp->drop = claim.drop;
    tmp->wake = claim.uffd;
    tmp->writable = claim.vcpu;
    if (tmp->drop) {
        /* The guest uses the page, or another channel fills it: do not write */
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

int postcopy_receive_run_end(MigrationIncomingState *mis, unsigned channel)
{
    /* If postcopy is only for bitmaps of disks, RAM has an end, too */
    return mis->postcopy_tmp_pages ?
        postcopy_receive_place_run(mis, &mis->postcopy_tmp_pages[channel]) : 0;
}

int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                         QEMUFile *f, RAMBlock *rb, void *data)
{
    PostcopyPage page = postcopy_page(rb, tmp->host_addr - (void *)rb->host);

    if (postcopy_receive_in_runs(&page)) {
        return postcopy_receive_run(mis, tmp, f, &page,
                                    tmp->all_zero ? NULL : data);
    }
    if (tmp->drop) {
        return 0;
    }
    if (tmp->all_zero && !postcopy_mirror(rb, page.start)) {
        data = NULL;
    }
    return postcopy_receive_place(mis, &page, 1, data, false, tmp->wake,
                                  tmp->writable);
}

void postcopy_unclaim_all(MigrationIncomingState *mis)
{
    for (unsigned i = 0; i < mis->postcopy_channels; i++) {
        mis->postcopy_tmp_pages[i].run_pages = 0;
    }
    postcopy_requests_unclaim_all(mis->postcopy->requests);
}
