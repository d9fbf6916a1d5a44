/*
 * Background snapshot: "info migrate"
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_SNAPSHOT_HMP_H
#define MIGRATION_SNAPSHOT_HMP_H

#include "qapi/qapi-types-migration.h"

void snapshot_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
