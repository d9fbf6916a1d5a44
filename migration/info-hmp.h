/*
 * HMP: what "info migrate" tells of guest time, snapshots and postcopy's faults
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_INFO_HMP_H
#define MIGRATION_INFO_HMP_H

#include "qapi/qapi-types-migration.h"

/* Prints those that @info has */
void migration_info_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
