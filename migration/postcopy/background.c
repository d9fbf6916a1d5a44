/*
 * Postcopy: how the source sends pages that no thread has requested
 *
 * A requested page is sent at once, but waits for all bytes before it in
 * buffers and queues: of the source's kernel and of the network, and, if its
 * channel is the background's, of a proxy and of the destination, too.  So the
 * source limits the bytes in flight (window.c).  Its kernel reports the bytes
 * that the peer of the socket has not acknowledged.  For the way behind that
 * peer there are PINGs, which every QEMU answers from the thread that places
 * the pages, after it has placed everything that was sent before.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/ioctl.h>
#ifdef CONFIG_LINUX
#include <linux/sockios.h>
#endif
#include "qemu/lockable.h"
#include "qemu/timer.h"
#include "io/channel-socket.h"
#include "io/channel-tls.h"
#include "exec/target_page.h"
#include "qapi/qapi-types-migration.h"
#include "migration/inject.h"
#include "migration/options.h"
#include "migration/qemu-file.h"
#include "migration/savevm.h"
#include "background.h"
#include "fetch-src.h"
#include "receive.h"
#include "trace.h"

/* Values of the window's PINGs: these bits are a tag, the others a number */
#define PING_TAG        0x70770000      /* "pw" */
#define PING_TAG_MASK   0xffff0000

/*
 * Cost of a target page in addition to its bytes, in bytes: a page of zeros
 * takes nine on the link, but both QEMUs nearly as much work as another page.
 */
#define PAGE_COST       512

/*
 * Pages around a requested one are sent with it, as many as occupy the link or
 * the destination for ALONG_US, but at most ALONG_MOST: to request a page would
 * occupy the processors of both sides as long
 */
#define ALONG_US        128
#define ALONG_MOST      32

/* A page's bytes are averaged over so many pages of the background */
#define MEAN_PAGES      64

/*
 * Duration of a slice: after each, requests are served.  With fetch channels,
 * requests and the background use different channels.
 */
#define SLICE_NS        (100 * SCALE_US)
#define FETCH_SLICE_NS  (250 * SCALE_US)

/* Bandwidth that was not used for up to so many ns may be used later */
#define BURST_NS        (2 * SCALE_MS)

/* How long to wait for an answer, and until the next look at the link */
#define WAIT_MS         100
#define LINK_US         250

/* If there is a TCP connection below @f, which owns its fd */
static void postcopy_background_add_link(PostcopyBackground *b, QEMUFile *f,
                                         bool *sent)
{
    QIOChannel *ioc = qemu_file_get_ioc(f);
    QIOChannelTLS *tls = (QIOChannelTLS *)
        object_dynamic_cast(OBJECT(ioc), TYPE_QIO_CHANNEL_TLS);
    QIOChannelSocket *socket = (QIOChannelSocket *)
        object_dynamic_cast(OBJECT(tls ? tls->master : ioc),
                            TYPE_QIO_CHANNEL_SOCKET);

    /* A Unix socket has no link: only its reader empties it */
    if (socket && (socket->localAddr.ss_family == AF_INET ||
                   socket->localAddr.ss_family == AF_INET6)) {
        b->link[b->links++] = (PostcopyLink) { socket->fd, sent };
    }
}

/*
 * Bytes that the peers of the TCP connections have not acknowledged; 0 without
 * TCP.  Bytes of fetch channels on the same link hold the background back, as
 * requested pages on the main channel do.
 */
static uint64_t postcopy_background_in_link(PostcopyBackground *b)
{
    uint64_t sum = 0;

#ifdef CONFIG_LINUX
    for (unsigned i = 0; i < b->links; i++) {
        bool *sent = b->link[i].sent;
        int bytes;

        if (sent && !qatomic_xchg(sent, false)) {
            continue;
        }
        if (!ioctl(b->link[i].fd, SIOCOUTQ, &bytes) && bytes) {
            sum += bytes;
            if (sent) {
                qatomic_set(sent, true);
            }
        }
    }
#endif
    return sum;
}

/*
 * Set the slice: at most what max-postcopy-bandwidth may catch up with.  If it
 * is longer than half a run of a fetch channel, it is made of whole runs.
 */
static void postcopy_background_set_slice(PostcopyBackground *b)
{
    uint64_t run = POSTCOPY_RUN_PAGES * (qemu_target_page_size() + PAGE_COST);

    b->slice = b->window.slice;
    if (b->rate) {
        uint64_t most = b->rate / (NANOSECONDS_PER_SECOND / BURST_NS);

        b->slice = MIN(b->slice, MAX(most, POSTCOPY_SLICE_LEAST));
    }
    if (b->slice > run / 2) {
        b->slice = QEMU_ALIGN_UP(b->slice, run);
    }
}

void postcopy_background_begin(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;
    QIOChannel *ioc = qemu_file_get_ioc(s->to_dst_file);
    GPtrArray *channels = s->postcopy->channels;

    QEMU_LOCK_GUARD(&b->lock);
    b->active = s->postcopy_window && migrate_postcopy_ram();
    b->slice_pages = b->in_slice = 0;
    b->page_bytes = qemu_target_page_size();
    b->links = 0;
    postcopy_background_add_link(b, s->to_dst_file, NULL);
    for (unsigned i = 0; channels && i < channels->len; i++) {
        PostcopyFetchSource *ch = g_ptr_array_index(channels, i);

        postcopy_background_add_link(b, ch->out, &ch->sent);
    }
    b->file_bytes = qemu_file_transferred(s->to_dst_file);
    b->next_ns = get_clock();
    b->rate = migrate_max_postcopy_bandwidth();
    b->early = false;
    postcopy_window_begin(&b->window, b->next_ns,
                          b->file_bytes - postcopy_background_in_link(b),
                          postcopy_fetch_has_any_background(s) ?
                          FETCH_SLICE_NS : SLICE_NS);
    postcopy_background_set_slice(b);
    /* A PING must not wait until the peer has acknowledged earlier bytes */
    qio_channel_set_delay(ioc, false);
}

bool postcopy_background_sent(MigrationState *s, unsigned pages)
{
    PostcopyBackground *b = &s->postcopy->background;
    uint64_t before = b->file_bytes;

    if (!b->active) {
        return false;
    }
    /* Runs of other channels are in flight, too */
    b->file_bytes = s->postcopy->run.rb ? s->postcopy->transferred :
                    qemu_file_transferred(s->to_dst_file);
    b->in_slice += MAX(b->file_bytes, before) - before + pages * PAGE_COST;
    b->slice_pages += pages;
    return b->in_slice >= b->slice;
}

uint64_t postcopy_background_slice(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;

    return !b->active ? UINT64_MAX : b->slice - MIN(b->slice, b->in_slice);
}

unsigned postcopy_background_along(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;
    unsigned pages = 1;

    WITH_QEMU_LOCK_GUARD(&b->lock) {
        if (b->active && !migration_inject_without("along")) {
            pages = MIN(postcopy_window_rate(&b->window) * ALONG_US / 1000000 /
                        b->page_bytes, ALONG_MOST);
        }
    }
    pages = MAX(pages, 1);
    trace_postcopy_along(pages);
    return pages;
}

void postcopy_background_ping(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;
    uint32_t number, value;
    int64_t now, page;
    bool ping;

    if (!b->active || !b->slice_pages) {
        postcopy_fetch_end_slice(s, NULL);
        return;
    }
    now = get_clock();
    /* No page has more bytes, but @in_slice also has those of other channels */
    page = MIN(b->in_slice / b->slice_pages,
               qemu_target_page_size() + PAGE_COST);
    if (b->rate && !b->early) {
        b->next_ns += page * b->slice_pages * NANOSECONDS_PER_SECOND / b->rate;
    }
    WITH_QEMU_LOCK_GUARD(&b->lock) {
        b->page_bytes += (page - b->page_bytes) *
                         MIN(b->slice_pages, MEAN_PAGES) / MEAN_PAGES;
        ping = postcopy_window_ping(&b->window, now, b->in_slice, &number);
    }
    b->slice_pages = b->in_slice = 0;
    value = ping ? PING_TAG | (number & ~PING_TAG_MASK) : 0;
    if (!postcopy_fetch_end_slice(s, ping ? &value : NULL) && ping) {
        qemu_savevm_send_ping(s->to_dst_file, value);
    }
}

/* Called with @lock held */
static void postcopy_background_wake(MigrationState *s, PostcopyBackground *b)
{
    if (b->waiting) {
        b->waiting = false;
        qemu_sem_post(&s->rate_limit_sem);
    }
}

void postcopy_background_answers(MigrationState *s, bool answers)
{
    PostcopyBackground *b = &s->postcopy->background;

    QEMU_LOCK_GUARD(&b->lock);
    b->answers = answers;
    postcopy_background_wake(s, b);
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
    /* A PING that is awaited, or of an earlier connection, or invalid */
    number = w->answered + (uint16_t)(value - w->answered);
    if (postcopy_window_pong(w, get_clock(), number)) {
        trace_postcopy_window(w->link.limit, w->in_link, w->path.limit,
                              w->sent - w->path.left, w->delay, w->least_delay);
        postcopy_background_wake(s, b);
    }
    return true;
}

bool postcopy_background_early(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;

    b->early = b->active && get_clock() < b->next_ns;
    return b->early;
}

bool postcopy_background_wait(MigrationState *s)
{
    PostcopyBackground *b = &s->postcopy->background;
    int64_t end = get_clock() + WAIT_MS * SCALE_MS;

    while (b->active && !qemu_file_get_error(s->to_dst_file)) {
        uint64_t bytes = qemu_file_transferred(s->to_dst_file);
        uint64_t rate = migrate_max_postcopy_bandwidth();
        int64_t now = get_clock(), until;
        bool full, answer, woken;

        if (rate != b->rate) {
            /* Bytes sent before do not count for this rate */
            b->rate = rate;
            b->next_ns = now;
        }
        b->next_ns = MAX(b->next_ns, now - BURST_NS);

        WITH_QEMU_LOCK_GUARD(&b->lock) {
            if (postcopy_window_stale(&b->window, now, bytes)) {
                postcopy_window_look(&b->window, now, bytes,
                                     postcopy_background_in_link(b));
            }
            postcopy_background_set_slice(b);
            full = b->answers && postcopy_window_full(&b->window);
            until = !full ? MIN(b->next_ns, end) :
                b->window.path_full ? end : MIN(now + LINK_US * SCALE_US, end);
            answer = full && b->window.path_full;
            /* Without a waiter, a post would remain, mistaken for a request */
            b->waiting = answer && now < until;
        }
        if (now >= until) {
            break;
        }
        /* A semaphore's wait takes at least 1 ms: sleep, and requests wait */
        if (until - now < SCALE_MS) {
            g_usleep((until - now) / SCALE_US);
            until = now;
        }
        woken = !qemu_sem_timedwait(&s->rate_limit_sem,
                                    DIV_ROUND_UP(until - now, SCALE_MS));
        if (answer) {
            QEMU_LOCK_GUARD(&b->lock);
            if (!b->waiting) {
                /* A PONG has posted once; all remaining posts are requests */
                if (!woken) {
                    qemu_sem_wait(&s->rate_limit_sem);
                }
                woken = !qemu_sem_timedwait(&s->rate_limit_sem, 0);
            }
            b->waiting = false;
        }
        if (woken) {
            /* The code that serves a request takes a post for it */
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
        info->postcopy_window->size = MIN(w->link.limit, w->path.limit);
        info->postcopy_window->unacknowledged = w->in_link;
        info->postcopy_window->unread = w->sent - w->path.left;
        info->postcopy_window->delay = w->delay;
    }
}
