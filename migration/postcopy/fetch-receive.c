/*
 * Postcopy: what comes by fetch channels, on the destination
 *
 * One thread at a time reads a channel, whose turn it is (fetch-reader.h), and
 * leaves it to the next one between any two pages.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/lockable.h"
#include "qapi/error.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "migration/postcopy-ram.h"
#include "migration/ram.h"
#include "fault.h"
#include "fetch-dst.h"
#include "incoming.h"
#include "receive.h"
#include "trace.h"

/* A huge page.  Its parts pass the QEMUFile's buffer. */
static int postcopy_fetch_receive_huge(PostcopyFetchChannel *ch,
                                       const PostcopyPage *page, bool zero)
{
    MigrationIncomingState *mis = ch->mis;
    PostcopyTmpPage *tmp =
        &mis->postcopy_tmp_pages[RAM_CHANNEL_PRECOPY + 1 + ch->id];
    int ret;

    tmp->host_addr = page->host;
    tmp->all_zero = zero;
    ret = postcopy_receive_begin(mis, tmp, page->rb);
    if (ret) {
        return ret;
    }
    if (!zero) {
        qemu_get_buffer(ch->in, tmp->buffer, page->size);
    } else if (tmp->buffer != tmp->tmp_huge_page) {
        memset(tmp->buffer, 0, page->size);
    }
    return qemu_file_get_error(ch->in) ?:
           postcopy_receive_end(mis, tmp, ch->in, page->rb, tmp->buffer);
}

/* Small ones: those that are in the QEMUFile's buffer, which may be none */
static int postcopy_fetch_receive_small(PostcopyFetchChannel *ch,
                                        const PostcopyPage *page, bool zero,
                                        unsigned *n)
{
    uint8_t *data = NULL;

    if (!zero) {
        *n = MIN(*n, qemu_file_buffered(ch->in) / page->size);
        qemu_peek_buffer(ch->in, &data, *n * page->size, 0);
        /* What data points to stays until the next byte is read */
        qemu_file_skip(ch->in, *n * page->size);
    }
    return postcopy_receive_pages(ch->mis, page, *n, data);
}

static bool postcopy_fetch_is_huge(const PostcopyFrame *frame)
{
    return frame->length &&
           qemu_ram_pagesize(frame->rb) != qemu_target_page_size();
}

/* Pages of the last frame: returns how many.  Reports errors of contents. */
static unsigned postcopy_fetch_receive_pages(PostcopyFetchChannel *ch)
{
    PostcopyFrame *frame = &ch->frame;
    PostcopyFetchCounts *counts = &ch->mis->postcopy->fetch->counts[ch->id];
    PostcopyPage page = postcopy_page(frame->rb, frame->offset);
    bool zero = frame->type == POSTCOPY_FRAME_ZERO;
    unsigned n = 1;

    if (postcopy_fetch_is_huge(frame)) {
        ch->failed = postcopy_fetch_receive_huge(ch, &page, zero);
    } else {
        n = frame->length / page.size;
        ch->failed = postcopy_fetch_receive_small(ch, &page, zero, &n);
    }
    stat64_add(zero ? &counts->zero_pages : &counts->pages, n);
    frame->offset += n * page.size;
    frame->length -= n * page.size;
    return n;
}

static void postcopy_fetch_ended(PostcopyFetch *fetch)
{
    QEMU_LOCK_GUARD(&fetch->lock);
    fetch->ended++;
    qemu_cond_broadcast(&fetch->changed);
}

/* The next one is in the buffer */
static void postcopy_fetch_receive_frame(PostcopyFetchChannel *ch)
{
    PostcopyFrame *frame = &ch->frame;
    Error *err = NULL;

    if (!postcopy_frame_get(ch->in, frame, true, &err)) {
        error_reportf_err(err, "postcopy: fetch channel %u: ", ch->id);
        ch->failed = true;
        return;
    }
    trace_postcopy_fetch_receive(ch->id, frame->type, frame->offset,
                                 frame->length);
    ch->more = frame->more;
    if (ch->ended) {
        error_report("postcopy: fetch channel %u: a frame of type %u "
                     "behind the end", ch->id, frame->type);
        ch->failed = true;
    } else if (frame->type == POSTCOPY_FRAME_END) {
        ch->ended = true;
        postcopy_fetch_ended(ch->mis->postcopy->fetch);
    } else {
        stat64_add(&ch->mis->postcopy->fetch->counts[ch->id].frames, 1);
    }
}

/* A huge page is waited for until it is whole: by the thread */
static bool postcopy_fetch_needs_thread(PostcopyFetchChannel *ch)
{
    return ch->failed || qemu_file_get_error(ch->in) ||
           postcopy_fetch_is_huge(&ch->frame);
}

/* All that is in the buffer.  Waits for nothing but the rest of a huge page. */
static void postcopy_fetch_take_in(PostcopyFetchChannel *ch, bool huge)
{
    while (!ch->failed) {
        if (ch->frame.length) {
            if ((!huge && postcopy_fetch_is_huge(&ch->frame)) ||
                !postcopy_fetch_receive_pages(ch)) {
                return;
            }
        } else if (postcopy_frame_is_there(ch->in)) {
            postcopy_fetch_receive_frame(ch);
        } else {
            return;
        }
    }
}

/* Read what is there, or wait for it.  Returns false at the end. */
static bool postcopy_fetch_fill(PostcopyFetchChannel *ch)
{
    uint8_t *data;

    qemu_peek_buffer(ch->in, &data, qemu_file_buffered(ch->in) + 1, 0);
    return !qemu_file_get_error(ch->in);
}

unsigned postcopy_fetch_expected(PostcopyTurn *turn)
{
    PostcopyFetchChannel *ch = container_of(turn, PostcopyFetchChannel, turn);
    struct PostcopyIncoming *postcopy = ch->mis->postcopy;
    unsigned n = postcopy_requests_number_of(postcopy->requests, ch->id);

    /* What is left of the last frame may be what nobody has requested */
    return MAX(n, ch->more || ch->frame.length ||
                  qatomic_read(&postcopy->fetch->ending));
}

void postcopy_fetch_read(MigrationIncomingState *mis, PostcopyWaiter *waiter)
{
    PostcopyFetchChannel *ch = &mis->postcopy->fetch->channels[waiter->channel];
    bool to_thread;

    if (!postcopy_turn_take(&ch->turn, waiter)) {
        return;
    }
    do {
        postcopy_fetch_take_in(ch, false);
    } while (!postcopy_waiter_is_woken(waiter) &&
             !postcopy_fetch_needs_thread(ch) &&
             postcopy_turn_sleep(&ch->turn, waiter) &&
             postcopy_fetch_fill(ch));
    to_thread = postcopy_fetch_needs_thread(ch);
    trace_postcopy_fetch_turn(ch->id, to_thread);
    postcopy_turn_pass(&ch->turn, to_thread);
}

bool postcopy_fetch_receive_all(PostcopyFetchChannel *ch)
{
    Error *err = NULL;

    do {
        do {
            postcopy_fetch_take_in(ch, true);
            if (ch->failed) {
                return false;
            }
        } while (!qemu_file_get_error(ch->in) &&
                 postcopy_turn_offer(&ch->turn));
    } while (postcopy_fetch_fill(ch));

    /* That the connection has gone, the main one says for all */
    qemu_file_get_error_obj(ch->in, &err);
    trace_postcopy_fetch_gone(ch->id, ch->ended,
                              err ? error_get_pretty(err) : "");
    error_free(err);
    return ch->ended;
}
