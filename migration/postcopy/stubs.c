/*
 * Postcopy where there is no userfaultfd: pages are never missed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "migration/postcopy-ram.h"
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
                           const PostcopyPage *page, unsigned n, void *data)
{
    g_assert_not_reached();
}

int postcopy_receive_zero(MigrationIncomingState *mis, const PostcopyPage *page)
{
    g_assert_not_reached();
}

void postcopy_receive_abort(MigrationIncomingState *mis)
{
    g_assert_not_reached();
}
