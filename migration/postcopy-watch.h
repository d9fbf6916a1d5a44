/*
 * Postcopy: pages that do not come
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_WATCH_H
#define MIGRATION_POSTCOPY_WATCH_H

#include "migration.h"

/* What has not come after so long is worth a warning; a page, so often */
#define POSTCOPY_LATE_MS 10000

/*
 * Warn from time to time, until postcopy has ended, if a requested page is
 * late.  Called once for each postcopy, with the BQL.
 */
void postcopy_watch_start(MigrationIncomingState *mis);

#endif
