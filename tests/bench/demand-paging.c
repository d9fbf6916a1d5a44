/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Page faults of a raw KVM virtual machine, by userfaultfd and by exits: see help. For x86-64. */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const char help[] =
"usage: demand-paging [OPTION]...\n"
"\n"
"vCPUs touch each page of memory that is not there; a thread that reads userfaultfd, or with -w the\n"
"vCPU threads themselves, make the pages. Prints how fast, as JSON.\n"
"\n"
"  -v N    vCPUs (1)\n"
"  -b MIB  memory of each vCPU (64)\n"
"  -m      shared memory that is in the page cache, and is mapped by UFFDIO_CONTINUE; otherwise\n"
"          anonymous memory\n"
"  -w      with KVM_MEM_EXIT_ON_MISSING: vCPUs exit for pages that are not there; the reader stays,\n"
"          for what does not\n"
"  -t      with -w: KVM_MEM_USERFAULT in place of that; a bitmap tells KVM what is missing\n"
"  -p      with -w: KVM_PRE_FAULT_MEMORY maps the page before the vCPU goes on, which otherwise leaves\n"
"          the guest once more for that\n"
"\n"
"Latencies are the guest's: of each touch, by its TSC. A fault is an exit or a message of userfaultfd.\n"
"At the end all pages are compared with what they must be; the exit status is 1 if one is wrong or\n"
"something fails, and 2 if this kernel does not have what -w or -t ask for.\n";

/* Definitions that the build machine's headers may lack; see docs/devel/kernel.md. */
#define ABI_EXIT_MEMORY_FAULT 39
/* KVM_MEM_EXIT_ON_MISSING; for a bitmap, KVM_MEM_USERFAULT */
#define ABI_MEM_MISSING (1u << 3)

struct abi_region2 {
    uint32_t slot, flags;
    uint64_t gpa, size, hva, gmem_offset;
    uint32_t gmem_fd, padding1;
    uint64_t userfault_bitmap, padding2[13];
};
#define ABI_SET_REGION2 _IOW(KVMIO, 0x49, struct abi_region2)

struct abi_memory_fault {
    uint64_t flags, gpa, size;
};

struct abi_pre_fault {
    uint64_t gpa, size, flags, padding[5];
};
#define ABI_PRE_FAULT_MEMORY _IOWR(KVMIO, 0xd5, struct abi_pre_fault)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE = 4096, WORD = 8 * sizeof(unsigned long), TOUCHED = 0x5a, STATUS_NO_EXITS = 2 };
/* The guest's program, page tables and samples; and the memory under test, above addresses of devices. */
#define LOW_GPA 0x100000ul
#define TABLES 0x1000ul         /* offsets in low memory */
#define SAMPLES 0x3000ul
#define TEST_GPA (4ul << 30)

static struct {
    unsigned vcpus;
    size_t bytes;               /* memory of each vCPU */
    bool minor, exits, bitmap, prefault;
} o = { .vcpus = 1, .bytes = 64ul << 20 };

/* The memory under test. */
static uint8_t *guest;
static size_t size;
static int uffd;
static unsigned long *bitmap;   /* the missing pages, for KVM; or NULL */

static int kvm, vm, run_size;
static uint8_t *low;
static pthread_barrier_t start;

struct stats {
    unsigned long exits, uffd_events, eexist;
    long voluntary_switches;
    double cpu_s;
};

struct vcpu {
    int number, fd;
    pthread_t thread;
    /* Only the thread uses these fields until it has ended */
    struct stats stats;
    double end_s;
};

static struct reader {
    int stop;                   /* an eventfd that becomes readable at the end */
    pthread_t thread;
    struct stats stats;
} reader;

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

/* Add the calling thread's usage, or subtract it with a sign of -1. */
static void add_usage(struct stats *stats, int sign)
{
    struct rusage u;

    getrusage(RUSAGE_THREAD, &u);
    stats->voluntary_switches += sign * u.ru_nvcsw;
    stats->cpu_s += sign * (u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6);
}

/* Memory */

static void *map(size_t bytes, int flags, int fd)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);

    if (p == MAP_FAILED) {
        err(1, "cannot map %zu MiB", bytes >> 20);
    }
    return p;
}

/* The contents of a page: zeros, which vCPUs write to, and at its end its own number. */
static void fill(uint8_t *page, size_t offset)
{
    uint64_t number = offset / PAGE + 0x1234567800000000;

    memcpy(page + PAGE - sizeof(number), &number, sizeof(number));
}

static void make_memory(void)
{
    struct uffdio_api api = { .api = UFFD_API, .features = o.minor ? UFFD_FEATURE_MINOR_SHMEM : 0 };
    struct uffdio_register reg = { .mode = o.minor ? UFFDIO_REGISTER_MODE_MINOR : UFFDIO_REGISTER_MODE_MISSING };

    size = o.bytes * o.vcpus;
    if (o.minor) {
        int fd = memfd_create("guest", MFD_CLOEXEC);
        uint8_t *alias;

        if (fd < 0 || ftruncate(fd, size)) {
            err(1, "memfd");
        }
        alias = map(size, MAP_SHARED, fd);
        for (size_t offset = 0; offset < size; offset += PAGE) {
            fill(alias + offset, offset);
        }
        guest = map(size, MAP_SHARED, fd);
    } else {
        guest = map(size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
        madvise(guest, size, MADV_NOHUGEPAGE);
    }
    reg.range = (struct uffdio_range) { (uintptr_t)guest, size };
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &reg)) {
        err(1, "userfaultfd for %s", o.minor ? "minor faults of shared memory" : "missing anonymous memory");
    }
    if (o.bitmap) {
        size_t bytes = (size / PAGE + WORD - 1) / WORD * sizeof(*bitmap);

        bitmap = malloc(bytes);
        memset(bitmap, 0xff, bytes);
    }
}

/*
 * Place the page at this offset and, if wake, wake its waiters. Returns false, and wakes no thread, if the page was
 * there already.
 */
static bool resolve(size_t offset, bool wake, struct stats *stats)
{
    static _Thread_local uint8_t buffer[PAGE] __attribute__((aligned(PAGE)));
    struct uffdio_range range = { (uintptr_t)guest + offset, PAGE };
    int ret;

    fill(buffer, offset);
    do {
        if (o.minor) {
            struct uffdio_continue c = { .range = range, .mode = wake ? 0 : UFFDIO_CONTINUE_MODE_DONTWAKE };

            ret = ioctl(uffd, UFFDIO_CONTINUE, &c);
        } else {
            struct uffdio_copy c = {
                .dst = range.start, .src = (uintptr_t)buffer, .len = PAGE, .mode = wake ? 0 : UFFDIO_COPY_MODE_DONTWAKE,
            };

            ret = ioctl(uffd, UFFDIO_COPY, &c);
        }
    } while (ret && errno == EAGAIN);
    if (ret && errno != EEXIST) {
        err(1, "%s", o.minor ? "UFFDIO_CONTINUE" : "UFFDIO_COPY");
    }
    if (bitmap) {
        /* Clear the bit after placing the page: KVM reads the bits first. */
        __atomic_and_fetch(&bitmap[offset / PAGE / WORD], ~(1ul << offset / PAGE % WORD), __ATOMIC_RELEASE);
    }
    stats->eexist += !!ret;
    return !ret;
}

static unsigned long count_bad_pages(void)
{
    unsigned long bad = 0;

    for (size_t offset = 0; offset < size; offset += PAGE) {
        uint8_t expected[PAGE] = { };

        fill(expected, offset);
        expected[offset / o.bytes] = TOUCHED;
        bad += memcmp(guest + offset, expected, PAGE) != 0;
    }
    return bad;
}

static void *run_reader(void *opaque)
{
    struct reader *r = opaque;
    struct pollfd fds[] = { { .fd = r->stop, .events = POLLIN }, { .fd = uffd, .events = POLLIN } };

    add_usage(&r->stats, -1);
    for (;;) {
        struct uffd_msg msg;
        struct uffdio_range page = { .len = PAGE };

        if (poll(fds, 2, -1) < 0) {
            err(1, "poll");
        }
        if (fds[0].revents) {
            break;
        }
        /* Read one message; another thread may have resolved its fault. */
        if (read(uffd, &msg, sizeof(msg)) != sizeof(msg)) {
            if (errno != EAGAIN) {
                err(1, "read of userfaultfd");
            }
            continue;
        }
        r->stats.uffd_events++;
        page.start = msg.arg.pagefault.address & -PAGE;
        if (!resolve(page.start - (uintptr_t)guest, true, &r->stats) && ioctl(uffd, UFFDIO_WAKE, &page)) {
            err(1, "UFFDIO_WAKE");
        }
    }
    add_usage(&r->stats, 1);
    return NULL;
}

/* The virtual machine */

/* RDI address, RSI stride, RCX count, R8 samples: the ticks of each touch. */
asm(".pushsection .rodata\n"
    "guest_program:\n"
    "1:  rdtsc\n"
    "    shl $32, %rdx\n"
    "    lea (%rdx, %rax), %r9\n"
    "    movb $0x5a, (%rdi)\n"
    "    rdtsc\n"
    "    shl $32, %rdx\n"
    "    add %rdx, %rax\n"
    "    sub %r9, %rax\n"
    "    mov %rax, (%r8)\n"
    "    add $8, %r8\n"
    "    add %rsi, %rdi\n"
    "    dec %rcx\n"
    "    jnz 1b\n"
    "    hlt\n"
    "guest_program_end:\n"
    ".popsection\n");
extern const uint8_t guest_program[], guest_program_end[];

static uint64_t *samples_of(unsigned vcpu)
{
    return (uint64_t *)(low + SAMPLES) + vcpu * (o.bytes / PAGE);
}

static void set_slot(unsigned slot, uint32_t flags, uint64_t gpa, void *memory, size_t bytes)
{
    struct abi_region2 region = {
        slot, flags, gpa, bytes, (uintptr_t)memory, .userfault_bitmap = flags ? (uintptr_t)bitmap : 0,
    };

    /* The older ioctl takes the beginning of this structure. */
    if (!ioctl(vm, region.userfault_bitmap ? ABI_SET_REGION2 : KVM_SET_USER_MEMORY_REGION, &region)) {
        return;
    }
    if ((errno == EINVAL || errno == ENOTTY) && flags) {
        errx(STATUS_NO_EXITS, "this kernel's KVM has no %s (memory slot flag 8 is refused: %m)",
             bitmap ? "KVM_MEM_USERFAULT" : "KVM_MEM_EXIT_ON_MISSING");
    }
    err(1, "KVM_SET_USER_MEMORY_REGION");
}

static void make_vm(void)
{
    enum { PRESENT = 1, WRITABLE = 2, ACCESSED = 0x20, DIRTY = 0x40, LARGE = 0x80 };
    size_t low_size = (SAMPLES + size / PAGE * sizeof(uint64_t) + 0xffff) & ~0xfffful;
    uint64_t *tables;

    kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (kvm < 0) {
        err(1, "/dev/kvm");
    }
    vm = ioctl(kvm, KVM_CREATE_VM, 0);
    run_size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    if (vm < 0 || run_size < 0) {
        err(1, "KVM_CREATE_VM");
    }
    if (LOW_GPA + low_size > 2ul << 30 || TEST_GPA + size > 512ul << 30) {
        errx(1, "this is too much memory for the guest's addresses");
    }
    low = map(low_size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1);
    memcpy(low, guest_program, guest_program_end - guest_program);
    /* Map the first 512 GiB to themselves, in pages of 1 GiB. */
    tables = (uint64_t *)(low + TABLES);
    tables[0] = (LOW_GPA + TABLES + 0x1000) | PRESENT | WRITABLE | ACCESSED;
    for (uint64_t i = 0; i < 512; i++) {
        tables[512 + i] = i << 30 | PRESENT | WRITABLE | ACCESSED | DIRTY | LARGE;
    }
    set_slot(0, 0, LOW_GPA, low, low_size);
    set_slot(1, o.exits ? ABI_MEM_MISSING : 0, TEST_GPA, guest, size);
}

static void make_vcpu(struct vcpu *v)
{
    enum { CR0_PE = 1, CR0_ET = 0x10, CR0_NE = 0x20, CR4_PAE = 0x20, EFER_LME = 0x100, EFER_LMA = 0x400 };
    enum { ENTRIES = 256 };
    struct kvm_segment data = { .selector = 16, .limit = ~0u, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1 };
    struct kvm_segment code = { .selector = 8, .limit = ~0u, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1 };
    struct kvm_cpuid2 *cpuid = calloc(1, sizeof(*cpuid) + ENTRIES * sizeof(cpuid->entries[0]));
    struct kvm_regs regs = {
        .rip = LOW_GPA, .rflags = 2,
        /* vCPU n touches byte n of each of its own pages. */
        .rdi = TEST_GPA + v->number * o.bytes + v->number, .rsi = PAGE, .rcx = o.bytes / PAGE,
        .r8 = LOW_GPA + ((uint8_t *)samples_of(v->number) - low),
    };
    struct kvm_sregs sregs;
    bool gigabytes = false;

    v->fd = ioctl(vm, KVM_CREATE_VCPU, v->number);
    if (v->fd < 0) {
        err(1, "KVM_CREATE_VCPU %d", v->number);
    }
    cpuid->nent = ENTRIES;
    if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid) || ioctl(v->fd, KVM_SET_CPUID2, cpuid)) {
        err(1, "CPUID");
    }
    for (unsigned i = 0; i < cpuid->nent; i++) {
        gigabytes |= cpuid->entries[i].function == 0x80000001 && cpuid->entries[i].edx & 1u << 26;
    }
    free(cpuid);
    if (!gigabytes) {
        errx(1, "this processor has no pages of 1 GiB");
    }
    if (ioctl(v->fd, KVM_GET_SREGS, &sregs)) {
        err(1, "KVM_GET_SREGS");
    }
    sregs.cs = code;
    sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = data;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | 1u << 31;
    sregs.cr3 = LOW_GPA + TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
    if (ioctl(v->fd, KVM_SET_SREGS, &sregs) || ioctl(v->fd, KVM_SET_REGS, &regs)) {
        err(1, "a vCPU's registers");
    }
}

static void serve_exit(struct vcpu *v, const struct kvm_run *run)
{
    /* The exits' union begins here. */
    const struct abi_memory_fault *fault = (const void *)&run->mmio;
    size_t offset = (fault->gpa - TEST_GPA) & -PAGE;

    if (fault->gpa < TEST_GPA || offset >= size) {
        errx(1, "exit for memory that is not under test: %#llx", (unsigned long long)fault->gpa);
    }
    v->stats.exits++;
    /* Wakes nothing: the reader gets a message for each thread that waits in userfaultfd, and finds the page there. */
    if (!resolve(offset, false, &v->stats) && madvise(guest + offset, PAGE, MADV_POPULATE_WRITE) && errno != EAGAIN) {
        err(1, "MADV_POPULATE_WRITE");
    }
    if (o.prefault) {
        struct abi_pre_fault range = { .gpa = TEST_GPA + offset, .size = PAGE };

        if (ioctl(v->fd, ABI_PRE_FAULT_MEMORY, &range) && errno != EAGAIN && errno != EINTR) {
            err(1, "KVM_PRE_FAULT_MEMORY");
        }
    }
}

static void *run_vcpu(void *opaque)
{
    struct vcpu *v = opaque;
    struct kvm_run *run = map(run_size, MAP_SHARED, v->fd);

    pthread_barrier_wait(&start);
    add_usage(&v->stats, -1);
    for (;;) {
        int ret = ioctl(v->fd, KVM_RUN, 0);

        if (!ret && run->exit_reason == KVM_EXIT_HLT) {
            break;
        }
        if (ret && errno == EFAULT && run->exit_reason == ABI_EXIT_MEMORY_FAULT) {
            serve_exit(v, run);
        } else if (!ret || errno != EINTR) {
            errx(1, "vCPU %d left KVM: exit reason %u, %s", v->number, run->exit_reason, ret ? "with an error" : "no error");
        }
    }
    v->end_s = now_s();
    add_usage(&v->stats, 1);
    return NULL;
}

/* Figures */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void print_figures(const struct stats *vcpus, double elapsed_s, double *latency_us, unsigned long bad)
{
    unsigned long pages = size / PAGE, faults = vcpus->exits + reader.stats.uffd_events;
    double switches = vcpus->voluntary_switches + reader.stats.voluntary_switches;

    qsort(latency_us, pages, sizeof(*latency_us), compare);
    printf("{\"touch_count\": %lu, \"elapsed_s\": %.6f, \"pages_per_s\": %.1f,\n", pages, elapsed_s, pages / elapsed_s);
    for (unsigned i = 0; i < 4; i++) {
        static const unsigned percent[] = { 50, 95, 99, 100 };
        unsigned long at = pages * percent[i] / 100;

        printf(" \"latency_p%u_us\": %.1f,", percent[i], latency_us[at < pages ? at : pages - 1]);
    }
    printf("\n \"exits_count\": %lu, \"uffd_events_count\": %lu, \"eexist_count\": %lu,\n"
           " \"voluntary_switches_per_fault_count\": %.3f, \"vcpu_threads_cpu_s\": %.3f, \"reader_threads_cpu_s\": %.3f,\n"
           " \"bad_pages_count\": %lu}\n", vcpus->exits, reader.stats.uffd_events,
           vcpus->eexist + reader.stats.eexist, faults ? switches / faults : 0, vcpus->cpu_s, reader.stats.cpu_s, bad);
}

static unsigned long number(const char *text, unsigned most)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (*end || end == text || n < 1 || n > most) {
        errx(1, "'%s' is not a number from 1 to %u", text, most);
    }
    return n;
}

static void parse_options(int argc, char **argv)
{
    int letter;

    while ((letter = getopt(argc, argv, "v:b:mwtph")) != -1) {
        switch (letter) {
        case 'v':
            o.vcpus = number(optarg, 2048);     /* each has a byte of every page */
            break;
        case 'b':
            o.bytes = number(optarg, 1u << 20) << 20;
            break;
        case 'm':
            o.minor = true;
            break;
        case 'w':
            o.exits = true;
            break;
        case 't':
            o.bitmap = true;
            break;
        case 'p':
            o.prefault = true;
            break;
        default:
            fputs(help, letter == 'h' ? stdout : stderr);
            exit(letter != 'h');
        }
    }
    if (optind < argc || ((o.bitmap || o.prefault) && !o.exits)) {
        errx(1, "-t and -p make no sense without -w, nor do other words: see -h");
    }
}

int main(int argc, char **argv)
{
    struct stats sum = { };
    struct vcpu *vcpus;
    double *latency_us, start_s, end_s = 0, ticks_per_us;
    unsigned long bad;

    parse_options(argc, argv);
    make_memory();
    make_vm();
    vcpus = calloc(o.vcpus, sizeof(*vcpus));
    latency_us = malloc(size / PAGE * sizeof(*latency_us));
    pthread_barrier_init(&start, NULL, o.vcpus + 1);
    reader.stop = eventfd(0, EFD_CLOEXEC);
    if (reader.stop < 0 || pthread_create(&reader.thread, NULL, run_reader, &reader)) {
        errx(1, "the reader's thread cannot be started");
    }
    for (unsigned i = 0; i < o.vcpus; i++) {
        vcpus[i].number = i;
        make_vcpu(&vcpus[i]);
    }
    ticks_per_us = ioctl(vcpus[0].fd, KVM_GET_TSC_KHZ, 0) / 1000.0;
    if (ticks_per_us <= 0) {
        err(1, "KVM_GET_TSC_KHZ");
    }
    for (unsigned i = 0; i < o.vcpus; i++) {
        if (pthread_create(&vcpus[i].thread, NULL, run_vcpu, &vcpus[i])) {
            errx(1, "a vCPU's thread cannot be started");
        }
    }

    pthread_barrier_wait(&start);
    start_s = now_s();
    for (unsigned i = 0; i < o.vcpus; i++) {
        const struct stats *of = &vcpus[i].stats;

        pthread_join(vcpus[i].thread, NULL);
        end_s = vcpus[i].end_s > end_s ? vcpus[i].end_s : end_s;
        sum.exits += of->exits;
        sum.eexist += of->eexist;
        sum.voluntary_switches += of->voluntary_switches;
        sum.cpu_s += of->cpu_s;
    }
    if (eventfd_write(reader.stop, 1) || pthread_join(reader.thread, NULL)) {
        errx(1, "the reader does not end");
    }
    for (size_t n = 0; n < size / PAGE; n++) {
        latency_us[n] = samples_of(0)[n] / ticks_per_us;
    }
    bad = count_bad_pages();
    print_figures(&sum, end_s - start_s, latency_us, bad);
    if (bad) {
        errx(1, "%lu pages are not what they must be", bad);
    }
    if (o.exits && !sum.exits) {
        errx(1, "-w: the flag was accepted, but no vCPU has exited for a missing page");
    }
    return 0;
}
