/*
 * Guest time: "info migrate"
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_GUEST_TIME_HMP_H
#define MIGRATION_GUEST_TIME_HMP_H

#include "qapi/qapi-types-migration.h"

void guest_time_hmp_print(Monitor *mon, const MigrationInfo *info);

#endif
