/*
 * Postcopy: a guest that runs while its memory is in a file
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FILE_H
#define MIGRATION_POSTCOPY_FILE_H

#include "qapi/qapi-types-migration.h"
#include "migration/migration.h"

/*
 * A file of the capability mapped-ram is loaded with the capability
 * postcopy-ram: only the bitmap of each RAMBlock is read, the devices are
 * loaded, and the guest runs.  A page is read when it is missed, and a thread
 * reads the others meanwhile.  Nothing is sent, so that comments on the source
 * in postcopy apply to the file.
 */

/* Refuse settings that such a load cannot have.  Before the file is opened. */
bool postcopy_file_check(Error **errp);

/**
 * postcopy_file_add: record where the pages of a block are
 *
 * @f: the migration stream, a file
 * @rb: its used_length is that in the file
 * @bitmap_offset: in the file, in bytes; there is one bit for each page of the
 *     target; pages with a clear bit are zeros, whatever the file contains
 * @pages_offset: in the file, in bytes; of a page of the target or none
 * @bitmap: the function takes ownership, also if it fails
 *
 * Called in the coroutine that loads the stream, before any device is loaded.
 */
bool postcopy_file_add(QEMUFile *f, RAMBlock *rb, uint64_t bitmap_offset,
                       uint64_t pages_offset, unsigned long *bitmap,
                       Error **errp);

/*
 * From here on memory may be missing.  Does nothing if postcopy_file_add() was
 * not called.  With the BQL, outside of an RCU critical section.  Returns 0, or
 * negative errno after it has reported the error.
 */
int postcopy_file_begin(MigrationIncomingState *mis);

/* Whether the guest's memory is in a file, or was until all was read */
bool postcopy_file_active(MigrationIncomingState *mis);

/*
 * The devices were loaded, with the result @ret: the guest is about to run,
 * when its working set was read or has taken too long.  Returns 0, or negative
 * errno if it must not run.  With the BQL.
 */
int coroutine_fn postcopy_file_loaded(MigrationIncomingState *mis, int ret);

/* The guest runs, or stays stopped: read the rest.  With the BQL. */
void postcopy_file_run(MigrationIncomingState *mis);

/* Stop reading, as if the file could not be read.  Any thread. */
void postcopy_file_pause(MigrationIncomingState *mis);

/**
 * postcopy_file_recover: continue with a file that has the same content
 *
 * @f: opened for this; the function closes it
 *
 * Any thread, also without the BQL, which a thread that waits for a page may
 * hold.
 */
void postcopy_file_recover(MigrationIncomingState *mis, QEMUFile *f);

/*
 * Lock @fd, to which an outgoing migration is about to be written.  Fails if a
 * guest runs from the same file.  Closing the file releases the lock, unless
 * another process has the same descriptor.
 */
bool postcopy_file_lock(int fd, Error **errp);
/* All was written to @f, if it is a file: a guest may run from it */
void postcopy_file_unlock(QEMUFile *f);

/* For query-migrate, with the BQL */
void postcopy_file_fill_info(MigrationIncomingState *mis, MigrationInfo *info);

#endif
