/*
 * Postcopy: pages that are requested before they are missed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bitops.h"
#include "qemu/host-utils.h"
#include "qemu/units.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "fault.h"
#include "fetch-dst.h"
#include "incoming.h"
#include "stride.h"
#include "trace.h"

/* At most, in bytes: so none of 2 MiB, which are ahead by themselves */
#define POSTCOPY_FETCH_AHEAD (256 * KiB)

/* What goes along with an answer must not hide the step of a stream */
QEMU_BUILD_BUG_ON(POSTCOPY_STREAM_NEAR < POSTCOPY_FETCH_ALONG_MAX);

/* Of a vCPU */
typedef struct PostcopyFetchStreams {
    /* Of faults for which it has left KVM; its own thread's */
    PostcopyStreams exits;
    /* Of those that userfaultfd tells of; the fault thread's */
    PostcopyStreams uffd;
} PostcopyFetchStreams;

struct PostcopyFetchAhead {
    unsigned cpus;
    PostcopyFetchStreams streams[];
};

PostcopyFetchAhead *postcopy_fetch_ahead_new(unsigned cpus)
{
    PostcopyFetchAhead *ahead;

    ahead = g_malloc0(sizeof(*ahead) + cpus * sizeof(ahead->streams[0]));
    ahead->cpus = cpus;
    return ahead;
}

/*
 * Pages to request beside @page, which also learns whether it is to come alone:
 * returns a mask as postcopy_requests_ahead() does, of pages from @first on in
 * steps of @step.
 */
static uint64_t postcopy_fetch_ahead_pages(PostcopyStreams *streams,
                                           MigrationIncomingState *mis,
                                           PostcopyPage *page,
                                           PostcopyPage *first, int64_t *step)
{
    unsigned n, most = MIN(POSTCOPY_STREAM_WINDOW,
                           POSTCOPY_FETCH_AHEAD / page->size);
    uint64_t pages = page->rb->postcopy_length / page->size;
    /* Blocks differ in it: no stream goes from one to another */
    uint64_t begin = page->rb->offset / page->size;
    uint64_t index, number, mask;

    /* Parts of such memory are never sent */
    if (!most || memory_region_has_ram_discard_manager(page->rb->mr)) {
        return 0;
    }
    n = postcopy_streams_fault(streams, begin + page->start / page->size, most,
                               &number, step, &page->alone);
    /* Below the begin, it is a large number */
    index = number - begin;
    while (n && (index >= pages || index + (n - 1) * *step >= pages)) {
        n--;
    }
    if (!n) {
        return 0;
    }
    *first = postcopy_page(page->rb, index * page->size);
    first->channel = page->channel;
    mask = postcopy_requests_ahead(mis->postcopy->requests, first, *step, n);
    trace_postcopy_fetch_ahead(page->rb->idstr, page->start, first->start,
                               *step, n, mask);
    return mask;
}

/* A request for @n pages, from number @at of those from @first on in @step */
static PostcopyFrame postcopy_fetch_pages(const PostcopyPage *first,
                                          int64_t step, unsigned at,
                                          unsigned n)
{
    bool neighbours = step == 1 || step == -1;
    /* Neighbours are sent in the order of their addresses */
    PostcopyPage page = postcopy_page_at(first,
                                         (step == -1 ? at + n - 1 : at) * step);

    return (PostcopyFrame) {
        .type = POSTCOPY_FRAME_REQUEST,
        .rb = page.rb,
        .offset = page.start,
        .length = page.size * (neighbours ? n : 1),
        .more = neighbours ? 0 : n - 1,
        .step = neighbours || n == 1 ? 0 : step * (int64_t)page.size,
    };
}

bool postcopy_fetch_ahead(MigrationIncomingState *mis, PostcopyPage *page,
                          const PostcopyFault *fault, bool request)
{
    PostcopyFetchAhead *ahead = mis->postcopy->fetch->ahead;
    PostcopyFetchStreams *streams;
    PostcopyFrame frame;
    PostcopyPage first;
    uint64_t mask;
    int64_t step;

    if (fault->cpu < 0 || fault->cpu >= ahead->cpus) {
        return false;
    }
    streams = &ahead->streams[fault->cpu];
    mask = postcopy_fetch_ahead_pages(fault->waiter ? &streams->exits
                                                    : &streams->uffd,
                                      mis, page, &first, &step);
    if (!mask) {
        return false;
    }
    /* All by the same channel, and after the last its buffer is empty */
    if (request && step != -1 &&
        postcopy_page_at(page, step).host == first.host) {
        /* One with the others */
        mask = mask << 1 | 1;
        first = *page;
    } else if (request) {
        /* What is missed now comes first */
        frame = postcopy_fetch_pages(page, 1, 0, 1);
        postcopy_fetch_send_request(mis, page->channel, &frame, true);
    }
    while (mask) {
        unsigned at = ctz64(mask), n = cto64(mask >> at);

        mask &= ~MAKE_64BIT_MASK(at, n);
        frame = postcopy_fetch_pages(&first, step, at, n);
        postcopy_fetch_send_request(mis, page->channel, &frame, mask);
    }
    return true;
}
