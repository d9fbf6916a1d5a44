/*
 * Background snapshot: which pages were empty when they were protected
 *
 * Anonymous memory, and all that is not named below: by PAGEMAP_SCAN of
 * pagemap, between protection and the resume of the guest.  A page table entry
 * that is empty then was empty when its neighbours were protected, since
 * entries are not emptied meanwhile: the kernel keeps something in them, under
 * the lock of the page table, through swap, migration, splitting, merging and
 * collapsing.  So the page was zero, and stays so in the snapshot whatever is
 * written to it from now on: it is not protected, and not read.  A first write
 * before the scan makes the page data, which is read.  QEMU does not write, as
 * everything that writes to memory is stopped, which the saved state of the
 * devices needs, too.  To scan later, only by the mark of protection, is
 * impossible, since KSM drops that mark.  The zero page is zeros, and is
 * protected.
 *
 * Shared memory of shmem: by lseek(SEEK_DATA) on its file, when the page is to
 * be saved, since an empty entry does not show the state of the page cache.
 * All of it is protected, empty entries too.  A first write, or a read, first
 * puts a page of zeros in the file, then waits for the release of its
 * protection.  So a page that is a hole at any time after protection was one at
 * that time.
 *
 * Shared memory of hugetlbfs: its files do not report holes, but pread() does
 * not fill them.  Mapped pages count as data; the rest is read by pread(), and
 * is a hole if it is zeros.  It is protected as shmem is.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/ioctl.h>
#include <sys/mman.h>
#include "qapi/error.h"
#include "qemu/bitmap.h"
#include "qemu/cutils.h"
#include "qemu/units.h"
#include "exec/memory.h"
#include "holes.h"
#include "trace.h"

/* Bytes of a file that are scanned at once. */
#define WINDOW  (2 * MiB)

/* From Linux 6.7's uapi/linux/fs.h, which many hosts do not have yet */
struct region {
    uint64_t start;
    uint64_t end;
    uint64_t categories;
};

struct scan {
    uint64_t size;
    uint64_t flags;
    uint64_t start;
    uint64_t end;
    uint64_t walk_end;
    uint64_t vec;
    uint64_t vec_len;
    uint64_t max_pages;
    uint64_t category_inverted;
    uint64_t category_mask;
    uint64_t category_anyof_mask;
    uint64_t return_mask;
};

#define SCAN            _IOWR('f', 16, struct scan)
#define IS_PRESENT      (1 << 3)
#define IS_SWAPPED      (1 << 4) /* any other entry that is not empty */
#define IS_ZERO_PAGE    (1 << 5)

struct SnapshotHoles {
    int pagemap;                /* -1: there is no usable one */
    /* Of each block that was scanned: a bit for each page that was not empty */
    GHashTable *scanned;
    /* Part of a file that was scanned last, at most WINDOW; or no block */
    RAMBlock *rb;
    ram_addr_t start;
    unsigned long *window;
    void *buffer;               /* of WINDOW bytes, from the first use on */
};

static void holes_mark(unsigned long *pages, uint64_t start, uint64_t end)
{
    size_t page_size = qemu_real_host_page_size();

    bitmap_set(pages, start / page_size, (end - start) / page_size);
}

/*
 * Set the bits of pages of the @size bytes from @host on that have one of the
 * categories @any and not @not.
 */
static int holes_scan_pagemap(SnapshotHoles *h, unsigned long *pages,
                              void *host, size_t size, uint64_t any,
                              uint64_t not)
{
    struct region regions[512];
    struct scan scan = {
        .size = sizeof(scan),
        .start = (uintptr_t)host,
        .end = (uintptr_t)host + size,
        .vec = (uintptr_t)regions,
        .vec_len = ARRAY_SIZE(regions),
        .category_inverted = not,
        .category_mask = not,
        .category_anyof_mask = any,
    };

    while (scan.start < scan.end) {
        int n = ioctl(h->pagemap, SCAN, &scan);

        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            return -errno;
        }
        for (int i = 0; i < n; i++) {
            holes_mark(pages, regions[i].start - (uintptr_t)host,
                       regions[i].end - (uintptr_t)host);
        }
        if (scan.walk_end <= scan.start) {
            return -EIO;
        }
        scan.start = scan.walk_end;
    }
    return 0;
}

static int holes_scan_there(SnapshotHoles *h, unsigned long *pages, void *host,
                            size_t size)
{
    return holes_scan_pagemap(h, pages, host, size, IS_PRESENT | IS_SWAPPED,
                              IS_ZERO_PAGE);
}

/* Of two pages from @host on, only the first is not empty. */
static bool holes_try_pagemap(SnapshotHoles *h, char *host, Error **errp)
{
    unsigned long pages[1] = { 0 };
    int ret;

    *host = 1;
    ret = holes_scan_there(h, pages, host, 2 * qemu_real_host_page_size());
    if (ret) {
        error_setg_errno(errp, -ret, "PAGEMAP_SCAN");
    } else if (pages[0] != 1) {
        error_setg(errp, "PAGEMAP_SCAN: wrong answer");
    }
    return !ret && pages[0] == 1;
}

static void holes_open_pagemap(SnapshotHoles *h)
{
    size_t size = 2 * qemu_real_host_page_size();
    Error *err = NULL;
    char *host;
    bool ok;

    h->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    host = mmap(NULL, size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (h->pagemap < 0 || host == MAP_FAILED) {
        error_setg_errno(&err, errno, "/proc/self/pagemap");
        ok = false;
    } else {
        ok = holes_try_pagemap(h, host, &err);
    }
    if (host != MAP_FAILED) {
        munmap(host, size);
    }
    if (!ok) {
        trace_snapshot_holes_no_pagemap(error_get_pretty(err));
        error_free(err);
        if (h->pagemap >= 0) {
            close(h->pagemap);
            h->pagemap = -1;
        }
    }
}

SnapshotHoles *snapshot_holes_new(void)
{
    SnapshotHoles *h = g_new0(SnapshotHoles, 1);

    h->scanned = g_hash_table_new_full(NULL, NULL, NULL, g_free);
    h->window = bitmap_new(WINDOW / qemu_real_host_page_size());
    holes_open_pagemap(h);
    return h;
}

void snapshot_holes_free(SnapshotHoles *h)
{
    if (h) {
        if (h->pagemap >= 0) {
            close(h->pagemap);
        }
        g_hash_table_destroy(h->scanned);
        g_free(h->window);
        g_free(h->buffer);
        g_free(h);
    }
}

bool snapshot_holes_can_scan(SnapshotHoles *h)
{
    return h->pagemap >= 0;
}

static bool holes_is_shared_file(RAMBlock *rb)
{
    return (rb->flags & RAM_SHARED) && rb->fd >= 0;
}

int snapshot_holes_scan(SnapshotHoles *h, RAMBlock *rb)
{
    unsigned long *pages;
    int ret;

    if (h->pagemap < 0 || holes_is_shared_file(rb)) {
        return 0;
    }
    pages = bitmap_new(rb->used_length / qemu_real_host_page_size());
    ret = holes_scan_there(h, pages, rb->host, rb->used_length);
    trace_snapshot_holes_scan(rb->idstr, rb->used_length, ret);
    g_hash_table_insert(h->scanned, rb, pages);
    return ret;
}

/* Nothing else uses the file's position: memory is mapped. */
static int holes_scan_shmem(SnapshotHoles *h, RAMBlock *rb, ram_addr_t start,
                            size_t size)
{
    off_t first = rb->fd_offset + start, end = first + size;

    for (off_t hole = first; hole < end;) {
        off_t data = lseek(rb->fd, hole, SEEK_DATA);

        if (data < 0) {
            return errno == ENXIO ? 0 : -errno;
        }
        if (data >= end) {
            break;
        }
        hole = lseek(rb->fd, data, SEEK_HOLE);
        if (hole < 0) {
            return -errno;
        }
        holes_mark(h->window, data - first, MIN(hole, end) - first);
    }
    return 0;
}

static int holes_scan_hugetlbfs(SnapshotHoles *h, RAMBlock *rb,
                                ram_addr_t start, size_t size)
{
    size_t pages = size / qemu_real_host_page_size(), got = 0;

    if (h->pagemap >= 0) {
        int ret = holes_scan_pagemap(h, h->window, rb->host + start, size,
                                     IS_PRESENT, 0);

        if (ret) {
            return ret;
        }
        if (find_first_zero_bit(h->window, pages) >= pages) {
            return 0;
        }
    }
    if (!h->buffer) {
        h->buffer = g_malloc(WINDOW);
    }
    while (got < size) {
        ssize_t n = pread(rb->fd, h->buffer + got, size - got,
                          rb->fd_offset + start + got);

        if (n <= 0) {
            if (n < 0 && errno == EINTR) {
                continue;
            }
            return n ? -errno : -EIO;
        }
        got += n;
    }
    if (!buffer_is_zero(h->buffer, size)) {
        holes_mark(h->window, 0, size);
    }
    return 0;
}

/* Set h->window to the part of a file that begins at @start. */
static void holes_look(SnapshotHoles *h, RAMBlock *rb, ram_addr_t start)
{
    size_t size = MIN(WINDOW, rb->used_length - start);
    size_t pages = size / qemu_real_host_page_size();
    int ret;

    bitmap_zero(h->window, pages);
    ret = rb->page_size > qemu_real_host_page_size()
          ? holes_scan_hugetlbfs(h, rb, start, size)
          : holes_scan_shmem(h, rb, start, size);
    if (ret) {
        bitmap_fill(h->window, pages); /* All pages are protected: read them. */
    }
    h->rb = rb;
    h->start = start;
    trace_snapshot_holes_look(rb->idstr, start, size, ret,
                              bitmap_count_one(h->window, pages));
}

bool snapshot_holes_test(SnapshotHoles *h, RAMBlock *rb, ram_addr_t offset,
                         size_t size)
{
    size_t page_size = qemu_real_host_page_size();
    unsigned long *pages, first, end;

    if (holes_is_shared_file(rb)) {
        ram_addr_t start = QEMU_ALIGN_DOWN(offset, WINDOW);

        if (h->rb != rb || h->start != start) {
            holes_look(h, rb, start);
        }
        pages = h->window;
        offset -= start;
    } else {
        pages = g_hash_table_lookup(h->scanned, rb);
        if (!pages) {
            return false;
        }
    }
    first = offset / page_size;
    end = DIV_ROUND_UP(offset + size, page_size);
    return find_next_bit(pages, end, first) >= end;
}
