/*
 * Postcopy: page requests on the return path
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/lockable.h"
#include "migration/migration.h"
#include "migration/qemu-file.h"
#include "incoming.h"
#include "source.h"

static int return_path_request(MigrationIncomingState *mis,
                               const PostcopyPage *page, bool flush_later)
{
    int ret;

    /* Without rp_mutex, which the sender of a recovery's bitmap may hold */
    if (qatomic_read(&mis->postcopy->hold_requests)) {
        return -EIO;
    }
    QEMU_LOCK_GUARD(&mis->rp_mutex);
    if (mis->postcopy->hold_requests) {
        return -EIO;
    }
    ret = migrate_put_rp_req_pages(mis, page->rb, page->start);
    return ret || flush_later ? ret : qemu_fflush(mis->to_src_file);
}

static void return_path_flush(MigrationIncomingState *mis)
{
    QEMU_LOCK_GUARD(&mis->rp_mutex);
    if (mis->to_src_file) {
        qemu_fflush(mis->to_src_file);
    }
}

const PostcopySource postcopy_return_path = {
    .request = return_path_request,
    .flush = return_path_flush,
};
