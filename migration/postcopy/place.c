/*
 * Postcopy: making received pages visible to the guest
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/ioctl.h>
#include <linux/userfaultfd.h>
#include "qemu/error-report.h"
#include "qemu/userfaultfd.h"
#include "exec/cpu-common.h"
#include "migration/inject.h"
#include "mirror.h"
#include "place.h"
#include "trace.h"

/*
 * One attempt.  Returns how many bytes were placed before an error, or negative
 * errno if none were.  linux/userfaultfd.h: the kernel stores either in the
 * field, and EAGAIN in errno if only a part was done.
 */
static int64_t postcopy_try_copy(int ufd, void *host, void *from, size_t size,
                                 bool wake)
{
    struct uffdio_copy copy = {
        .dst = (uintptr_t)host,
        .src = (uintptr_t)from,
        .len = size,
        .mode = wake ? 0 : UFFDIO_COPY_MODE_DONTWAKE,
    };

    return ioctl(ufd, UFFDIO_COPY, &copy) && copy.copy <= 0 ? -errno
                                                            : copy.copy;
}

static int64_t postcopy_try_zero(int ufd, void *host, size_t size, bool wake)
{
    struct uffdio_zeropage zero = {
        .range = { .start = (uintptr_t)host, .len = size },
        .mode = wake ? 0 : UFFDIO_ZEROPAGE_MODE_DONTWAKE,
    };

    return ioctl(ufd, UFFDIO_ZEROPAGE, &zero) && zero.zeropage <= 0
           ? -errno : zero.zeropage;
}

static int64_t postcopy_try_continue(int ufd, void *host, size_t size,
                                     bool wake)
{
    struct uffdio_continue cont = {
        .range = { .start = (uintptr_t)host, .len = size },
        .mode = wake ? 0 : UFFDIO_CONTINUE_MODE_DONTWAKE,
    };

    return ioctl(ufd, UFFDIO_CONTINUE, &cont) && cont.mapped <= 0
           ? -errno : cont.mapped;
}

static int64_t postcopy_try_move(int ufd, void *host, void *from, size_t size,
                                 bool wake)
{
    struct uffdio_move move = {
        .dst = (uintptr_t)host,
        .src = (uintptr_t)from,
        .len = size,
        .mode = wake ? 0 : UFFDIO_MOVE_MODE_DONTWAKE,
    };

    return ioctl(ufd, UFFDIO_MOVE, &move) && move.move <= 0 ? -errno
                                                            : move.move;
}

int postcopy_place(PostcopyRequests *r, int ufd, const PostcopyPage *page,
                   unsigned n, void *from, bool move, bool wake)
{
    /*
     * @wake: most pages are received before any thread waits for them, and
     * waking takes a lock that all faults of this process share.  The comment
     * on postcopy_request_complete() states why no wakeup is lost.
     */
    void *mirror = postcopy_mirror(page->rb, page->start);
    PostcopyPlaceMethod method = POSTCOPY_PLACE_COPY;
    size_t size = n * page->size, done = 0;
    void *host = page->host;
    bool waits;
    int64_t ret = 0;

    while (done < size) {
        if (migration_inject_fail("postcopy-place")) {
            ret = -ENOMEM;
        } else if (move) {
            ret = postcopy_try_move(ufd, host, from, size, wake);
            /* Since Linux 6.8.  Pages that it does not move are copied. */
            move = false;
            ret = MAX(ret, 0);
        } else if (from && from == mirror) {
            method = POSTCOPY_PLACE_CONTINUE;
            ret = postcopy_try_continue(ufd, host + done, size - done, wake);
        } else if (from) {
            ret = postcopy_try_copy(ufd, host + done, from + done, size - done,
                                    wake);
        } else {
            method = POSTCOPY_PLACE_ZERO;
            ret = postcopy_try_zero(ufd, host + done, size - done, wake);
        }
        if (ret == -EAGAIN) {
            continue;       /* the address space is being changed */
        }
        if (ret == -EEXIST && mirror && from != mirror) {
            /*
             * The file has the page, not mapped yet: its memory was allocated
             * beforehand, or a part was received before the connection broke
             */
            ret = postcopy_mirror_populate(mirror, size);
            if (!ret) {
                from = from ? memcpy(mirror, from, size)
                            : memset(mirror, 0, size);
                done = 0;
                continue;
            }
        }
        if (ret == -EEXIST && page->size > qemu_real_host_page_size()) {
            /*
             * No other thread has placed the page: Linux (6.12 and 6.18)
             * returns this where it could not allocate a huge page.
             */
            ret = -ENOMEM;
        }
        if (ret < 0) {
            error_report("postcopy: cannot place the page at offset 0x"
                         RAM_ADDR_FMT " of %s: %s", page->start + done,
                         qemu_ram_get_idstr(page->rb), strerror(-ret));
            break;
        }
        done += ret;
    }

    /* Of a huge page, a part does not count */
    n = done / page->size;
    if (!n) {
        postcopy_request_unclaim(r, page);
        return ret;
    }
    if (wake) {
        migration_inject_hold("postcopy-placed");
    }
    waits = postcopy_request_complete(r, page, n, method, wake);
    if (waits && !wake) {
        uffd_wakeup(ufd, host, done);
    }
    trace_postcopy_place(qemu_ram_get_idstr(page->rb), page->start, n, method,
                         waits, wake);
    return MIN(ret, 0);
}
