/*
 * Postcopy: whose turn it is to read a connection
 *
 * Answers to the requests of many threads come by one connection.  One of the
 * vCPUs that wait for an answer reads for all, until its own has come: so it
 * need not be woken by a thread that was woken to read.  The connection's own
 * thread reads what no vCPU waits for; and the answers to several requests,
 * for which it hardly sleeps, while each turn of a vCPU costs a wake-up.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_READER_H
#define MIGRATION_POSTCOPY_FETCH_READER_H

#include "qemu/event_notifier.h"
#include "qemu/queue.h"
#include "qemu/thread.h"
#include "request.h"

/* The turn passes to a vCPU if no more pages than that are to come: its own */
#define POSTCOPY_TURN_PAGES 1

typedef struct PostcopyTurn {
    /*
     * How many pages are to come, or what else somebody waits for.  Under the
     * lock, in the thread whose turn it is.
     */
    unsigned (*expected)(struct PostcopyTurn *turn);
    /* Protects what is below.  Held for no system call. */
    QemuMutex lock;
    /*
     * Whose turn it is, or NULL.  Atomic: who waits for it looks without the
     * lock.  What belongs to the turn passes with the lock.
     */
    PostcopyWaiter *reader;
    /* A vCPU has waited since the turn left the thread last */
    bool asked;
    /* vCPUs that wait for an answer, or for the turn */
    QTAILQ_HEAD(, PostcopyWaiter) waiting;
    /* The connection's thread */
    PostcopyWaiter thread;
    /* Ends the sleep of a vCPU whose turn it is; made with the first fd */
    EventNotifier notifier;
    bool notifies;
    /* The turn's; -1 if it is always the thread's */
    int fd;
} PostcopyTurn;

/* It is the thread's turn, for ever until postcopy_turn_start() */
void postcopy_turn_init(PostcopyTurn *turn,
                        unsigned (*expected)(PostcopyTurn *turn));

/*
 * The connection is there, and the turn is its thread's.
 *
 * @fd: to be waited for by vCPUs; -1 if the turn is always the thread's
 */
void postcopy_turn_start(PostcopyTurn *turn, int fd);
void postcopy_turn_destroy(PostcopyTurn *turn);

/*
 * A vCPU waits for an answer, and has begun to by postcopy_request_begin().
 * Returns true if it is its turn, and false once the page has come or the vCPU
 * has been kicked.
 */
bool postcopy_turn_take(PostcopyTurn *turn, PostcopyWaiter *waiter);

/*
 * It is the turn of the vCPU of @waiter: sleep until the connection can be
 * read.  Returns false if it cannot: the page has come by another way, or the
 * vCPU has been kicked.
 */
bool postcopy_turn_sleep(PostcopyTurn *turn, PostcopyWaiter *waiter);

/* The turn passes to a vCPU that waits, or to the thread, as with @to_thread */
void postcopy_turn_pass(PostcopyTurn *turn, bool to_thread);

/*
 * In the thread: the same, and sleep until it is its turn again; but the turn
 * stays with it, and false is returned, as long as no vCPU waits.
 */
bool postcopy_turn_offer(PostcopyTurn *turn);

/* Something is to come for which no vCPU waits.  Any thread. */
void postcopy_turn_want(PostcopyTurn *turn);

#endif
