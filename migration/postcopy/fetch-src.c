/*
 * Postcopy: fetch channels, on the source: connecting, the threads, the end
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/error-report.h"
#include "qemu/host-utils.h"
#include "qemu/lockable.h"
#include "qemu/rcu.h"
#include "qapi/error.h"
#include "qapi/qapi-types-migration.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "io/channel-socket.h"
#include "io/channel-tls.h"
#include "migration/migration-stats.h"
#include "migration/options.h"
#include "migration/qemu-file.h"
#include "migration/socket.h"
#include "migration/savevm.h"
#include "migration/tls.h"
#include "migration/yank_functions.h"
#include "fetch-src.h"
#include "receive.h"
#include "trace.h"

/*
 * How long the migration waits for channels, while the guest runs: for those
 * that it can do without, and for a set number
 */
#define CONNECT_MS        2000
#define STRICT_CONNECT_MS 10000

void postcopy_fetch_init(MigrationState *s)
{
    postcopy_fetch_agree_init();
    s->postcopy = g_new0(struct PostcopyOutgoing, 1);
    qemu_sem_init(&s->postcopy->connected, 0);
    qemu_event_init(&s->postcopy->active, false);
    qemu_mutex_init(&s->postcopy->background.lock);
}

void postcopy_fetch_destroy(MigrationState *s)
{
    postcopy_first_reset(&s->postcopy->first);
    qemu_mutex_destroy(&s->postcopy->background.lock);
    qemu_sem_destroy(&s->postcopy->connected);
    qemu_event_destroy(&s->postcopy->active);
    g_free(s->postcopy);
}

void postcopy_fetch_begin(MigrationState *s)
{
    qatomic_set(&s->postcopy->agreed, 0);
    qatomic_set(&s->postcopy->used, 0);
    memset(&s->postcopy->offer, 0, sizeof(s->postcopy->offer));
    /* query-migrate reads it */
    WITH_QEMU_LOCK_GUARD(&s->postcopy->background.lock) {
        s->postcopy->background.active = false;
    }
    postcopy_first_reset(&s->postcopy->first);
}

/* Connecting */

static bool postcopy_fetch_is_given_up(MigrationState *s)
{
    return qatomic_read(&s->state) == MIGRATION_STATUS_CANCELLING ||
           migrate_has_error(s);
}

static void postcopy_fetch_free(PostcopyFetchSource *ch)
{
    error_free(ch->err);
    qemu_mutex_destroy(&ch->lock);
    g_free(ch);
}

/* With qemu_file_lock: @ch is up if @err is NULL.  Takes ownership of @err. */
static void postcopy_fetch_settled(PostcopyFetchSource *ch, Error *err)
{
    ch->err = err;
    qatomic_store_release(&ch->state, err ? FETCH_DOWN : FETCH_UP);
    qemu_sem_post(&ch->s->postcopy->connected);
}

static void *postcopy_fetch_source_thread(void *opaque);
static void postcopy_fetch_shutdown(GPtrArray *channels);
static void postcopy_fetch_free_all(MigrationState *s, GPtrArray *channels);

/*
 * By default, a Unix socket holds less than a run, so that both sides would
 * wait for each other several times in each run: set what the kernel allows.
 * TCP adapts by itself.
 */
static void postcopy_fetch_widen(QIOChannelSocket *sioc)
{
    int now, bytes = POSTCOPY_RUN_PAGES * qemu_target_page_size();
    socklen_t size = sizeof(now);

    if (sioc->localAddr.ss_family == AF_UNIX &&
        !getsockopt(sioc->fd, SOL_SOCKET, SO_SNDBUF, &now, &size) &&
        now < bytes) {
        setsockopt(sioc->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    }
}

/* Called in the main thread */
static void postcopy_fetch_socket_done(QIOTask *task, gpointer opaque)
{
    g_autoptr(QIOChannel) ioc = QIO_CHANNEL(qio_task_get_source(task));
    PostcopyFetchSource *ch = opaque;
    g_autofree char *name = g_strdup_printf("mig/src/fetch%u", ch->id);
    MigrationState *s = ch->s;
    QIOChannelTLS *tioc;
    Error *err = NULL;

    if (!qio_task_propagate_error(task, &err)) {
        /* The last segment of a requested page must not be delayed */
        qio_channel_set_delay(ioc, false);
        qio_channel_set_name(ioc, "migration-fetch");
        postcopy_fetch_widen(QIO_CHANNEL_SOCKET(ioc));
        if (migrate_channel_requires_tls_upgrade(ioc)) {
            tioc = migration_tls_client_create(ioc, s->hostname, &err);
            object_unref(OBJECT(g_steal_pointer(&ioc)));
            ioc = tioc ? QIO_CHANNEL(tioc) : NULL;
        }
    }
    QEMU_LOCK_GUARD(&s->qemu_file_lock);
    if (!err && qatomic_read(&ch->may_close)) {
        /* postcopy_fetch_free_all() would wait for an unbroken thread */
        error_setg(&err, "given up while it connected");
    }
    if (ch->abandoned) {
        error_free(err);
        postcopy_fetch_free(ch);
    } else if (err) {
        postcopy_fetch_settled(ch, err);
    } else {
        migration_ioc_register_yank(ioc);
        ch->out = qemu_file_new_output(ioc);
        ch->in = qemu_file_get_return_path(ch->out);
        qatomic_set(&ch->state, FETCH_GREETS);
        qemu_thread_create(&ch->thread, name, postcopy_fetch_source_thread, ch,
                           QEMU_THREAD_JOINABLE);
    }
}

/* Called by the channel's thread: wait for the answer, or set @errp */
static void postcopy_fetch_greet(PostcopyFetchSource *ch, Error **errp)
{
    const uint8_t *token = ch->s->postcopy->offer.token;
    QIOChannel *ioc = qemu_file_get_ioc(ch->out);
    PostcopyHello hello = postcopy_hello(token, ch->id);

    if (object_dynamic_cast(OBJECT(ioc), TYPE_QIO_CHANNEL_TLS) &&
        !migration_tls_handshake_in_thread(QIO_CHANNEL_TLS(ioc), errp)) {
        return;
    }
    if (!qio_channel_write_all(ioc, (char *)&hello, sizeof(hello), errp) &&
        !qio_channel_read_all(ioc, (char *)&hello, sizeof(hello), errp)) {
        postcopy_hello_check(&hello, token, ch->id, errp);
    }
}

static void postcopy_fetch_connect(MigrationState *s, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        PostcopyFetchSource *ch = g_new0(PostcopyFetchSource, 1);

        ch->s = s;
        ch->id = i;
        qemu_mutex_init(&ch->lock);
        WITH_QEMU_LOCK_GUARD(&s->qemu_file_lock) {
            g_ptr_array_add(s->postcopy->channels, ch);
        }
        socket_send_channel_create(postcopy_fetch_socket_done, ch);
    }
}

/* A set number needs each channel: a lost SYN is repeated after 1, 3, 7 s */
static int postcopy_fetch_patience_ms(MigrationState *s)
{
    return s->postcopy->strict ? STRICT_CONNECT_MS : CONNECT_MS;
}

/* Wait until each channel is up or down, at most for that time */
static void postcopy_fetch_wait(MigrationState *s)
{
    int64_t now = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    int64_t end = now + postcopy_fetch_patience_ms(s);
    GPtrArray *channels = s->postcopy->channels;

    while (now < end && !postcopy_fetch_is_given_up(s)) {
        unsigned settled = 0;

        for (guint i = 0; i < channels->len; i++) {
            PostcopyFetchSource *ch = g_ptr_array_index(channels, i);

            settled += qatomic_read(&ch->state) >= FETCH_UP;
        }
        if (settled == channels->len) {
            return;
        }
        qemu_sem_timedwait(&s->postcopy->connected, end - now);
        now = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    }
}

/*
 * Close all channels that are not up.  Returns the bits of those that are up.
 * If not all are, sets @why to the first one's reason; the caller frees it.
 */
static uint16_t postcopy_fetch_close_rest(MigrationState *s, char **why)
{
    g_autoptr(GPtrArray) rest = g_ptr_array_new();
    GPtrArray *channels = s->postcopy->channels;
    uint16_t used = 0;

    WITH_QEMU_LOCK_GUARD(&s->qemu_file_lock) {
        for (guint i = 0; i < channels->len;) {
            PostcopyFetchSource *ch = g_ptr_array_index(channels, i);

            if (qatomic_load_acquire(&ch->state) == FETCH_UP) {
                used |= 1 << ch->id;
                i++;
                continue;
            }
            if (!*why) {
                *why = ch->err ? g_strdup(error_get_pretty(ch->err)) :
                       g_strdup_printf("no answer within %d ms",
                                       postcopy_fetch_patience_ms(s));
            }
            g_ptr_array_add(rest, g_ptr_array_steal_index(channels, i));
        }
        postcopy_fetch_shutdown(rest);
    }
    postcopy_fetch_free_all(s, rest);
    return used;
}

bool postcopy_fetch_open(MigrationState *s, Error **errp)
{
    unsigned agreed = qatomic_load_acquire(&s->postcopy->agreed), n;
    g_autofree char *why = NULL;
    uint16_t used;

    if (!agreed) {
        return true;
    }
    assert(!s->postcopy->channels);
    WITH_QEMU_LOCK_GUARD(&s->qemu_file_lock) {
        if (s->state != MIGRATION_STATUS_POSTCOPY_RECOVER) {
            memset(s->postcopy->counts, 0, sizeof(s->postcopy->counts));
            qemu_event_reset(&s->postcopy->active);
        }
        s->postcopy->channels = g_ptr_array_new();
    }
    /* A recovery's URI may be one that connects only once */
    if (socket_outgoing_can_connect()) {
        postcopy_fetch_connect(s, agreed);
    } else {
        why = g_strdup("this migration's connection cannot be made again");
    }
    postcopy_fetch_wait(s);
    used = postcopy_fetch_close_rest(s, &why);
    n = ctpop16(used);
    if (postcopy_fetch_is_given_up(s)) {
        error_setg(errp, "postcopy: given up while fetch channels were opened");
    } else if (n < agreed && s->postcopy->strict) {
        error_setg(errp, "postcopy: %u of %u fetch channels can be opened: %s",
                   n, agreed, why);
    } else {
        if (n < agreed) {
            warn_report("postcopy: %u fetch channels in place of %u: %s", n,
                        agreed, why);
        }
        qatomic_set(&s->postcopy->used, used);
        qemu_savevm_send_postcopy_fetch(s->to_dst_file, used);
        return true;
    }
    postcopy_fetch_close(s);
    return false;
}

/* The channel's thread */

/* One channel has failed: break all, so that postcopy pauses */
static void postcopy_fetch_failed(PostcopyFetchSource *ch, Error *err)
{
    MigrationState *s = ch->s;

    error_prepend(&err, "postcopy: fetch channel %u: ", ch->id);
    migrate_set_error(s, err);
    WITH_QEMU_LOCK_GUARD(&s->qemu_file_lock) {
        if (s->to_dst_file) {
            qemu_file_shutdown(s->to_dst_file);
        }
    }
    postcopy_fetch_break(s);
    migration_rp_kick(s);
    error_free(err);
}

static void *postcopy_fetch_source_thread(void *opaque)
{
    PostcopyFetchSource *ch = opaque;
    PostcopyFetchCounts *counts = &ch->s->postcopy->counts[ch->id];
    PostcopyFrame frame = { };
    Error *err = NULL;

    rcu_register_thread();
    postcopy_fetch_greet(ch, &err);
    WITH_QEMU_LOCK_GUARD(&ch->s->qemu_file_lock) {
        postcopy_fetch_settled(ch, err);
    }
    if (err) {
        rcu_unregister_thread();
        return NULL;
    }
    while (postcopy_frame_get(ch->in, &frame, false, &err)) {
        stat64_add(&counts->requests, 1);
        /* Before, clean pages are released, and migration can still fail */
        qemu_event_wait(&ch->s->postcopy->active);
        if (!migration_in_postcopy()) {
            error_setg(&err, "a page request while the status is %s",
                       MigrationStatus_str(ch->s->state));
            break;
        }
        stat64_add(&mig_stats.postcopy_requests,
                   frame.length / qemu_ram_pagesize(frame.rb));
        trace_postcopy_fetch_request(ch->id, frame.rb->idstr, frame.offset,
                                     frame.length);
        if (postcopy_fetch_serve(ch, &frame,
                                 postcopy_frame_is_buffered(ch->in))) {
            qemu_file_get_error_obj(ch->out, &err);
            break;
        }
    }
    if (!qatomic_read(&ch->may_close)) {
        postcopy_fetch_failed(ch, g_steal_pointer(&err));
    }
    error_free(err);
    rcu_unregister_thread();
    return NULL;
}

void postcopy_fetch_go(MigrationState *s)
{
    qemu_event_set(&s->postcopy->active);
}

/* Ending */

void postcopy_fetch_send_end(MigrationState *s)
{
    if (!s->postcopy->channels) {
        return;
    }
    postcopy_fetch_end_slice(s, NULL);
    for (guint i = 0; i < s->postcopy->channels->len; i++) {
        PostcopyFetchSource *ch = g_ptr_array_index(s->postcopy->channels, i);
        PostcopyFrame end = { .type = POSTCOPY_FRAME_END };
        Error *err = NULL;

        WITH_QEMU_LOCK_GUARD(&ch->lock) {
            /* The destination closes all channels when all have ended */
            qatomic_set(&ch->may_close, true);
            postcopy_frame_put(ch->out, &end, &ch->last);
            qemu_fflush(ch->out);
            qemu_file_get_error_obj(ch->out, &err);
        }
        /* The channel's own thread does not report this any more */
        if (err) {
            postcopy_fetch_failed(ch, err);
        }
    }
}

/*
 * No thread waits for one of @channels any more.  With qemu_file_lock.  A
 * caller that breaks channels that are up breaks the main one, too, and sets an
 * error.
 */
static void postcopy_fetch_shutdown(GPtrArray *channels)
{
    for (guint i = 0; i < channels->len; i++) {
        PostcopyFetchSource *ch = g_ptr_array_index(channels, i);

        qatomic_set(&ch->may_close, true);
        if (ch->in) {
            /* The thread notices the end, and marks its QEMUFiles by itself */
            qio_channel_shutdown(qemu_file_get_ioc(ch->in),
                                 QIO_CHANNEL_SHUTDOWN_BOTH, NULL);
        }
    }
}

/* Free @channels, which are shut down, but not those that still connect */
static void postcopy_fetch_free_all(MigrationState *s, GPtrArray *channels)
{
    for (guint i = 0; i < channels->len; i++) {
        PostcopyFetchSource *ch = g_ptr_array_index(channels, i);

        WITH_QEMU_LOCK_GUARD(&s->qemu_file_lock) {
            if (qatomic_read(&ch->state) == FETCH_CONNECTS) {
                ch->abandoned = true;
                continue;
            }
        }
        if (ch->out) {
            qemu_thread_join(&ch->thread);
            migration_ioc_unregister_yank_from_file(ch->out);
            qemu_fclose(ch->in);
            qemu_fclose(ch->out);
        }
        postcopy_fetch_free(ch);
    }
}

void postcopy_fetch_break(MigrationState *s)
{
    QEMU_LOCK_GUARD(&s->qemu_file_lock);
    if (s->postcopy->channels) {
        postcopy_fetch_shutdown(s->postcopy->channels);
    }
    qemu_event_set(&s->postcopy->active);
    qemu_sem_post(&s->postcopy->connected);
}

void postcopy_fetch_close(MigrationState *s)
{
    g_autoptr(GPtrArray) channels = NULL;

    s->postcopy->run.rb = NULL;
    s->postcopy->turn = 0;
    postcopy_fetch_break(s);
    WITH_QEMU_LOCK_GUARD(&s->qemu_file_lock) {
        channels = g_steal_pointer(&s->postcopy->channels);
    }
    if (channels) {
        postcopy_fetch_free_all(s, channels);
    }
}
