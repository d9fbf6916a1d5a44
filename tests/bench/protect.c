/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Measures the time to write-protect empty memory by userfaultfd so that the first
 * write to each page is noticed: the ways of the commit that brought
 * UFFD_FEATURE_WP_UNPOPULATED to Linux, and PAGEMAP_SCAN.
 *
 * usage: protect WAY MIB on|off      (on|off: transparent huge pages)
 *
 * Prints one line of JSON. Each run is a process of its own, without the page
 * tables of another run.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Newer than the headers of many hosts */
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

struct region {
    uint64_t start, end, categories;
};

struct scan {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages,
             category_inverted, category_mask, category_anyof_mask, return_mask;
};

#define SCAN        _IOWR('f', 16, struct scan)
#define IS_PRESENT  (1 << 3)
#define IS_SWAPPED  (1 << 4)

#define PAGE        4096
#define ALIGN       (2ul << 20)

enum way { DEFAULT, PRE_READ, MADVISE, WP_UNPOPULATED, PAGEMAP, WAYS };
static const char *const names[WAYS] = {
    "default", "pre-read", "madvise", "wp-unpopulated", "pagemap-scan",
};

static char *memory;
static size_t size;

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void map(int huge)
{
    char *all = mmap(NULL, size + ALIGN, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (all == MAP_FAILED) {
        err(1, "mmap");
    }
    memory = (char *)(((uintptr_t)all + ALIGN - 1) & -ALIGN);
    if (madvise(memory, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE)) {
        err(1, "MADV_HUGEPAGE");
    }
}

static int open_uffd(enum way way)
{
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {
        .api = UFFD_API,
        .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP |
                    (way == WP_UNPOPULATED ? UFFD_FEATURE_WP_UNPOPULATED : 0),
    };
    struct uffdio_register reg = {
        .range = { (uintptr_t)memory, size },
        .mode = UFFDIO_REGISTER_MODE_WP,
    };

    if (fd < 0 || ioctl(fd, UFFDIO_API, &api)) {
        err(1, "userfaultfd");
    }
    if (ioctl(fd, UFFDIO_REGISTER, &reg)) {
        err(1, "UFFDIO_REGISTER");
    }
    return fd;
}

/* Populate the page table's entries, if the way needs them */
static void prepare(enum way way)
{
    if (way == PRE_READ) {
        for (size_t i = 0; i < size; i += PAGE) {
            (void)*(volatile char *)(memory + i);
        }
    } else if (way == MADVISE && madvise(memory, size, MADV_POPULATE_READ)) {
        err(1, "MADV_POPULATE_READ");
    }
}

static void protect(int fd)
{
    struct uffdio_writeprotect wp = {
        .range = { (uintptr_t)memory, size },
        .mode = UFFDIO_WRITEPROTECT_MODE_WP,
    };

    if (ioctl(fd, UFFDIO_WRITEPROTECT, &wp)) {
        err(1, "UFFDIO_WRITEPROTECT");
    }
}

/* Scan for present entries: there are none. */
static void look(void)
{
    struct region regions[512];
    struct scan scan = {
        .size = sizeof(scan),
        .start = (uintptr_t)memory,
        .end = (uintptr_t)memory + size,
        .vec = (uintptr_t)regions,
        .vec_len = 512,
        .category_anyof_mask = IS_PRESENT | IS_SWAPPED,
    };
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    int n = fd < 0 ? -1 : ioctl(fd, SCAN, &scan);

    if (n < 0) {
        err(1, "PAGEMAP_SCAN");
    }
    if (n || scan.walk_end != scan.end) {
        errx(1, "PAGEMAP_SCAN found pages in empty memory");
    }
    close(fd);
}

int main(int argc, char **argv)
{
    enum way way = 0;
    double start;
    int fd;

    while (argc == 4 && way < WAYS && strcmp(argv[1], names[way])) {
        way++;
    }
    if (argc != 4 || way == WAYS) {
        fprintf(stderr, "usage: protect default|pre-read|madvise|"
                "wp-unpopulated|pagemap-scan MIB on|off\n");
        return 2;
    }
    size = strtoul(argv[2], NULL, 0) << 20;
    map(!strcmp(argv[3], "on"));
    fd = open_uffd(way);
    start = now_us();
    prepare(way);
    protect(fd);
    if (way == PAGEMAP) {
        look();
    }
    printf("{\"total_us\": %.1f}\n", now_us() - start);
    return 0;
}
