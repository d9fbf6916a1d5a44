/*
 * Unit test of migration/postcopy/place.c with the kernel's userfaultfd: no
 * thread sleeps on, and no thread is woken needlessly
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include "qapi/error.h"
#include "qemu/atomic.h"
#include "qemu/memfd.h"
#include "qemu/units.h"
#include "qemu/userfaultfd.h"
#include "exec/cpu-common.h"
#include "../migration/inject.h"
#include "../migration/postcopy/mirror.h"
#include "../migration/postcopy/place.h"

/* Linux 5.11; enough for faults of this process's own threads */
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

#define PAGES 2048
#define READERS 6
#define PAGE page_size
#define host_memory ram

static size_t page_size;
static char *ram;

#include "postcopy-common.h"

static unsigned patience = 20;      /* seconds until a reader counts as hung */
static bool break_wake_rule;        /* do not wake readers that need it */
static char *mirror;                /* NULL for anonymous memory */
static int ufd;
static bool quit;                   /* atomic */
static int wakes;                   /* written by the fault thread */

const char *qemu_ram_get_idstr(RAMBlock *rb)
{
    return "test";
}

int postcopy_mirror_populate(void *page, size_t size)
{
    return madvise(page, size, MADV_POPULATE_WRITE) ? -errno : 0;
}

void *postcopy_mirror(RAMBlock *rb, ram_addr_t start)
{
    return mirror ? mirror + start : NULL;
}

#ifdef CONFIG_MIGRATION_INJECT
void migration_inject_hold(const char *point)
{
}

bool migration_inject_fail(const char *point)
{
    return false;
}
#endif

static void place(unsigned page)
{
    g_autofree uintptr_t *from = g_malloc0(page_size);
    /* Every fourth page is zero */
    void *content = page % 4 ? from : NULL;
    PostcopyClaim claim;

    from[0] = page % 4 ? page : 0;
    postcopy_request_claim(requests, &pages[page], 1, !content, &claim);
    if (claim.drop) {
        return;
    }
    if (mirror) {
        /* An earlier part of the page: invisible, and in the way of zeros */
        if (page % 8) {
            memset(mirror + page * page_size, 0xff, page_size);
        }
        if (content) {
            content = memcpy(mirror + page * page_size, from, page_size);
        }
    }
    g_assert_cmpint(postcopy_place(requests, ufd, &pages[page], 1, content,
                                   false, claim.uffd), ==, 0);
}

static void *fault_thread(void *opaque)
{
    struct pollfd pfd = { .fd = ufd, .events = POLLIN };

    while (!qatomic_read(&quit)) {
        PostcopyPageState state;
        struct uffd_msg msg;
        unsigned page;

        if (poll(&pfd, 1, 10) <= 0 || uffd_read_events(ufd, &msg, 1) != 1) {
            continue;
        }
        page = (msg.arg.pagefault.address - (uintptr_t)ram) / page_size;
        state = begin_by(page, NULL, msg.arg.pagefault.feat.ptid);
        if (state == POSTCOPY_PAGE_REQUEST) {
            send_page(page);
        } else if (state == POSTCOPY_PAGE_RECEIVED) {
            if (!break_wake_rule) {
                uffd_wakeup(ufd, ram + page * page_size, page_size);
            }
            wakes++;
        }
    }
    return NULL;
}

/* Places requested pages, as by the preempt channel */
static void *urgent_thread(void *opaque)
{
    unsigned page;

    while ((page = receive_page()) != PAGES) {
        place(page);
    }
    return NULL;
}

static void *reader_thread(void *opaque)
{
    unsigned n = GPOINTER_TO_UINT(opaque);
    /* Each thread's own order; 2 * n + 1 has no factor in common with PAGES */
    for (unsigned i = 0; i < PAGES; i++) {
        unsigned page = i * (2 * n + 1) % PAGES;

        g_assert_cmpuint(qatomic_read((uintptr_t *)(ram + page * page_size)),
                         ==, page % 4 ? page : 0);
    }
    return NULL;
}

/* @shared: memory that has a mirror */
static void start(bool shared)
{
    int fd = -1;

    alarm(patience);
    wakes = 0;
    qatomic_set(&quit, false);
    if (shared) {
        mirror = qemu_memfd_alloc("test", PAGES * page_size, 0, &fd,
                                  &error_abort);
    }
    ram = mmap(NULL, PAGES * page_size, PROT_READ | PROT_WRITE,
               shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    g_assert(ram != MAP_FAILED);
    g_assert_cmpint(uffd_register_memory(ufd, ram, PAGES * page_size,
                                         UFFDIO_REGISTER_MODE_MISSING |
                                         (shared ? UFFDIO_REGISTER_MODE_MINOR
                                                 : 0),
                                         NULL), ==, 0);
    if (fd >= 0) {
        close(fd);
    }
    requests_start(NULL);
}

static void end(void)
{
    alarm(0);
    postcopy_requests_stop(requests);
    requests_end();
    munmap(ram, PAGES * page_size);
    if (mirror) {
        munmap(mirror, PAGES * page_size);
        mirror = NULL;
    }
}

static void test_nobody_sleeps_on(const void *shared)
{
    QemuThread readers[READERS], faults, urgent;

    start(shared);
    start_thread(&faults, fault_thread, NULL);
    start_thread(&urgent, urgent_thread, NULL);
    for (unsigned i = 0; i < READERS; i++) {
        start_thread(&readers[i], reader_thread, GUINT_TO_POINTER(i));
    }
    /* The background, which places some pages for the second time */
    for (unsigned page = 0; page < PAGES; page++) {
        place(page);
    }
    for (unsigned i = 0; i < READERS; i++) {
        qemu_thread_join(&readers[i]);
    }
    qatomic_set(&quit, true);
    qemu_thread_join(&faults);
    send_page(PAGES);
    qemu_thread_join(&urgent);
    g_test_message("%d faults were read after their page was received", wakes);
    end();
}

/* A thread that reads a fault after its page was placed must wake the reader */
static void test_late_fault(const void *shared)
{
    QemuThread reader, faults;
    struct pollfd pfd = { .fd = ufd, .events = POLLIN };

    start(shared);
    /* The reader begins with page 0, and finds all other pages */
    for (unsigned page = 1; page < PAGES; page++) {
        place(page);
    }
    start_thread(&reader, reader_thread, NULL);
    g_assert_cmpint(poll(&pfd, 1, -1), ==, 1);
    place(0);
    start_thread(&faults, fault_thread, NULL);
    qemu_thread_join(&reader);
    qatomic_set(&quit, true);
    qemu_thread_join(&faults);
    g_assert_cmpint(wakes, ==, 1);
    end();
}

static int place_copy(const PostcopyPage *page, unsigned n, void *from)
{
    return postcopy_place(requests, ufd, page, n, from, false, true);
}

/*
 * A page that exists before it was received is not the guest's; in a run of
 * pages, those before it are placed
 */
static void test_eexist(void)
{
    g_autofree char *from = g_malloc0(3 * page_size);

    start(false);
    place(2);
    received_map[2] = false;
    from[0] = 7;
    g_assert_cmpint(place_copy(&pages[1], 3, from), ==, -EEXIST);
    g_assert_true(received_map[1]);
    g_assert_false(received_map[2]);
    g_assert_false(received_map[3]);
    g_assert_cmpint(ram[page_size], ==, 7);

    g_assert_cmpint(place_copy(&pages[2], 1, from), ==, -EEXIST);
    g_assert_false(received_map[2]);
    g_assert_cmpuint(*(uint64_t *)(ram + 2 * page_size), ==, 2);
    end();
}

/* The address is not registered: the caller must end postcopy */
static void test_enoent(void)
{
    g_autofree void *from = g_malloc0(page_size);

    start(false);
    g_assert_cmpint(uffd_unregister_memory(ufd, ram, page_size), ==, 0);
    g_assert_cmpint(place_copy(&pages[0], 1, from), ==, -ENOENT);
    g_assert_false(received_map[0]);
    end();
}

static int open_ufd(uint64_t features)
{
    struct uffdio_api api = { .api = UFFD_API, .features = features };
    int fd = syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK |
                     UFFD_USER_MODE_ONLY);

    return fd >= 0 && !ioctl(fd, UFFDIO_API, &api) ? fd : -1;
}

/* The host has no memory for the page, which can be placed later */
static void test_enomem(void)
{
    size_t size = 2 * MiB, length = 2 * MiB;
    g_autofree char *free_pages = NULL;
    g_autofree void *from = g_malloc0(size);
    char *huge;
    int ret = 0;

    if (!g_file_get_contents("/sys/kernel/mm/hugepages/hugepages-2048kB/"
                             "free_hugepages", &free_pages, NULL, NULL)) {
        g_test_skip("the host has no huge pages of 2 MiB");
        return;
    }
    /* One more huge page than the host has free, without a reservation */
    length += g_ascii_strtoull(free_pages, NULL, 10) * size;
    start(false);
    huge = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE |
                MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE | (21 << 26),
                -1, 0);
    g_assert(huge != MAP_FAILED);
    g_assert_cmpint(uffd_register_memory(ufd, huge, length,
                                         UFFDIO_REGISTER_MODE_MISSING, NULL),
                    ==, 0);
    for (size_t at = 0; !ret && at < length; at += size) {
        PostcopyPage page = { block, 0, huge + at, size };

        ret = place_copy(&page, 1, from);
    }
    g_assert_cmpint(ret, ==, -ENOMEM);
    munmap(huge, length);
    end();
}

static void *remove_page(void *opaque)
{
    g_assert_cmpint(madvise(ram + 5 * page_size, page_size, MADV_DONTNEED),
                    ==, 0);
    return NULL;
}

static void *read_event(void *opaque)
{
    struct uffd_msg msg;

    g_usleep(20 * 1000);
    g_assert_cmpint(uffd_read_events(ufd, &msg, 1), ==, 1);
    g_assert_cmpint(msg.event, ==, UFFD_EVENT_REMOVE);
    return NULL;
}

/* EAGAIN: the ioctl is repeated, once after the kernel has placed a part */
static void test_eagain(void)
{
    int own = ufd;
    struct pollfd pfd;
    QemuThread remover, reader;
    struct uffdio_copy copy = { };
    PostcopyPage page;
    g_autofree char *from = g_malloc0(2 * page_size);

    ufd = open_ufd(UFFD_FEATURE_EVENT_REMOVE);
    g_assert_cmpint(ufd, >=, 0);
    start(false);

    /* While a thread waits for an event to be read, no page can be placed */
    start_thread(&remover, remove_page, NULL);
    pfd = (struct pollfd) { .fd = ufd, .events = POLLIN };
    g_assert_cmpint(poll(&pfd, 1, -1), ==, 1);
    copy.dst = (uintptr_t)ram + 6 * page_size;
    copy.src = (uintptr_t)from;
    copy.len = page_size;
    g_assert_cmpint(ioctl(ufd, UFFDIO_COPY, &copy), ==, -1);
    g_assert_cmpint(errno, ==, EAGAIN);
    g_assert_cmpint(copy.copy, ==, -EAGAIN);
    start_thread(&reader, read_event, NULL);
    place(6);
    qemu_thread_join(&reader);
    qemu_thread_join(&remover);
    g_assert_cmpuint(*(uint64_t *)(ram + 6 * page_size), ==, 6);

    /* One of two pages exists */
    place(9);
    copy.dst = (uintptr_t)ram + 8 * page_size;
    copy.len = 2 * page_size;
    from[0] = 8;
    page = pages[8];
    page.size *= 2;
    g_assert_cmpint(place_copy(&page, 1, from), <, 0);
    g_assert_cmpuint(*(uint64_t *)(ram + 8 * page_size), ==, 8);
    g_assert_cmpuint(*(uint64_t *)(ram + 9 * page_size), ==, 9);
    copy.dst = (uintptr_t)ram + 10 * page_size;
    place(11);
    g_assert_cmpint(ioctl(ufd, UFFDIO_COPY, &copy), ==, -1);
    g_assert_cmpint(errno, ==, EAGAIN);
    g_assert_cmpint(copy.copy, ==, page_size);

    end();
    close(ufd);
    ufd = own;
}

static void lost(int sig)
{
    static const char text[] = "Bail out! A reader hangs\n";

    (void)!write(STDOUT_FILENO, text, sizeof(text) - 1);
    _exit(1);
}

int main(int argc, char **argv)
{
    struct sigaction alarmed = { .sa_handler = lost };

    g_test_init(&argc, &argv, NULL);
    if (g_getenv("TEST_BREAK_WAKE_RULE")) {
        break_wake_rule = true;
        patience = 3;
    }
    sigaction(SIGALRM, &alarmed, NULL);
    page_size = qemu_real_host_page_size();
    ufd = open_ufd(0);
    if (ufd < 0) {
        g_printerr("userfaultfd: %s\n", strerror(errno));
        return 77;  /* skipped */
    }
    g_test_add_data_func("/postcopy-place/copy/late-fault", NULL,
                         test_late_fault);
    g_test_add_data_func("/postcopy-place/copy/all-wake", NULL,
                         test_nobody_sleeps_on);
    g_test_add_data_func("/postcopy-place/continue/late-fault", (void *)1,
                         test_late_fault);
    g_test_add_data_func("/postcopy-place/continue/all-wake",
                         (void *)1, test_nobody_sleeps_on);
    g_test_add_func("/postcopy-place/error/eexist", test_eexist);
    g_test_add_func("/postcopy-place/error/enoent", test_enoent);
    g_test_add_func("/postcopy-place/error/enomem", test_enomem);
    g_test_add_func("/postcopy-place/error/eagain", test_eagain);
    return g_test_run();
}
