/*
 * Postcopy: how the source sends what nobody has requested
 *
 * A requested page is sent at once, but waits for all that is before it in
 * buffers and queues: of the source's kernel, of a proxy, of the network, of
 * the destination.  None of them tells its length.  So the source finds out by
 * itself how much may be on its way (window.c): by PINGs, which every QEMU
 * answers from the thread that places the pages, after all that came before.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/lockable.h"
#include "qemu/timer.h"
#include "qapi/qapi-types-migration.h"
#include "migration/options.h"
#include "migration/qemu-file.h"
#include "migration/savevm.h"
#include "background.h"
#include "outgoing.h"
#include "trace.h"

/* Values of the window's PINGs: these bits are a tag, the others a number */
#define PING_TAG        0x70770000      /* "pw" */
#define PING_TAG_MASK   0xffff0000

/*
 * What a target page costs beside its bytes, in bytes: a page of zeros is nine
 * on the link, but nearly as much work as another one for both QEMUs.
 */
#define PAGE_COST       512

/* Bandwidth that was not used for so many ns may be used later */
#define BURST_NS        (2 * SCALE_MS)

#define WAIT_MS         100

void postcopy_background_init(PostcopyBackground *b)
{
    qemu_mutex_init(&b->lock);
}

void postcopy_background_destroy(PostcopyBackground *b)
{
    qemu_mutex_destroy(&b->lock);
}

void postcopy_background_reset(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;

    QEMU_LOCK_GUARD(&b->lock);
    b->active = false;
}

void postcopy_background_begin(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;

    QEMU_LOCK_GUARD(&b->lock);
    b->active = s->postcopy_window && migrate_postcopy_ram();
    b->slice_complete = false;
    b->file_bytes = qemu_file_transferred(s->to_dst_file);
    b->next_ns = get_clock();
    postcopy_window_begin(&b->window, b->next_ns);
    /* A PING must not wait until the slice before it has been acknowledged */
    qio_channel_set_delay(qemu_file_get_ioc(s->to_dst_file), false);
}

bool postcopy_background_sent(MigrationState *s, unsigned pages)
{
    PostcopyBackground *b = &s->postcopy->background;
    uint64_t bytes;

    if (!b->active) {
        return false;
    }
    /* Those of other channels are on their way, too */
    bytes = qemu_file_transferred(s->to_dst_file);
    WITH_QEMU_LOCK_GUARD(&b->lock) {
        b->slice_complete = postcopy_window_sent(&b->window,
            bytes - b->file_bytes + pages * PAGE_COST);
    }
    b->file_bytes = bytes;
    return b->slice_complete;
}

void postcopy_background_ping(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;
    uint64_t bytes, rate;
    uint32_t number;
    int64_t now;

    if (!b->active || !b->slice_complete) {
        return;
    }
    now = get_clock();
    WITH_QEMU_LOCK_GUARD(&b->lock) {
        bytes = b->window.unpinged;
        if (!postcopy_window_ping(&b->window, now, &number)) {
            return;
        }
    }
    b->slice_complete = false;
    rate = migrate_max_postcopy_bandwidth();
    if (rate) {
        b->next_ns = MAX(b->next_ns, now - BURST_NS) +
            bytes * NANOSECONDS_PER_SECOND / rate;
    }
    qemu_savevm_send_ping(s->to_dst_file, PING_TAG | (number & ~PING_TAG_MASK));
}

bool postcopy_background_ponged(MigrationState *s, uint32_t value)
{
    PostcopyBackground *b = &s->postcopy->background;
    PostcopyWindow *w = &b->window;
    uint32_t number;

    if ((value & PING_TAG_MASK) != PING_TAG) {
        return false;
    }
    QEMU_LOCK_GUARD(&b->lock);
    /* The next one, or else of an earlier connection, or a lie */
    number = w->answered + (uint16_t)(value - w->answered);
    if (postcopy_window_pong(w, get_clock(), number)) {
        trace_postcopy_window(w->size, w->sent - w->received, w->delay,
                              w->least_delay);
        if (b->waiting) {
            b->waiting = false;
            qemu_sem_post(&s->rate_limit_sem);
        }
    }
    return true;
}

bool postcopy_background_wait(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;
    int64_t end = get_clock() + WAIT_MS * SCALE_MS;

    while (b->active && !qemu_file_get_error(s->to_dst_file)) {
        int64_t now = get_clock(), until;
        bool full, woken;

        WITH_QEMU_LOCK_GUARD(&b->lock) {
            full = b->waiting = postcopy_window_full(&b->window);
        }
        until = full ? end : MIN(b->next_ns, end);
        if (now >= until) {
            break;
        }
        woken = !qemu_sem_timedwait(&s->rate_limit_sem,
                                    DIV_ROUND_UP(until - now, SCALE_MS));
        WITH_QEMU_LOCK_GUARD(&b->lock) {
            if (full && !b->waiting) {
                /* A PONG has posted once; all that is left are requests */
                if (!woken) {
                    qemu_sem_wait(&s->rate_limit_sem);
                }
                woken = !qemu_sem_timedwait(&s->rate_limit_sem, 0);
            }
            b->waiting = false;
        }
        if (woken) {
            /* Whoever serves a request takes one for it */
            qemu_sem_post(&s->rate_limit_sem);
            return true;
        }
    }
    return false;
}

void postcopy_background_fill_info(MigrationState *s, MigrationInfo *info)
{
    PostcopyBackground *b = &s->postcopy->background;
    const PostcopyWindow *w = &b->window;

    QEMU_LOCK_GUARD(&b->lock);
    if (b->active) {
        info->postcopy_window = g_new0(PostcopyWindowInfo, 1);
        info->postcopy_window->size = w->size;
        info->postcopy_window->in_flight = w->sent - w->received;
        info->postcopy_window->delay = w->delay;
    }
}
