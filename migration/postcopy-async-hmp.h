/*
 * Postcopy: "info migrate" about vCPUs that do not wait
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_ASYNC_HMP_H
#define MIGRATION_POSTCOPY_ASYNC_HMP_H

#include "qapi/qapi-types-migration.h"

void postcopy_async_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
