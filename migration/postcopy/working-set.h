/*
 * Postcopy: a file that lists the pages that a guest touches first
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_WORKING_SET_H
#define MIGRATION_POSTCOPY_WORKING_SET_H

#include "request.h"

/*
 * The file is text: a line with the version, then a line for each run of small
 * pages, with the number of the first page and the number of pages, both in
 * hexadecimal, and the name of the RAMBlock.  It is not trusted: another
 * guest's file costs time, and lines that are invalid here are ignored.
 */
typedef struct PostcopyWorkingSet PostcopyWorkingSet;

/*
 * Make a set from the file @path, if it can be read.  Called when the
 * postcopy_length of RAMBlocks is set; the blocks must stay as long as the set.
 * Returns NULL, with a warning, if the file is something else.
 */
PostcopyWorkingSet *postcopy_working_set_new(const char *path);
void postcopy_working_set_free(PostcopyWorkingSet *set);

/* Whether the file contained such a set */
bool postcopy_working_set_read(const PostcopyWorkingSet *set);

/*
 * Pages of @rb were missed, @size bytes from @start on.  Any thread, no locks
 * needed.
 */
void postcopy_working_set_add(PostcopyWorkingSet *set, RAMBlock *rb,
                              ram_addr_t start, ram_addr_t size);

/*
 * Call @func for each run of pages that the set contained when it was made, in
 * bytes: by address, at most @most bytes each, and across small gaps
 */
void postcopy_working_set_each(PostcopyWorkingSet *set, size_t most,
                               void (*func)(RAMBlock *rb, ram_addr_t start,
                                            ram_addr_t size, void *opaque),
                               void *opaque);

/* Write @set to its file, unless nothing was added.  Warns if that fails. */
void postcopy_working_set_write(PostcopyWorkingSet *set);

#endif
