/*
 * Postcopy: whose turn it is to read a connection
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/lockable.h"
#include "qemu/timer.h"
#include "fetch-reader.h"

void postcopy_turn_init(PostcopyTurn *turn,
                        unsigned (*expected)(PostcopyTurn *turn))
{
    turn->expected = expected;
    turn->notifies = false;
    turn->fd = -1;
    qemu_mutex_init(&turn->lock);
    QTAILQ_INIT(&turn->waiting);
    postcopy_waiter_init(&turn->thread);
    turn->reader = &turn->thread;
}

void postcopy_turn_start(PostcopyTurn *turn, int fd)
{
    if (fd >= 0 && !turn->notifies) {
        turn->notifies = event_notifier_init(&turn->notifier, false) >= 0;
    }
    turn->fd = turn->notifies ? fd : -1;
}

void postcopy_turn_destroy(PostcopyTurn *turn)
{
    postcopy_waiter_destroy(&turn->thread);
    qemu_mutex_destroy(&turn->lock);
    if (turn->notifies) {
        event_notifier_cleanup(&turn->notifier);
    }
}

bool postcopy_turn_take(PostcopyTurn *turn, PostcopyWaiter *waiter)
{
    WITH_QEMU_LOCK_GUARD(&turn->lock) {
        if (!turn->reader) {
            qatomic_set(&turn->reader, waiter);
            return true;
        }
        turn->asked = true;
        QTAILQ_INSERT_TAIL(&turn->waiting, waiter, next_waiting);
    }
    while (!postcopy_waiter_is_woken(waiter) &&
           qatomic_read(&turn->reader) != waiter) {
        qemu_event_wait(&waiter->woken);
        qemu_event_reset(&waiter->woken);
    }
    /* If the turn has been passed to it, it must pass it on */
    QEMU_LOCK_GUARD(&turn->lock);
    QTAILQ_REMOVE(&turn->waiting, waiter, next_waiting);
    return turn->reader == waiter;
}

#ifdef CONFIG_POSIX
bool postcopy_turn_sleep(PostcopyTurn *turn, PostcopyWaiter *waiter)
{
    GPollFD fds[] = {
        { .fd = turn->fd, .events = G_IO_IN },
        { .fd = event_notifier_get_fd(&turn->notifier), .events = G_IO_IN },
    };

    qatomic_set(&waiter->notifier, &turn->notifier);
    /* Pairs with qemu_event_set() in postcopy_waiter_wake() */
    smp_mb();
    while (!postcopy_waiter_is_woken(waiter) && !fds[0].revents) {
        /* A signal, or what was meant for the one before: look again */
        if (qemu_poll_ns(fds, ARRAY_SIZE(fds), -1) > 0 && fds[1].revents) {
            event_notifier_test_and_clear(&turn->notifier);
        }
    }
    qatomic_set(&waiter->notifier, NULL);
    return fds[0].revents;
}
#else
/* There, no vCPU leaves its accelerator for a missing page */
bool postcopy_turn_sleep(PostcopyTurn *turn, PostcopyWaiter *waiter)
{
    g_assert_not_reached();
}
#endif

/* With the lock.  Returns who is to be woken, or NULL. */
static PostcopyWaiter *postcopy_turn_next(PostcopyTurn *turn, bool to_thread)
{
    unsigned expected = turn->expected(turn);
    PostcopyWaiter *next = expected ? &turn->thread : NULL, *waiter;

    if (to_thread || expected > POSTCOPY_TURN_PAGES) {
        next = &turn->thread;
    } else {
        QTAILQ_FOREACH(waiter, &turn->waiting, next_waiting) {
            /* Who has been woken, but has not run yet, has no use for it */
            if (!postcopy_waiter_is_woken(waiter)) {
                next = waiter;
                break;
            }
        }
    }
    qatomic_set(&turn->reader, next);
    return next;
}

void postcopy_turn_pass(PostcopyTurn *turn, bool to_thread)
{
    PostcopyWaiter *next;

    WITH_QEMU_LOCK_GUARD(&turn->lock) {
        next = postcopy_turn_next(turn, to_thread);
    }
    if (next) {
        qemu_event_set(&next->woken);
    }
}

bool postcopy_turn_offer(PostcopyTurn *turn)
{
    PostcopyWaiter *thread = &turn->thread, *next;

    if (turn->fd < 0) {
        return false;
    }
    WITH_QEMU_LOCK_GUARD(&turn->lock) {
        next = turn->asked ? postcopy_turn_next(turn, false) : thread;
        turn->asked = turn->asked && next == thread;
    }
    if (next == thread) {
        return false;
    }
    if (next) {
        qemu_event_set(&next->woken);
    }
    while (true) {
        qemu_event_wait(&thread->woken);
        qemu_event_reset(&thread->woken);
        QEMU_LOCK_GUARD(&turn->lock);
        if (turn->reader == thread) {
            return true;
        }
    }
}

void postcopy_turn_want(PostcopyTurn *turn)
{
    WITH_QEMU_LOCK_GUARD(&turn->lock) {
        if (turn->reader) {
            return;
        }
        qatomic_set(&turn->reader, &turn->thread);
    }
    qemu_event_set(&turn->thread.woken);
}
