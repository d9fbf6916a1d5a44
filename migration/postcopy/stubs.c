/*
 * Postcopy where there is no userfaultfd: pages are never missed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "migration/postcopy-ram.h"
#include "file.h"
#include "receive.h"

void mark_postcopy_blocktime_begin(uintptr_t addr, uint32_t ptid, RAMBlock *rb)
{
    g_assert_not_reached();
}

void mark_postcopy_blocktime_end(uintptr_t addr)
{
    g_assert_not_reached();
}

int postcopy_receive_begin(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                           RAMBlock *rb)
{
    g_assert_not_reached();
}

int postcopy_receive_end(MigrationIncomingState *mis, PostcopyTmpPage *tmp,
                         QEMUFile *f, RAMBlock *rb, void *data)
{
    g_assert_not_reached();
}

int postcopy_receive_run_end(MigrationIncomingState *mis, unsigned channel)
{
    g_assert_not_reached();
}

int postcopy_receive_pages(MigrationIncomingState *mis,
                           const PostcopyPage *page, unsigned n, void *data,
                           bool move)
{
    g_assert_not_reached();
}

void postcopy_unclaim_all(MigrationIncomingState *mis)
{
    g_assert_not_reached();
}

const PostcopySource postcopy_file;

bool postcopy_file_check(Error **errp)
{
    return true;
}

bool postcopy_file_lock(int fd, Error **errp)
{
    return true;
}

void postcopy_file_unlock(QEMUFile *f)
{
}

bool postcopy_file_add(QEMUFile *f, RAMBlock *rb, uint64_t bitmap_offset,
                       uint64_t pages_offset, unsigned long *bitmap,
                       Error **errp)
{
    error_setg(errp, "mapped-ram with postcopy-ram needs userfaultfd");
    g_free(bitmap);
    return false;
}

int postcopy_file_begin(MigrationIncomingState *mis)
{
    return 0;
}

bool postcopy_file_active(MigrationIncomingState *mis)
{
    return false;
}

int postcopy_file_loaded(MigrationIncomingState *mis, int ret)
{
    g_assert_not_reached();
}

void postcopy_file_run(MigrationIncomingState *mis)
{
    g_assert_not_reached();
}

void postcopy_file_pause(MigrationIncomingState *mis)
{
    g_assert_not_reached();
}

void postcopy_file_recover(MigrationIncomingState *mis, QEMUFile *f)
{
    g_assert_not_reached();
}

void postcopy_file_fill_info(MigrationIncomingState *mis, MigrationInfo *info)
{
}
