/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "fail.h"
#include "kvm-abi.h"
#include "readers.h"

static void serve(struct reader *r, const struct uffd_msg *msg, uint8_t *buffer)
{
    const struct memory *m = r->memory;
    size_t offset;

    if (msg->event != UFFD_EVENT_PAGEFAULT) {
        fail("userfaultfd tells of event %#x", msg->event);
    }
    offset = (msg->arg.pagefault.address - (uintptr_t)m->guest) & ~(m->page_size - 1);
    r->stats.counts.uffd_events++;
    if (!resolve(m, offset, buffer, true)) {
        struct uffdio_range page = { (uintptr_t)m->guest + offset, m->page_size };

        r->stats.counts.eexist++;
        if (ioctl(r->uffd, UFFDIO_WAKE, &page)) {
            fail("UFFDIO_WAKE: %m");
        }
    }
}

static void *run_reader(void *opaque)
{
    struct reader *r = opaque;
    uint8_t *buffer = aligned_alloc(r->memory->page_size, r->memory->page_size);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event uffd = { .events = EPOLLIN | EPOLLEXCLUSIVE, .data.fd = r->uffd };
    struct epoll_event stop = { .events = EPOLLIN, .data.fd = r->stop };

    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, r->uffd, &uffd) || epoll_ctl(epoll, EPOLL_CTL_ADD, r->stop, &stop)) {
        fail("epoll: %m");
    }
    for (size_t i = 0; i < r->memory->page_size; i++) {
        buffer[i] = 0;
    }
    begin_thread_stats(&r->stats);
    for (;;) {
        struct epoll_event event;
        struct uffd_msg msg;
        ssize_t got;

        if (epoll_wait(epoll, &event, 1, -1) != 1) {
            if (errno == EINTR) {
                continue;
            }
            fail("epoll_wait: %m");
        }
        if (event.data.fd == r->stop) {
            break;
        }
        /* One message at a time; another reader may have been faster, or its fault be over. */
        got = read(r->uffd, &msg, sizeof(msg));
        if (got == sizeof(msg)) {
            serve(r, &msg, buffer);
        } else if (got >= 0 || errno != EAGAIN) {
            fail("read of userfaultfd: %m");
        }
    }
    end_thread_stats(&r->stats);
    close(epoll);
    free(buffer);
    return NULL;
}

struct readers start_readers(const struct memory *m)
{
    unsigned per_uffd = m->options->readers;
    struct readers all = { .count = m->uffds * per_uffd, .stop = eventfd(0, EFD_CLOEXEC) };

    if (all.stop < 0) {
        fail("eventfd: %m");
    }
    all.reader = calloc(all.count, sizeof(*all.reader));
    for (unsigned i = 0; i < all.count; i++) {
        struct reader *r = &all.reader[i];

        r->memory = m;
        r->uffd = m->uffd[i / per_uffd];
        r->stop = all.stop;
        errno = pthread_create(&r->thread, NULL, run_reader, r);
        if (errno) {
            fail("reader thread: %m");
        }
    }
    return all;
}

void stop_readers(struct readers *readers)
{
    if (eventfd_write(readers->stop, 1)) {
        fail("eventfd: %m");
    }
    for (unsigned i = 0; i < readers->count; i++) {
        pthread_join(readers->reader[i].thread, NULL);
    }
}
