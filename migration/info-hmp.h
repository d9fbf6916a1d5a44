/*
 * HMP: output of "info migrate" on guest time, snapshots and postcopy's faults
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_INFO_HMP_H
#define MIGRATION_INFO_HMP_H

#include "qapi/qapi-types-migration.h"

/* Prints the parts that @info contains */
void migration_info_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
