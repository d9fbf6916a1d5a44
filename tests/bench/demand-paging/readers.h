/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The threads that read userfaultfds and make the pages that are missed. */
#ifndef READERS_H
#define READERS_H

#include <pthread.h>

#include "memory.h"
#include "stats.h"

struct reader {
    const struct memory *memory;
    int uffd, stop;             /* stop: an eventfd that is readable when all is over */
    pthread_t thread;
    /* The thread's own until it has ended */
    struct thread_stats stats;
};

struct readers {
    unsigned count;
    int stop;
    struct reader *reader;
};

struct readers start_readers(const struct memory *m);
void stop_readers(struct readers *readers);

#endif
