/*
 * Postcopy: faults that userfaultfd reports
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_UFFD_H
#define MIGRATION_POSTCOPY_UFFD_H

#include "migration.h"

/**
 * postcopy_uffd_read: serve all faults that userfaultfd has
 *
 * Returns false if no more can be read, after it has reported the error.
 * Called by the fault thread, without locks, when the fd can be read.
 */
bool postcopy_uffd_read(MigrationIncomingState *mis);

#endif
