/*
 * Postcopy: faults that userfaultfd reports
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_UFFD_H
#define MIGRATION_POSTCOPY_UFFD_H

#include "migration.h"

/* How often postcopy_uffd_watch() wants to be called, in milliseconds */
#define POSTCOPY_UFFD_WATCH_MS 1000

/**
 * postcopy_uffd_read: serve all faults that userfaultfd has
 *
 * Returns false if no more can be read, after it has reported the error.
 * Called by the fault thread, without locks, when the fd can be read.
 */
bool postcopy_uffd_read(MigrationIncomingState *mis);

/* Warn of a page that does not come.  Called by the fault thread. */
void postcopy_uffd_watch(MigrationIncomingState *mis);

#endif
