/*
 * Postcopy: pages that the destination receives on fetch channels
 *
 * Each channel has a thread that reads it.
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

/* A huge page.  Its parts go through the QEMUFile's buffer. */
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

/* Read @size bytes, which do not fit into the QEMUFile's buffer, past it */
static void postcopy_fetch_read(PostcopyFetchChannel *ch, uint8_t *to,
                                size_t size)
{
    size_t there = qemu_get_buffer(ch->in, to, qemu_file_buffered(ch->in));
    Error *err = NULL;

    if (qio_channel_read_all(qemu_file_get_ioc(ch->in), (char *)to + there,
                             size - there, &err)) {
        qemu_file_set_error_obj(ch->in, -EIO, err);
    }
}

/*
 * Small pages.  They were sent as a run, short enough that a vCPU may wait for
 * it, so all are placed at once.
 */
static int postcopy_fetch_receive_small(PostcopyFetchChannel *ch,
                                        const PostcopyPage *page, bool zero,
                                        unsigned *n)
{
    PostcopyTmpPage *tmp =
        &ch->mis->postcopy_tmp_pages[RAM_CHANNEL_PRECOPY + 1 + ch->id];
    uint8_t *data = NULL;
    size_t size;

    if (!zero) {
        *n = MIN(*n, POSTCOPY_RUN_PAGES);
        size = *n * page->size;
        if (size <= POSTCOPY_FETCH_BATCH) {
            qemu_peek_buffer(ch->in, &data, size, 0);
            /* @data stays valid until the next byte is read */
            qemu_file_skip(ch->in, size);
        } else {
            data = tmp->run;
            postcopy_fetch_read(ch, data, size);
        }
        if (qemu_file_get_error(ch->in)) {
            return -EIO;
        }
    }
    return postcopy_receive_pages(ch->mis, page, *n, data, false);
}

/* Pages of a frame.  Returns 0, or negative errno; placement reports its own */
static int postcopy_fetch_receive_pages(PostcopyFetchChannel *ch,
                                        PostcopyFrame *frame)
{
    PostcopyFetchCounts *counts = &ch->mis->postcopy->fetch->counts[ch->id];
    bool zero = frame->type == POSTCOPY_FRAME_ZERO;
    int ret = 0;

    while (frame->length && !ret) {
        PostcopyPage page = postcopy_page(frame->rb, frame->offset);
        unsigned n = frame->length / page.size;

        if (page.size == qemu_target_page_size()) {
            ret = postcopy_fetch_receive_small(ch, &page, zero, &n);
        } else {
            n = 1;
            ret = postcopy_fetch_receive_huge(ch, &page, zero);
        }
        stat64_add(zero ? &counts->zero_pages : &counts->pages, n);
        frame->offset += n * page.size;
        frame->length -= n * page.size;
    }
    return ret;
}

static void postcopy_fetch_count_end(PostcopyFetch *fetch)
{
    QEMU_LOCK_GUARD(&fetch->lock);
    fetch->n_ended++;
    qemu_cond_broadcast(&fetch->changed);
}

bool postcopy_fetch_receive_all(PostcopyFetchChannel *ch)
{
    PostcopyFetch *fetch = ch->mis->postcopy->fetch;
    PostcopyFrame frame = { };
    bool ended = false;
    Error *err = NULL;

    while (postcopy_frame_get(ch->in, &frame, true, &err)) {
        if (ended) {
            error_report("postcopy: fetch channel %u: a frame of type %u "
                         "behind the end", ch->id, frame.type);
            return false;
        }
        if (frame.type == POSTCOPY_FRAME_END) {
            ended = true;
            postcopy_fetch_count_end(fetch);
            continue;
        }
        if (frame.type == POSTCOPY_FRAME_PING) {
            migrate_send_rp_pong(ch->mis, frame.length);
            continue;
        }
        stat64_add(&fetch->counts[ch->id].frames, 1);
        if (postcopy_fetch_receive_pages(ch, &frame)) {
            return false;
        }
    }
    if (!qemu_file_get_error(ch->in)) {
        error_reportf_err(err, "postcopy: fetch channel %u: ", ch->id);
        return false;
    }
    /* Only the main channel reports that the connection is lost */
    trace_postcopy_fetch_gone(ch->id, ended, err ? error_get_pretty(err) : "");
    error_free(err);
    return ended;
}
