/*
 * Postcopy: how both ends agree on a number of fetch channels
 *
 * The source asks for a number in the first PING, and the destination answers
 * with the agreed one.  Before that, it sends a token, by which it recognizes
 * this migration's channels.  The number does not change, also in recoveries;
 * whenever channels are connected, the source reports which ones it uses.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/bswap.h"
#include "qemu/rcu.h"
#include "qapi/error.h"
#include "qapi/qapi-types-migration.h"
#include "crypto/random.h"
#include "hw/core/cpu.h"
#include "migration/options.h"
#include "migration/socket.h"
#include "fetch-dst.h"
#include "incoming.h"
#include "outgoing.h"
#include "peer.h"

/*
 * 'auto' asks for a channel for the background, and one for the requests of
 * each AUTO_VCPUS vCPUs, since fewer leave a channel's threads idle; the latter
 * are not more than AUTO_MOST, and than the processors on which QEMU's threads
 * may run.
 */
#define AUTO_VCPUS 4
#define AUTO_MOST  4

/* How many channels this side wants; @strict: this many or no migration */
static unsigned fetch_wanted(bool *strict)
{
    int set = migrate_postcopy_fetch_channels();
    unsigned vcpus = 0;
    CPUState *cpu;

    *strict = set > 0;
    if (set >= 0) {
        return set;
    }
    WITH_RCU_READ_LOCK_GUARD() {
        CPU_FOREACH(cpu) {
            vcpus++;
        }
    }
    return 1 + MIN(MIN(DIV_ROUND_UP(vcpus, AUTO_VCPUS), AUTO_MOST),
                   g_get_num_processors());
}

static uint32_t fetch_ask(MigrationState *s)
{
    bool strict;
    unsigned n = fetch_wanted(&strict);

    /* Old machine types connect a preempt channel before the answer */
    if (!socket_outgoing_can_connect() ||
        (migrate_preempt_pre_7_2() && migrate_postcopy_preempt())) {
        n = 0;
    }
    return n | (n && strict ? PEER_FETCH_STRICT : 0);
}

bool postcopy_fetch_answered(MigrationState *s)
{
    /* Any answer to a number is the same one, or an error */
    return migrate_postcopy_fetch_channels() <= 0 ||
           !s->rp_state.rp_thread_created ||
           qatomic_read(&s->postcopy->agreed) || migrate_has_error(s) ||
           qatomic_read(&s->rp_state.shut);
}

static uint32_t fetch_answer(MigrationIncomingState *mis, uint32_t asked)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;
    PostcopyFetchOffer offer = { };
    unsigned theirs = asked & PEER_FETCH_CHANNELS;
    bool strict;
    unsigned n = fetch_wanted(&strict);

    if (!theirs || theirs > POSTCOPY_FETCH_CHANNELS_MAX ||
        !socket_incoming_listens()) {
        n = 0;
    } else if (n && !strict) {
        n = asked & PEER_FETCH_STRICT ? theirs : MIN(n, theirs);
    }
    if (!n || qcrypto_random_bytes(fetch->token, sizeof(fetch->token), NULL)) {
        return 0;
    }
    offer.channels = cpu_to_be16(n);
    memcpy(offer.token, fetch->token, sizeof(offer.token));
    if (migrate_send_rp_fetch_offer(mis, &offer)) {
        return 0;
    }
    qatomic_set(&fetch->agreed, n);
    return n | (strict ? PEER_FETCH_STRICT : 0);
}

void postcopy_fetch_offered(MigrationState *s, const PostcopyFetchOffer *offer)
{
    /* Channels may be connected by now with the offer that was agreed on */
    if (!qatomic_read(&s->postcopy->agreed)) {
        s->postcopy->offer = *offer;
    }
}

static bool fetch_answered(MigrationState *s, uint32_t answer, Error **errp)
{
    struct PostcopyOutgoing *p = s->postcopy;
    unsigned n = answer & PEER_FETCH_CHANNELS;
    int set = migrate_postcopy_fetch_channels();

    if (set > 0 && n != set) {
        error_setg(errp, "postcopy-fetch-channels is %d here, and the "
                   "destination, which may not know it, takes %u: set it to "
                   "'auto' on one side, or to the same on both", set, n);
        return false;
    }
    if (!n || qatomic_read(&p->agreed)) {
        return true;
    }
    if (n > POSTCOPY_FETCH_CHANNELS_MAX ||
        n != be16_to_cpu(p->offer.channels)) {
        error_setg(errp, "postcopy: the destination takes %u fetch channels, "
                   "and has offered %u", n, be16_to_cpu(p->offer.channels));
        return false;
    }
    p->strict = set > 0 || (answer & PEER_FETCH_STRICT);
    /* The migration thread reads the offer after this */
    qatomic_store_release(&p->agreed, n);
    return true;
}

static const PeerFeature fetch_feature = {
    .mask = PEER_FETCH_CHANNELS | PEER_FETCH_STRICT,
    .ask = fetch_ask,
    .answer = fetch_answer,
    .answered = fetch_answered,
};

void postcopy_fetch_agree_init(void)
{
    peer_register(&fetch_feature);
}

bool postcopy_fetch_advised(MigrationIncomingState *mis, Error **errp)
{
    PostcopyFetch *fetch = mis->postcopy->fetch;
    unsigned agreed = qatomic_read(&fetch->agreed);
    int set = migrate_postcopy_fetch_channels();

    /* Values of a previous incoming migration */
    qatomic_set(&fetch->used, 0);
    memset(fetch->counts, 0, sizeof(fetch->counts));
    if (set <= 0 || set == agreed) {
        return true;
    }
    error_setg(errp, "postcopy-fetch-channels is %d here, and the source %s: "
               "set it to 'auto' here", set, socket_incoming_listens() ?
               "has none" : "cannot connect more than once");
    return false;
}

unsigned postcopy_fetch_agreed(void)
{
    MigrationState *s = migrate_get_current();
    MigrationIncomingState *mis = migration_incoming_get_current();

    return qatomic_load_acquire(&s->postcopy->agreed) ?:
           qatomic_read(&mis->postcopy->fetch->agreed);
}
