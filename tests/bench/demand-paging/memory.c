/* SPDX-License-Identifier: GPL-2.0-or-later */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fail.h"
#include "kvm-abi.h"
#include "memory.h"

#define WORD (8 * sizeof(unsigned long))

/* A page of the source: zeros, which vCPUs write to, and at its end its own number. */
static uint64_t *page_number(uint8_t *page, size_t page_size)
{
    return (uint64_t *)(page + page_size) - 1;
}

static uint64_t number_of(size_t offset, size_t page_size)
{
    return offset / page_size + 0x1234567800000000;
}

static int make_uffd(const struct memory *m, uint8_t *start, size_t size)
{
    const struct options *o = m->options;
    int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = { .api = UFFD_API };
    struct uffdio_register reg = {
        .range = { (uintptr_t)start, size },
        .mode = o->mode == MINOR ? UFFDIO_REGISTER_MODE_MINOR : UFFDIO_REGISTER_MODE_MISSING,
    };

    if (o->mode == MINOR) {
        api.features = o->backing == SHMEM ? UFFD_FEATURE_MINOR_SHMEM : UFFD_FEATURE_MINOR_HUGETLBFS;
    } else if (o->backing != ANONYMOUS) {
        api.features = o->backing == SHMEM ? UFFD_FEATURE_MISSING_SHMEM : UFFD_FEATURE_MISSING_HUGETLBFS;
    }
    if (uffd < 0) {
        fail("userfaultfd: %m");
    }
    if (ioctl(uffd, UFFDIO_API, &api)) {
        fail("this kernel's userfaultfd has no %s faults of %s memory: %m", mode_name(o->mode), backing_name(o->backing));
    }
    if (ioctl(uffd, UFFDIO_REGISTER, &reg)) {
        fail("UFFDIO_REGISTER: %m");
    }
    return uffd;
}

static uint8_t *map(size_t size, int flags, int fd)
{
    uint8_t *p = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);

    if (p == MAP_FAILED) {
        fail("cannot map %zu MiB: %m", size >> 20);
    }
    return p;
}

struct memory make_memory(const struct options *o)
{
    struct memory m = {
        .options = o,
        .size = o->bytes_per_vcpu * (o->shared ? 1 : o->vcpus),
        .page_size = sysconf(_SC_PAGESIZE),
        .uffds = o->single_uffd ? 1 : o->vcpus,
    };

    if (o->backing == ANONYMOUS) {
        m.guest = map(m.size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        madvise(m.guest, m.size, MADV_NOHUGEPAGE);
    } else {
        int fd = memfd_create("guest", MFD_CLOEXEC | (o->backing == HUGETLB ? MFD_HUGETLB : 0));
        struct stat st;

        if (fd < 0 || fstat(fd, &st) || ftruncate(fd, m.size)) {
            fail("memfd: %m");
        }
        if (o->backing == HUGETLB) {
            m.page_size = st.st_blksize;
        }
        m.guest = map(m.size, MAP_SHARED, fd);
        if (o->mode == MINOR) {
            m.alias = map(m.size, MAP_SHARED, fd);
            for (size_t offset = 0; offset < m.size; offset += m.page_size) {
                *page_number(m.alias + offset, m.page_size) = number_of(offset, m.page_size);
            }
        }
    }
    if (o->bytes_per_vcpu % m.page_size) {
        fail("the memory of a vCPU is not whole pages of %zu KiB", m.page_size >> 10);
    }
    m.uffd = malloc(m.uffds * sizeof(*m.uffd));
    for (unsigned i = 0; i < m.uffds; i++) {
        size_t size = m.size / m.uffds;

        m.uffd[i] = make_uffd(&m, m.guest + i * size, size);
    }
    if (o->bitmap) {
        size_t bytes = (m.size / sysconf(_SC_PAGESIZE) + WORD - 1) / WORD * sizeof(*m.bitmap);

        m.bitmap = malloc(bytes);
        memset(m.bitmap, 0xff, bytes);
    }
    return m;
}

int uffd_of(const struct memory *m, size_t offset)
{
    return m->uffd[offset / (m->size / m->uffds)];
}

/* The page is there: KVM looks at the bits first. */
static void clear_bits(const struct memory *m, size_t offset)
{
    size_t base = sysconf(_SC_PAGESIZE);

    for (size_t i = offset / base; i < (offset + m->page_size) / base; i++) {
        __atomic_and_fetch(&m->bitmap[i / WORD], ~(1ul << i % WORD), __ATOMIC_RELEASE);
    }
}

bool resolve(const struct memory *m, size_t offset, uint8_t *buffer, bool wake)
{
    uint64_t start = (uintptr_t)m->guest + offset;
    int uffd = uffd_of(m, offset);
    int ret;

    do {
        if (m->options->mode == MINOR) {
            struct uffdio_continue c = {
                .range = { start, m->page_size },
                .mode = wake ? 0 : UFFDIO_CONTINUE_MODE_DONTWAKE,
            };
            ret = ioctl(uffd, UFFDIO_CONTINUE, &c);
        } else {
            struct uffdio_copy c = {
                .dst = start, .src = (uintptr_t)buffer, .len = m->page_size,
                .mode = wake ? 0 : UFFDIO_COPY_MODE_DONTWAKE,
            };
            *page_number(buffer, m->page_size) = number_of(offset, m->page_size);
            ret = ioctl(uffd, UFFDIO_COPY, &c);
        }
    } while (ret && errno == EAGAIN);
    if (ret && errno != EEXIST) {
        fail("%s: %m", m->options->mode == MINOR ? "UFFDIO_CONTINUE" : "UFFDIO_COPY");
    }
    if (m->bitmap) {
        clear_bits(m, offset);
    }
    return !ret;
}

unsigned long count_bad_pages(const struct memory *m)
{
    const struct options *o = m->options;
    unsigned long bad = 0;

    for (size_t offset = 0; offset < m->size; offset += m->page_size) {
        uint8_t *page = m->guest + offset;
        bool good = *page_number(page, m->page_size) == number_of(offset, m->page_size);

        for (unsigned cpu = 0; cpu < o->vcpus; cpu++) {
            bool touches = o->shared || offset / o->bytes_per_vcpu == cpu;

            good &= page[cpu] == (touches ? TOUCHED : 0);
        }
        bad += !good;
    }
    return bad;
}
