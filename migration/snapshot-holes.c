/*
 * Background snapshot: which pages held nothing when they were protected
 *
 * Asked after protection, while the guest runs and writes; the answer is about
 * the moment of protection.  Memory that QEMU can be asked about:
 *
 * Anonymous memory, and all that is not below: pagemap's PAGEMAP_SCAN, which
 * tells of each page table entry whether something is there, and whether it is
 * write-protected by userfaultfd.  Without UFFD_FEATURE_WP_UNPOPULATED,
 * protection skips empty entries.  The kernel does it under the lock of the
 * page table, and keeps the mark through swap, migration, splitting and
 * collapsing until it is told to remove it.  So an entry with the mark was
 * there at that moment; one that is there without it was filled later, by a
 * first write or a read, and was a hole.  Nothing is lost if that write comes
 * between protection and this question, or while it is asked.  Memory of
 * files gets marks on empty entries too: they count as data, which is safe.
 * The zero page, if it is marked, was all zeros at that moment and still is.
 *
 * Shared memory of shmem: lseek(SEEK_DATA) on its file, since an empty entry
 * says nothing about the page cache.  All of it is protected, empty entries
 * too.  A first write, or a read, first puts a page of zeros in the file, then
 * waits for its protection to be released.  So what is a hole at any time
 * after protection was one at that moment.
 *
 * Shared memory of hugetlbfs: its files do not tell of holes, but pread() does
 * not fill them.  What is mapped is data, without a look; the rest is read by
 * pread() and is a hole if it is zeros.  It is protected as shmem is.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include "qemu/bitmap.h"
#include "qemu/cutils.h"
#include "qemu/units.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "snapshot-holes.h"
#include "trace.h"

/* As much is asked about at once: what one page table maps on many hosts */
#define WINDOW  (2 * MiB)

/* From Linux 6.7's uapi/linux/fs.h, which is younger than many a host's */
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
#define IS_WRITTEN      (1 << 1) /* not write-protected by userfaultfd */
#define IS_PRESENT      (1 << 3)
#define IS_SWAPPED      (1 << 4) /* any other entry that is not empty */
#define IS_ZERO_PAGE    (1 << 5)

struct SnapshotHoles {
    int pagemap;                /* -1: there is none that serves */
    /* The last answer, of WINDOW bytes or less; no block: there is none */
    RAMBlock *rb;
    ram_addr_t start;
    unsigned long *data;        /* a bit for each host page */
    void *buffer;               /* of WINDOW bytes, from the first use on */
};

static void mark(SnapshotHoles *h, uint64_t start, uint64_t end)
{
    size_t page_size = qemu_real_host_page_size();

    bitmap_set(h->data, start / page_size, (end - start) / page_size);
}

/*
 * Mark the pages of @size bytes from @host on that have one of the categories
 * @any and none of @none.
 */
static int scan_pagemap(SnapshotHoles *h, void *host, size_t size,
                        uint64_t any, uint64_t none)
{
    struct region regions[64];
    struct scan scan = {
        .size = sizeof(scan),
        .start = (uintptr_t)host,
        .end = (uintptr_t)host + size,
        .vec = (uintptr_t)regions,
        .vec_len = ARRAY_SIZE(regions),
        .category_inverted = none,
        .category_mask = none,
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
            mark(h, regions[i].start - (uintptr_t)host,
                 regions[i].end - (uintptr_t)host);
        }
        if (scan.walk_end <= scan.start) {
            return -EIO;
        }
        scan.start = scan.walk_end;
    }
    return 0;
}

static int scan_protected(SnapshotHoles *h, void *host, size_t size)
{
    return scan_pagemap(h, host, size, IS_PRESENT | IS_SWAPPED,
                        IS_WRITTEN | IS_ZERO_PAGE);
}

/*
 * Of the three pages, the first was there when all were protected, the second
 * was written later, the third is still a hole.
 */
static const char *try_pagemap(SnapshotHoles *h, char *pages, int ufd)
{
    size_t page_size = qemu_real_host_page_size();
    int ret;

    pages[0] = 1;
    if (uffd_register_memory(ufd, pages, 3 * page_size,
                             UFFDIO_REGISTER_MODE_WP, NULL) ||
        uffd_change_protection(ufd, pages, 3 * page_size, true, false)) {
        return "cannot protect memory";
    }
    pages[page_size] = 1;
    ret = scan_protected(h, pages, 3 * page_size);
    if (ret) {
        return strerror(-ret);
    }
    return find_first_zero_bit(h->data, 3) == 1 &&
           find_next_bit(h->data, 3, 1) == 3 ? NULL : "wrong answer";
}

static void open_pagemap(SnapshotHoles *h)
{
    size_t size = 3 * qemu_real_host_page_size();
    char *pages = MAP_FAILED;
    const char *why;
    int ufd = -1;

    h->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (h->pagemap < 0) {
        why = strerror(errno);
        goto out;
    }
    ufd = uffd_create_fd(UFFD_FEATURE_PAGEFAULT_FLAG_WP, true);
    if (ufd < 0) {
        why = "no userfaultfd";
        goto out;
    }
    pages = mmap(NULL, size, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    why = pages == MAP_FAILED ? strerror(errno) : try_pagemap(h, pages, ufd);

out:
    if (pages != MAP_FAILED) {
        munmap(pages, size);
    }
    if (ufd >= 0) {
        uffd_close_fd(ufd);
    }
    if (why) {
        trace_snapshot_holes_no_pagemap(why);
        if (h->pagemap >= 0) {
            close(h->pagemap);
            h->pagemap = -1;
        }
    }
}

SnapshotHoles *snapshot_holes_new(void)
{
    SnapshotHoles *h = g_new0(SnapshotHoles, 1);

    h->data = bitmap_new(WINDOW / qemu_real_host_page_size());
    open_pagemap(h);
    return h;
}

void snapshot_holes_free(SnapshotHoles *h)
{
    if (h) {
        if (h->pagemap >= 0) {
            close(h->pagemap);
        }
        g_free(h->data);
        g_free(h->buffer);
        g_free(h);
    }
}

bool snapshot_holes_know_protection(SnapshotHoles *h)
{
    return h->pagemap >= 0;
}

/* The file's position is nobody's: memory is mapped. */
static int scan_shmem(SnapshotHoles *h, RAMBlock *rb, ram_addr_t start,
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
        mark(h, data - first, MIN(hole, end) - first);
    }
    return 0;
}

static int scan_hugetlbfs(SnapshotHoles *h, RAMBlock *rb, ram_addr_t start,
                          size_t size)
{
    size_t pages = size / qemu_real_host_page_size(), got = 0;

    if (h->pagemap >= 0) {
        int ret = scan_pagemap(h, rb->host + start, size, IS_PRESENT, 0);

        if (ret) {
            return ret;
        }
        if (find_first_zero_bit(h->data, pages) >= pages) {
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
        mark(h, 0, size);
    }
    return 0;
}

/* Let h->data be about the window that begins at @start. */
static int look(SnapshotHoles *h, RAMBlock *rb, ram_addr_t start)
{
    size_t size = MIN(WINDOW, rb->used_length - start);
    size_t pages = size / qemu_real_host_page_size();
    int ret = 0;

    bitmap_zero(h->data, pages);
    if ((rb->flags & RAM_SHARED) && rb->fd >= 0) {
        if (rb->page_size > qemu_real_host_page_size()) {
            ret = scan_hugetlbfs(h, rb, start, size);
        } else {
            ret = scan_shmem(h, rb, start, size);
        }
        if (ret) {
            bitmap_fill(h->data, pages); /* it is protected: read it */
            ret = 0;
        }
    } else if (h->pagemap >= 0) {
        /* An error is one: what is not protected changes. */
        ret = scan_protected(h, rb->host + start, size);
    } else {
        bitmap_fill(h->data, pages);
    }
    if (!ret) {
        h->rb = rb;
        h->start = start;
    }
    trace_snapshot_holes_look(rb->idstr, start, size, ret,
                              bitmap_count_one(h->data, pages));
    return ret;
}

int snapshot_holes_test(SnapshotHoles *h, RAMBlock *rb, ram_addr_t offset,
                        size_t size)
{
    ram_addr_t start = QEMU_ALIGN_DOWN(offset, WINDOW);
    size_t page_size = qemu_real_host_page_size();
    unsigned long end;

    if (h->rb != rb || h->start != start) {
        int ret;

        h->rb = NULL;
        ret = look(h, rb, start);
        if (ret) {
            return ret;
        }
    }
    end = DIV_ROUND_UP(offset - start + size, page_size);
    return find_next_bit(h->data, end, (offset - start) / page_size) >= end;
}
