/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The memory under test, and how a page of it comes to be there. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stdint.h>

#include "options.h"

struct memory {
    const struct options *options;
    uint8_t *guest;             /* what KVM maps */
    uint8_t *alias;             /* the same file mapped again, for MINOR; else NULL */
    size_t size, page_size;
    unsigned uffds;
    int *uffd;                  /* of equal parts of the memory */
    unsigned long *bitmap;      /* of base pages that are missing, for KVM; or NULL */
};

/* What one thread did; only that thread writes it. */
struct resolve_counts {
    unsigned long exits, uffd_events, eexist;
};

struct memory make_memory(const struct options *options);

/*
 * Make the page at this offset from a buffer of the calling thread, and wake who waits for it if
 * wake. False: it was there already, and nobody was woken.
 */
bool resolve(const struct memory *m, size_t offset, uint8_t *buffer, bool wake);

int uffd_of(const struct memory *m, size_t offset);

/* Pages whose bytes are not what the source had and the vCPUs wrote. */
unsigned long count_bad_pages(const struct memory *m);

#define TOUCHED 0x5a            /* what vCPU n writes to byte n of a page */

#endif
