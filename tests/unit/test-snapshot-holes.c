/*
 * Unit test of migration/snapshot/holes.c with the kernel's userfaultfd,
 * pagemap and files
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include "qemu/memfd.h"
#include "qemu/units.h"
#include "qemu/userfaultfd.h"
#include "exec/cpu-common.h"
#include "exec/memory.h"
#include "../migration/snapshot/holes.h"

#define SIZE    (8 * MiB)

typedef struct {
    RAMBlock rb;
    SnapshotHoles *holes;
    int ufd;
} Memory;

static size_t page_size;

static char *at(Memory *m, unsigned page)
{
    return (char *)m->rb.host + page * page_size;
}

static bool hole(Memory *m, unsigned page)
{
    return snapshot_holes_test(m->holes, &m->rb, page * page_size, page_size);
}

/* As ram_write_tracking_start() does */
static void protect(Memory *m)
{
    m->ufd = uffd_create_fd(UFFD_FEATURE_PAGEFAULT_FLAG_WP, true);
    g_assert(m->ufd >= 0);
    g_assert(!uffd_register_memory(m->ufd, m->rb.host, SIZE,
                                   UFFDIO_REGISTER_MODE_WP, NULL));
    g_assert(!uffd_change_protection(m->ufd, m->rb.host, SIZE, true, false));
    m->holes = snapshot_holes_new();
}

/* The guest writes on after the scan. */
static void scan(Memory *m)
{
    g_assert_cmpint(snapshot_holes_scan(m->holes, &m->rb), ==, 0);
}

/* fd: the file, or -1; takes ownership of it */
static void memory_init(Memory *m, int fd, uint32_t flags, size_t huge)
{
    *m = (Memory) {
        .rb.fd = fd,
        .rb.fd_offset = fd < 0 ? 0 : 2 * MiB,
        .rb.flags = RAM_UF_WRITEPROTECT | flags,
        .rb.used_length = SIZE,
        .rb.max_length = SIZE,
        .rb.page_size = huge ?: page_size,
    };
    strcpy(m->rb.idstr, "test");
    m->rb.host = mmap(NULL, SIZE, PROT_READ | PROT_WRITE,
                      (flags & RAM_SHARED ? MAP_SHARED : MAP_PRIVATE) |
                      (fd < 0 ? MAP_ANONYMOUS : 0), fd, m->rb.fd_offset);
    g_assert(m->rb.host != MAP_FAILED);
}

/* After a test, which may have been skipped early */
static void memory_destroy(Memory *m, gconstpointer data)
{
    if (m->holes) {
        snapshot_holes_free(m->holes);
        uffd_close_fd(m->ufd);
    }
    if (m->rb.host) {
        munmap(m->rb.host, SIZE);
    }
    if (m->rb.fd > 0) {
        close(m->rb.fd);
    }
}

static bool can_scan(Memory *m)
{
    if (snapshot_holes_can_scan(m->holes)) {
        return true;
    }
    g_test_skip("no PAGEMAP_SCAN");
    return false;
}

/* Pages of all kinds, in random order */
static void test_anonymous(Memory *m, gconstpointer data)
{
    enum { EMPTY, ZERO_PAGE, ZEROS, DATA, BEFORE_SCAN, AFTER_SCAN, KINDS };
    unsigned pages = SIZE / page_size;
    g_autofree int *kind = g_new(int, pages);

    memory_init(m, -1, 0, 0);
    madvise(m->rb.host, SIZE, MADV_NOHUGEPAGE);
    for (unsigned i = 0; i < pages; i++) {
        kind[i] = g_test_rand_int_range(0, KINDS);
        if (kind[i] == ZERO_PAGE) {
            g_assert(*(volatile char *)at(m, i) == 0);  /* the zero page */
        } else if (kind[i] == ZEROS || kind[i] == DATA) {
            *at(m, i) = kind[i] == DATA;
        }
    }
    protect(m);
    if (!can_scan(m)) {
        return;
    }
    for (unsigned i = 0; i < pages; i++) {
        if (kind[i] == BEFORE_SCAN) {
            *at(m, i) = 1;      /* QEMU never does; it must not get lost */
        }
    }
    scan(m);
    for (unsigned i = 0; i < pages; i++) {
        if (kind[i] == AFTER_SCAN) {
            *at(m, i) = 1;
        }
    }
    for (unsigned i = 0; i < pages; i++) {
        g_assert(hole(m, i) == (kind[i] == EMPTY || kind[i] == ZERO_PAGE ||
                                kind[i] == AFTER_SCAN));
    }
}

static void test_huge(Memory *m, gconstpointer data)
{
    char *host;

    memory_init(m, -1, 0, 0);
    host = (char *)ROUND_UP((uintptr_t)m->rb.host, 2 * MiB);
    if (madvise(host, 2 * MiB, MADV_HUGEPAGE)) {
        g_test_skip("no transparent huge pages");
        return;
    }
    *host = 1;
    protect(m);
    if (can_scan(m)) {
        unsigned first = (host - (char *)m->rb.host) / page_size;

        scan(m);
        /* The whole huge page, if it was one, and no page of the next */
        g_assert(!hole(m, first));
        g_assert(hole(m, first + 1) == hole(m, first + 511));
        g_assert(hole(m, first + 512));
    }
}

/* This mapping writes page 3, another process or mapping writes page 5. */
static void shmem_init(Memory *m, uint32_t flags)
{
    int fd = memfd_create("test", MFD_CLOEXEC);

    g_assert(fd >= 0 && !ftruncate(fd, SIZE + 2 * MiB));
    g_assert(pwrite(fd, "x", 1, 2 * MiB + 5 * page_size) == 1);
    memory_init(m, fd, flags, 0);
    *at(m, 3) = 1;
    protect(m);
    scan(m);
}

static void test_shmem(Memory *m, gconstpointer data)
{
    shmem_init(m, RAM_SHARED);
    g_assert(hole(m, 2));
    g_assert(!hole(m, 3));
    g_assert(hole(m, 4));
    g_assert(!hole(m, 5));
    g_assert(hole(m, SIZE / page_size - 1));
}

/* Memory with data must not be treated as a hole. */
static void test_private_file(Memory *m, gconstpointer data)
{
    shmem_init(m, 0);
    g_assert(!hole(m, 3));
    g_assert(!hole(m, 5));
}

static void test_hugetlbfs(Memory *m, gconstpointer data)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_HUGETLB);
    char *other;

    if (fd < 0 || ftruncate(fd, SIZE + 2 * MiB) ||
        fallocate(fd, 0, 0, SIZE + 2 * MiB)) {
        g_test_skip("no huge pages");
        return;
    }
    g_assert(!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        SIZE + 2 * MiB));
    memory_init(m, fd, RAM_SHARED, 2 * MiB);
    other = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 2 * MiB);
    g_assert(other != MAP_FAILED);
    *at(m, 0) = 1;
    other[2 * MiB] = 1;
    protect(m);
    scan(m);
    g_assert(!hole(m, 0));
    g_assert(!hole(m, 511));
    g_assert(!hole(m, 512));
    g_assert(hole(m, 1024));
    g_assert(hole(m, 2047));
    munmap(other, SIZE);
}

int main(int argc, char **argv)
{
    uint64_t features = 0;

    g_test_init(&argc, &argv, NULL);
    page_size = qemu_real_host_page_size();
    uffd_query_features(&features);
    if (!(features & UFFD_FEATURE_WP_HUGETLBFS_SHMEM)) {
        g_test_message("no userfaultfd, or none that protects files");
        return 77;
    }
#define TEST(name, fn) \
    g_test_add("/snapshot-holes/" name, Memory, NULL, NULL, fn, memory_destroy)
    TEST("anonymous", test_anonymous);
    TEST("huge", test_huge);
    TEST("shmem", test_shmem);
    TEST("private-file", test_private_file);
    TEST("hugetlbfs", test_hugetlbfs);
    return g_test_run();
}
