/*
 * Postcopy: the pages that a guest touches first, in a file
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_WORKING_SET_H
#define MIGRATION_POSTCOPY_WORKING_SET_H

#include "request.h"

/*
 * The file is text: a line with the version, then a line for each run of small
 * pages, with the number of the first one, how many there are, both in
 * hexadecimal, and the name of the RAMBlock.  It is not trusted: one of another
 * guest costs time, and what does not fit is left out.
 */
typedef struct PostcopyWorkingSet PostcopyWorkingSet;

/*
 * With what the file @path has, if it can be read.  Called when the
 * postcopy_length of RAMBlocks is set, which stay as long as the set.
 */
PostcopyWorkingSet *postcopy_working_set_new(const char *path);
void postcopy_working_set_free(PostcopyWorkingSet *set);

/* Whether the file had such a set */
bool postcopy_working_set_read(const PostcopyWorkingSet *set);

/*
 * Pages of @rb from @start on, of @size together in bytes, have been missed.
 * Any thread, no locks needed.
 */
void postcopy_working_set_add(PostcopyWorkingSet *set, RAMBlock *rb,
                              ram_addr_t start, ram_addr_t size);

/*
 * Call @func for each run of pages that the set had when it was made, in bytes:
 * in the order of their addresses, of @most bytes or less, and over small gaps
 */
void postcopy_working_set_each(PostcopyWorkingSet *set, size_t most,
                               void (*func)(RAMBlock *rb, ram_addr_t start,
                                            ram_addr_t size, void *opaque),
                               void *opaque);

/* Write it to its file, unless nothing was added.  Reports what fails. */
void postcopy_working_set_write(PostcopyWorkingSet *set);

#endif
