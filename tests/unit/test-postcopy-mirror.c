/*
 * Unit test of migration/postcopy/mirror.c: which memory has a mirror, with
 * which policy, and for which RAMBlocks it allocates memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/mempolicy.h>
#include <linux/userfaultfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include "qemu/bitops.h"
#include "qemu/units.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/page-vary.h"
#include "../migration/postcopy/mirror.h"

/* Small "huge" pages, which every host has */
#define HUGE    (64 * KiB)
#define SIZE    (16 * MiB)

static PostcopyMirrors mirrors;

const TargetPageBits target_page = { .decided = true, .bits = 12,
                                    .mask = -1ull << 12 };

bool qemu_ram_is_shared(RAMBlock *rb)
{
    return rb->flags & RAM_SHARED;
}

size_t qemu_ram_pagesize(RAMBlock *rb)
{
    return rb->page_size;
}

RamDiscardManager *memory_region_get_ram_discard_manager(MemoryRegion *mr)
{
    return mr->rdm;
}

/* Maps @fd, and takes ownership of it */
static void ram_init(RAMBlock *rb, int fd)
{
    g_assert_cmpint(fd, >=, 0);
    g_assert_cmpint(ftruncate(fd, SIZE), ==, 0);
    *rb = (RAMBlock) {
        .fd = fd,
        .flags = RAM_SHARED,
        .page_size = HUGE,
        .postcopy_length = SIZE,
    };
    rb->host = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    g_assert(rb->host != MAP_FAILED);
}

static void ram_destroy(RAMBlock *rb, gconstpointer data)
{
    postcopy_mirrors_stop(&mirrors);
    postcopy_mirror_close(rb);
    g_assert(!rb->postcopy_mirror);
    munmap(rb->host, SIZE);
    close(rb->fd);
}

static void memfd_init(RAMBlock *rb, gconstpointer data)
{
    ram_init(rb, memfd_create("test", MFD_CLOEXEC));
}

/* How many bytes of memory the file has */
static uint64_t memory(RAMBlock *rb)
{
    struct stat st;

    g_assert_cmpint(fstat(rb->fd, &st), ==, 0);
    return st.st_blocks * 512;
}

static void wait_for_memory(RAMBlock *rb)
{
    int64_t end = g_get_monotonic_time() + 10 * G_USEC_PER_SEC;

    while (memory(rb) < SIZE) {
        g_assert_cmpint(g_get_monotonic_time(), <, end);
        g_usleep(1000);
    }
}

static void assert_no_mirror(RAMBlock *rb, bool others)
{
    g_assert_cmpuint(postcopy_mirror_open(&mirrors, rb, others), ==, 0);
    g_assert(!postcopy_mirror(rb, 0));
}

static void test_none(RAMBlock *rb, gconstpointer data)
{
    assert_no_mirror(rb, true);
    rb->page_size = 4 * KiB;
    assert_no_mirror(rb, false);
    rb->page_size = HUGE;
    rb->flags = 0;
    assert_no_mirror(rb, false);
    postcopy_mirrors_start(&mirrors);
}

static void test_same_memory(RAMBlock *rb, gconstpointer data)
{
    g_assert_cmpuint(postcopy_mirror_open(&mirrors, rb, false), ==,
                     UFFDIO_REGISTER_MODE_MINOR);
    *(char *)postcopy_mirror(rb, HUGE + 1) = 42;
    g_assert_cmpint(((char *)rb->host)[HUGE + 1], ==, 42);
}

static void test_memory_comes_before(RAMBlock *rb, gconstpointer data)
{
    postcopy_mirror_open(&mirrors, rb, false);
    ((char *)postcopy_mirror(rb, 0))[HUGE] = 42;
    postcopy_mirrors_start(&mirrors);
    wait_for_memory(rb);
    g_assert_cmpint(((char *)rb->host)[HUGE], ==, 42);
}

static void test_not_for_unplugged_memory(RAMBlock *rb, gconstpointer data)
{
    MemoryRegion mr = { .rdm = (void *)&mr };   /* is never queried */
    RAMBlock unplugged;

    memfd_init(&unplugged, NULL);
    unplugged.mr = &mr;
    postcopy_mirror_open(&mirrors, &unplugged, false);
    postcopy_mirror_open(&mirrors, rb, false);
    postcopy_mirrors_start(&mirrors);
    /* Memory is allocated in the order of the blocks */
    wait_for_memory(rb);
    g_assert_cmpuint(memory(&unplugged), ==, 0);
    ram_destroy(&unplugged, NULL);
}

static void test_stopped_early(void)
{
    for (int i = 0; i < 50; i++) {
        RAMBlock rb;

        memfd_init(&rb, NULL);
        postcopy_mirror_open(&mirrors, &rb, false);
        postcopy_mirrors_start(&mirrors);
        g_usleep(i * 20);
        ram_destroy(&rb, NULL);
    }
}

/*
 * The policy of a mapping, as of hugetlbfs, not that of the file, which shmem
 * has.
 */
static void test_policy(void)
{
    unsigned long nodes[BITS_TO_LONGS(1024)] = { 1 };
    RAMBlock rb;
    char name[] = "test-postcopy-mirror-XXXXXX";
    int mode;

    ram_init(&rb, g_mkstemp(name));
    unlink(name);
    if (syscall(SYS_mbind, rb.host, SIZE, MPOL_BIND, nodes, 1025, 0)) {
        g_test_skip("Linux without NUMA");
    } else {
        postcopy_mirror_open(&mirrors, &rb, false);
        nodes[0] = 0;
        g_assert_cmpint(syscall(SYS_get_mempolicy, &mode, nodes, 1025,
                                postcopy_mirror(&rb, 0), MPOL_F_ADDR), ==, 0);
        g_assert_cmpint(mode, ==, MPOL_BIND);
        g_assert_cmpuint(nodes[0], ==, 1);
    }
    ram_destroy(&rb, NULL);
}

int main(int argc, char **argv)
{
    uint64_t features = 0;

    g_test_init(&argc, &argv, NULL);
    uffd_query_features(&features);
    if (!(features & UFFD_FEATURE_MINOR_HUGETLBFS)) {
        g_test_message("no userfaultfd, or none with minor faults");
        return 77;
    }
#define TEST(name, fn) \
    g_test_add("/postcopy-mirror/" name, RAMBlock, NULL, memfd_init, fn, \
               ram_destroy)
    TEST("none", test_none);
    TEST("same-memory", test_same_memory);
    TEST("memory-comes-before", test_memory_comes_before);
    TEST("not-for-unplugged-memory", test_not_for_unplugged_memory);
    g_test_add_func("/postcopy-mirror/stopped-early", test_stopped_early);
    g_test_add_func("/postcopy-mirror/policy", test_policy);
    return g_test_run();
}
