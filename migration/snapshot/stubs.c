/*
 * Background snapshot where there is no userfaultfd
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "protect.h"

void snapshot_init(MigrationState *s)
{
}

void snapshot_destroy(MigrationState *s)
{
}

bool snapshot_copies(RAMBlock *rb)
{
    return false;
}

bool snapshot_is_hole(RAMBlock *rb, ram_addr_t offset)
{
    return false;
}

int snapshot_release_saved(QEMUFile *f)
{
    return 0;
}

void snapshot_give_up(void)
{
}

void snapshot_fill_info(MigrationInfo *info)
{
}
