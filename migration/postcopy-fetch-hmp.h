/*
 * Postcopy: "info migrate" about fetch channels
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_HMP_H
#define MIGRATION_POSTCOPY_FETCH_HMP_H

#include "qapi/qapi-types-migration.h"

void postcopy_fetch_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
