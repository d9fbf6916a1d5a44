/*
 * Postcopy: fetch channels, on the destination
 *
 * A thread that misses a page writes the request to the page's channel.  The
 * channel's own thread reads the answer, places the page, and wakes the vCPUs
 * that wait for it.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/host-utils.h"
#include "qemu/lockable.h"
#include "qemu/rcu.h"
#include "qemu/units.h"
#include "qapi/error.h"
#include "qapi/qapi-types-migration.h"
#include "qapi/util.h"
#include "migration/options.h"
#include "migration/qemu-file.h"
#include "migration/yank_functions.h"
#include "fault.h"
#include "fetch-dst.h"
#include "incoming.h"
#include "outgoing.h"

/*
 * Pages of a region of this size use the same channel, as long as the number of
 * channels in use stays: they are received together, and requested together
 */
#define POSTCOPY_FETCH_REGION (64 * KiB)

/*
 * So many outstanding pages use one channel before another one is used: a
 * busier thread sleeps less often, and so does the source's
 */
#define POSTCOPY_FETCH_SHARE 4

/* The last channel is left to the background, if there are others */
static unsigned postcopy_fetch_for_requests(PostcopyFetch *fetch)
{
    return MAX(ctpop16(qatomic_read(&fetch->used)), 2) - 1;
}

unsigned postcopy_fetch_choose(MigrationIncomingState *mis,
                               const PostcopyPage *page)
{
    uint64_t region = (uintptr_t)page->host / MAX(page->size,
                                                  POSTCOPY_FETCH_REGION);
    /* One more: this page */
    unsigned n = postcopy_requests_number(mis->postcopy->requests) + 1;

    n = MIN(DIV_ROUND_UP(n, POSTCOPY_FETCH_SHARE),
            postcopy_fetch_for_requests(mis->postcopy->fetch));
    if (n < 2 || page->size >= POSTCOPY_FETCH_LARGE) {
        return 0;
    }
    /* Fibonacci hashing: even strides use all channels, too */
    region *= 0x9e3779b97f4a7c15;
    return (region >> 32) % n;
}

/* A channel in use: @page->channel may have been chosen before a recovery */
static PostcopyFetchChannel *postcopy_fetch_of(PostcopyFetch *fetch,
                                               const PostcopyPage *page)
{
    unsigned used = qatomic_read(&fetch->used);
    unsigned i = page->channel % postcopy_fetch_for_requests(fetch);

    while (i--) {
        used &= used - 1;
    }
    return &fetch->channels[used ? ctz32(used) : 0];
}

static int postcopy_fetch_request(MigrationIncomingState *mis,
                                  const PostcopyPage *page, bool flush_later)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;
    PostcopyFetchChannel *ch = postcopy_fetch_of(fetch, page);
    PostcopyFrame request = {
        .type = POSTCOPY_FRAME_REQUEST,
        .rb = page->rb,
        .offset = page->start,
        .length = page->size,
    };

    QEMU_LOCK_GUARD(&ch->lock);
    if (!ch->active) {
        return -EIO;
    }
    stat64_add(&fetch->counts[ch->id].requests, 1);
    postcopy_frame_put(ch->out, &request, &ch->last);
    if (flush_later) {
        qatomic_or(&fetch->unflushed, 1u << ch->id);
        return 0;
    }
    return qemu_fflush(ch->out);
}

static void postcopy_fetch_flush(MigrationIncomingState *mis)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;
    unsigned bits = qatomic_xchg(&fetch->unflushed, 0);

    for (; bits; bits &= bits - 1) {
        PostcopyFetchChannel *ch = &fetch->channels[ctz32(bits)];

        QEMU_LOCK_GUARD(&ch->lock);
        if (ch->active) {
            qemu_fflush(ch->out);
        }
    }
}

static bool postcopy_fetch_wait_end(MigrationIncomingState *mis, int ms)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;
    unsigned n = ctpop16(fetch->used);

    QEMU_LOCK_GUARD(&fetch->lock);
    if (fetch->n_ended < n) {
        qemu_cond_timedwait(&fetch->changed, &fetch->lock, ms);
    }
    return fetch->n_ended == n;
}

const PostcopySource postcopy_fetch_channels = {
    .request = postcopy_fetch_request,
    .flush = postcopy_fetch_flush,
    .wait_end = postcopy_fetch_wait_end,
};

PostcopyFetch *postcopy_fetch_new(MigrationIncomingState *mis)
{
    PostcopyFetch *fetch = g_new0(PostcopyFetch, 1);

    qemu_mutex_init(&fetch->lock);
    qemu_cond_init(&fetch->changed);
    for (unsigned i = 0; i < POSTCOPY_FETCH_CHANNELS_MAX; i++) {
        fetch->channels[i].mis = mis;
        fetch->channels[i].id = i;
        qemu_mutex_init(&fetch->channels[i].lock);
    }
    return fetch;
}

void postcopy_fetch_fill_info(MigrationInfo *info)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    MigrationState *s = migrate_get_current();
    PostcopyFetchCounts *counts = s->postcopy->counts;
    PostcopyFetchStatsList **list;
    unsigned used;

    QEMU_LOCK_GUARD(&s->qemu_file_lock);
    used = qatomic_read(&s->postcopy->used);
    if (!used) {
        used = qatomic_read(&mis->postcopy->fetch->used);
        counts = mis->postcopy->fetch->counts;
    }
    if (!used) {
        return;
    }
    info->postcopy_fetch = g_new0(PostcopyFetchInfo, 1);
    list = &info->postcopy_fetch->channels;
    for (; used; used &= used - 1) {
        PostcopyFetchStats *stats = g_new0(PostcopyFetchStats, 1);
        unsigned i = ctz32(used);

        stats->requests = stat64_get(&counts[i].requests);
        stats->pages = stat64_get(&counts[i].pages);
        stats->zero_pages = stat64_get(&counts[i].zero_pages);
        stats->frames = stat64_get(&counts[i].frames);
        QAPI_LIST_APPEND(list, stats);
    }
}

/* Connecting */

bool postcopy_fetch_complete(MigrationIncomingState *mis)
{
    return !qatomic_read(&mis->postcopy->fetch->agreed) ||
           qatomic_read(&mis->postcopy->fetch->settled);
}

/* With the channel's lock; the channel is not active */
static void postcopy_fetch_close_channel(PostcopyFetchChannel *ch)
{
    QEMUFile *in = ch->in;

    if (!in) {
        return;
    }
    WITH_QEMU_LOCK_GUARD(&ch->mis->postcopy->fetch->lock) {
        qatomic_set(&ch->in, NULL);
    }
    migration_ioc_unregister_yank_from_file(in);
    qemu_fclose(in);
    qemu_fclose(ch->out);
    ch->out = NULL;
    ch->last = NULL;
}

void postcopy_fetch_break_incoming(MigrationIncomingState *mis)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;

    /* Without the channels' own locks: a writer to a full channel has one */
    QEMU_LOCK_GUARD(&fetch->lock);
    for (unsigned i = 0; i < POSTCOPY_FETCH_CHANNELS_MAX; i++) {
        QEMUFile *in = fetch->channels[i].in;

        /* Its thread notices the end, and marks the QEMUFile by itself */
        if (in) {
            qio_channel_shutdown(qemu_file_get_ioc(in),
                                 QIO_CHANNEL_SHUTDOWN_BOTH, NULL);
        }
    }
}

static bool postcopy_fetch_is_open(PostcopyFetchChannel *ch, Error **errp)
{
    if (!qatomic_read(&ch->in)) {
        return false;
    }
    error_setg(errp, "postcopy: fetch channel %u is open already", ch->id);
    return true;
}

void coroutine_fn postcopy_fetch_accept(MigrationIncomingState *mis,
                                        QIOChannel *ioc, Error **errp)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;
    unsigned generation = qatomic_read(&fetch->generation);
    PostcopyFetchChannel *ch;
    PostcopyHello hello;
    unsigned id;

    /*
     * Only this coroutine waits for a peer that sends no data, in the thread
     * that listens: for migrate-recover out of band that is the monitor's.
     */
    qio_channel_set_follow_coroutine_ctx(ioc, true);
    if (qio_channel_set_blocking(ioc, false, errp) ||
        qio_channel_read_all(ioc, (char *)&hello, sizeof(hello), errp)) {
        return;
    }
    id = MIN(postcopy_hello_channel(&hello),
             MAX(qatomic_read(&fetch->agreed), 1) - 1);
    if (!postcopy_hello_check(&hello, fetch->token, id, errp)) {
        return;
    }

    ch = &fetch->channels[id];
    /* postcopy_fetch_stop() closes channels of a failed recovery */
    if (postcopy_fetch_is_open(ch, errp)) {
        /* A thread that sends to a source that does not read has the lock */
        return;
    }
    WITH_QEMU_LOCK_GUARD(&ch->lock) {
        if (postcopy_fetch_is_open(ch, errp)) {
            return;
        }
        /* A pause removes the main channel first, then closes these */
        WITH_QEMU_LOCK_GUARD(&fetch->lock) {
            if (!mis->from_src_file || fetch->settled ||
                fetch->generation != generation) {
                error_setg(errp, "postcopy: fetch channel %u is too late", id);
                return;
            }
            migration_ioc_register_yank(ioc);
            qatomic_set(&ch->in, qemu_file_new_input(ioc));
            ch->out = qemu_file_get_return_path(ch->in);
        }
        /*
         * The answer is the same message.  The source continues when it has the
         * answer, and other threads may send requests before this thread
         * returns from sending: the lock makes them wait, since two writers at
         * once would break a TLS session.  The few bytes fit into the socket's
         * buffer, so that no thread holds the lock for long.
         */
        if (!qio_channel_set_blocking(ioc, true, errp)) {
            qio_channel_write_all(ioc, (char *)&hello, sizeof(hello), errp);
        }
    }
}

/* Starting, and stopping */

bool postcopy_fetch_settle(MigrationIncomingState *mis, uint16_t used,
                           Error **errp)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;

    if (used >> fetch->agreed ||
        (ctpop16(used) < fetch->agreed &&
         migrate_postcopy_fetch_channels() > 0)) {
        error_setg(errp, "postcopy: the source uses fetch channels 0x%x in "
                   "place of %u", used, fetch->agreed);
        return false;
    }
    WITH_QEMU_LOCK_GUARD(&fetch->lock) {
        if (fetch->settled) {
            error_setg(errp, "postcopy: the source reports twice which fetch "
                       "channels it uses");
            return false;
        }
        /* From here on no channel is accepted */
        qatomic_set(&fetch->settled, true);
    }
    for (unsigned i = 0; i < fetch->agreed; i++) {
        PostcopyFetchChannel *ch = &fetch->channels[i];

        QEMU_LOCK_GUARD(&ch->lock);
        if (!(used & 1 << i)) {
            postcopy_fetch_close_channel(ch);
        } else if (!ch->in) {
            error_setg(errp, "postcopy: the source has not opened fetch "
                       "channel %u", i);
            return false;
        }
    }
    qatomic_set(&fetch->used, used);
    return true;
}

bool postcopy_fetch_incoming(MigrationIncomingState *mis)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;

    return qatomic_read(&fetch->settled) && qatomic_read(&fetch->used);
}

static void *postcopy_fetch_thread(void *opaque)
{
    PostcopyFetchChannel *ch = opaque;

    rcu_register_thread();
    if (!postcopy_fetch_receive_all(ch)) {
        postcopy_fault_break_connection(ch->mis);
    }
    rcu_unregister_thread();
    return NULL;
}

bool postcopy_fetch_start(MigrationIncomingState *mis, Error **errp)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;

    if (!postcopy_fetch_complete(mis)) {
        error_setg(errp, "postcopy: the source has not reported which fetch "
                   "channels it uses");
        return false;
    }
    for (unsigned used = fetch->used; used; used &= used - 1) {
        unsigned i = ctz32(used);
        PostcopyFetchChannel *ch = &fetch->channels[i];
        g_autofree char *name = g_strdup_printf("mig/dst/fetch%u", i);

        WITH_QEMU_LOCK_GUARD(&ch->lock) {
            ch->active = true;
        }
        qemu_thread_create(&ch->thread, name, postcopy_fetch_thread, ch,
                           QEMU_THREAD_JOINABLE);
    }
    return true;
}

void postcopy_fetch_stop(MigrationIncomingState *mis)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;

    WITH_QEMU_LOCK_GUARD(&fetch->lock) {
        qatomic_inc(&fetch->generation);
    }
    /* Only one thread at a time starts and stops: @active does not change */
    postcopy_fetch_break_incoming(mis);
    for (unsigned i = 0; i < POSTCOPY_FETCH_CHANNELS_MAX; i++) {
        PostcopyFetchChannel *ch = &fetch->channels[i];

        if (ch->active) {
            qemu_thread_join(&ch->thread);
        }
        QEMU_LOCK_GUARD(&ch->lock);
        ch->active = false;
        postcopy_fetch_close_channel(ch);
    }
    WITH_QEMU_LOCK_GUARD(&fetch->lock) {
        fetch->n_ended = 0;
        qatomic_set(&fetch->settled, false);
    }
}

void postcopy_fetch_forget(MigrationIncomingState *mis)
{
    postcopy_fetch_stop(mis);
    qatomic_set(&mis->postcopy->fetch->agreed, 0);
}
