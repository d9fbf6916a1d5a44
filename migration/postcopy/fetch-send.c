/*
 * Postcopy: the pages that the source sends on fetch channels
 *
 * A channel's thread answers requests: it takes the pages out of the dirty
 * bitmap under bitmap_mutex.  It sends them without this lock, directly from
 * guest memory: the source's guest does not run any more.  The migration thread
 * sends, in runs, the pages that no thread has requested.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/cutils.h"
#include "qemu/lockable.h"
#include "qapi/qapi-types-migration.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "migration/migration-stats.h"
#include "migration/options.h"
#include "migration/qemu-file.h"
#include "migration/ram.h"
#include "fetch-src.h"
#include "trace.h"

/* Bytes from @offset on that are all zeros or all not, in whole host pages */
static ram_addr_t postcopy_fetch_alike(RAMBlock *rb, ram_addr_t offset,
                                       ram_addr_t end, bool *zero)
{
    size_t size = qemu_ram_pagesize(rb);
    ram_addr_t at = offset;

    *zero = buffer_is_zero(rb->host + at, size);
    do {
        at += size;
    } while (at < end && at - offset < POSTCOPY_FRAME_MAX_LENGTH &&
             buffer_is_zero(rb->host + at, size) == *zero);
    return at - offset;
}

/* Put pages that are in no bitmap any more.  With the channel's lock. */
static void postcopy_fetch_put(PostcopyFetchSource *ch, const PostcopyRun *run)
{
    PostcopyFrame frame = {
        .type = run->zero ? POSTCOPY_FRAME_ZERO : POSTCOPY_FRAME_PAGES,
        .rb = run->rb,
        .offset = run->start,
        .length = run->length,
    };
    PostcopyFetchCounts *counts = &ch->s->postcopy->counts[ch->id];
    bool release = migrate_release_ram() && migration_in_postcopy();
    uint64_t target_pages = run->length / qemu_target_page_size();
    uint64_t pages = run->length / qemu_ram_pagesize(run->rb);

    trace_postcopy_fetch_send(ch->id, frame.type, run->rb->idstr, run->start,
                              run->length);
    postcopy_frame_put(ch->out, &frame, &ch->last);
    stat64_add(&counts->frames, 1);
    if (run->zero) {
        stat64_add(&mig_stats.zero_pages, target_pages);
        stat64_add(&counts->zero_pages, pages);
        if (release) {
            ram_discard_range(run->rb->idstr, run->start, run->length);
        }
    } else {
        stat64_add(&mig_stats.normal_pages, target_pages);
        stat64_add(&counts->pages, pages);
        ram_transferred_add(run->length);
        ch->unsent += run->length;
        qemu_put_buffer_async(ch->out, run->rb->host + run->start, run->length,
                              release);
    }
}

/*
 * Put those from @at to @end that were not sent yet.  Returns whether there
 * were any.  With the channel's lock.
 */
static bool postcopy_fetch_put_unsent(PostcopyFetchSource *ch, RAMBlock *rb,
                                      ram_addr_t at, ram_addr_t end)
{
    ram_addr_t run_end;
    bool any = false;

    while (at < end && !qemu_file_get_error(ch->out) &&
           ram_claim_host_pages(rb, &at, end, &run_end)) {
        any = true;
        while (at < run_end) {
            PostcopyRun run = { .rb = rb, .start = at };

            run.length = postcopy_fetch_alike(rb, at, run_end, &run.zero);
            postcopy_fetch_put(ch, &run);
            at += run.length;
        }
    }
    return any;
}

/*
 * Put the pages around @near that were not requested, as far as the link has
 * the time: a request would cost more.  With the channel's lock.
 */
static void postcopy_fetch_put_along(PostcopyFetchSource *ch, RAMBlock *rb,
                                     ram_addr_t near)
{
    size_t size = qemu_target_page_size();
    ram_addr_t window = postcopy_background_along(ch->s) * size;
    ram_addr_t at = QEMU_ALIGN_DOWN(near, window);

    /*
     * The window may end within a larger page.  A discarded page must not be
     * read.
     */
    if (qemu_ram_pagesize(rb) == size &&
        !memory_region_has_ram_discard_manager(rb->mr)) {
        postcopy_fetch_put_unsent(ch, rb, at,
                                  MIN(at + window, rb->used_length));
    }
}

/* With the channel's lock */
static int postcopy_fetch_flush(PostcopyFetchSource *ch)
{
    int ret;

    ch->unsent = 0;
    /* Set it behind the flush, too: meanwhile the link may be found empty */
    qatomic_set(&ch->sent, true);
    ret = qemu_fflush(ch->out);
    qatomic_set(&ch->sent, true);
    return ret;
}

int postcopy_fetch_serve(PostcopyFetchSource *ch, const PostcopyFrame *frame,
                         bool queued)
{
    bool along = ram_note_request(frame->rb, frame->offset);
    bool sent;

    qatomic_set(&ch->requested, true);
    QEMU_LOCK_GUARD(&ch->lock);
    sent = postcopy_fetch_put_unsent(ch, frame->rb, frame->offset,
                                     frame->offset + frame->length);
    if (queued && ch->unsent < POSTCOPY_FETCH_BATCH) {
        return qemu_file_get_error(ch->out);
    }
    if (postcopy_fetch_flush(ch) || queued || !sent || !along) {
        return qemu_file_get_error(ch->out);
    }
    postcopy_fetch_put_along(ch, frame->rb, frame->offset);
    return postcopy_fetch_flush(ch);
}

/* The background */

bool postcopy_fetch_has_any_background(MigrationState *s)
{
    /* On a shared channel, requested pages would wait for the background */
    return s->postcopy->channels && s->postcopy->channels->len > 1;
}

bool postcopy_fetch_has_background(MigrationState *s, RAMBlock *rb)
{
    return postcopy_fetch_has_any_background(s) &&
           qemu_ram_pagesize(rb) < POSTCOPY_FETCH_LARGE;
}

/*
 * Counted from the last channel on: requests use as few channels as possible,
 * from the first one on, which only they use.
 */
static PostcopyFetchSource *postcopy_fetch_of_turn(MigrationState *s)
{
    GPtrArray *channels = s->postcopy->channels;

    s->postcopy->turn %= channels->len - 1;
    return g_ptr_array_index(channels, channels->len - 1 - s->postcopy->turn);
}

ram_addr_t postcopy_fetch_run(MigrationState *s, RAMBlock *rb, ram_addr_t start,
                              ram_addr_t end, bool *zero)
{
    size_t size = qemu_ram_pagesize(rb);
    ram_addr_t length = end - start;

    if (!buffer_is_zero(rb->host + start, size)) {
        uint64_t bytes = ROUND_DOWN(postcopy_background_slice(s), size);

        length = MIN(length, MAX(bytes, size));
    }
    return start + postcopy_fetch_alike(rb, start, start + length, zero);
}

void postcopy_fetch_hold_run(MigrationState *s, RAMBlock *rb, ram_addr_t start,
                             ram_addr_t end, bool zero)
{
    if (!s->postcopy->run.rb) {
        s->postcopy->transferred = qemu_file_transferred(s->to_dst_file);
    }
    s->postcopy->run = (PostcopyRun) { rb, start, end - start, zero };
    s->postcopy->transferred += zero ? 0 : end - start;
}

int postcopy_fetch_put_run(MigrationState *s)
{
    PostcopyFetchSource *ch = postcopy_fetch_of_turn(s);

    QEMU_LOCK_GUARD(&ch->lock);
    postcopy_fetch_put(ch, &s->postcopy->run);
    s->postcopy->transferred = qemu_file_transferred(ch->out);
    return qemu_file_get_error(ch->out);
}

bool postcopy_fetch_end_slice(MigrationState *s, const uint32_t *ping)
{
    PostcopyFetchSource *ch;

    if (!s->postcopy->run.rb) {
        return false;
    }
    ch = postcopy_fetch_of_turn(s);
    WITH_QEMU_LOCK_GUARD(&ch->lock) {
        postcopy_fetch_put(ch, &s->postcopy->run);
        if (ping) {
            PostcopyFrame frame = {
                .type = POSTCOPY_FRAME_PING, .length = *ping
            };

            postcopy_frame_put(ch->out, &frame, &ch->last);
        }
        if (postcopy_fetch_flush(ch)) {
            qemu_file_set_error(s->to_dst_file, qemu_file_get_error(ch->out));
        }
    }
    s->postcopy->run.rb = NULL;
    if (ping) {
        /*
         * The pages before each PING use one channel, so that the destination's
         * threads place several stretches at the same time.  If the next
         * channel has had requests, the last one is used.
         */
        s->postcopy->turn++;
        if (qatomic_xchg(&postcopy_fetch_of_turn(s)->requested, false)) {
            s->postcopy->turn = 0;
        }
    }
    return true;
}
