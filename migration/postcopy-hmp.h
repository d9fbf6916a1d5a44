/*
 * Postcopy: "info migrate" on the destination
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_HMP_H
#define MIGRATION_POSTCOPY_HMP_H

#include "qapi/qapi-types-migration.h"

/* Prints nothing if there was no postcopy */
void postcopy_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
