/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Tests the kernel's side of KVM_MEM_EXIT_ON_MISSING, without QEMU. Prints TAP.
 * usage: kvm-exit-on-missing              on a kernel that has it
 *        kvm-exit-on-missing --hidden     on one that does not, or hides it
 *        kvm-exit-on-missing --userfault  on one that has KVM_MEM_USERFAULT and hides the other
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The interface, as docs/ tells it; the build machine's headers do not know it. */
#define MEM_EXIT_ON_MISSING (1u << 3)
#define CAP_EXIT_ON_MISSING 10236
#define MEM_USERFAULT MEM_EXIT_ON_MISSING   /* with a bitmap */
#define CAP_USERFAULT 10243
#define CAP_MEMORY_FAULT_INFO 232
#define CAP_PRE_FAULT_MEMORY 236
#define EXIT_MEMORY_FAULT 39
#define FAULT_READ 1
#define FAULT_WRITE 2
#define FAULT_EXEC 4
#define FAULT_USERFAULT 16
#define PAGE 4096ul

/* It begins as struct kvm_userspace_memory_region. */
struct region2 {
    uint32_t slot, flags;
    uint64_t gpa, size, hva, gmem_offset;
    uint32_t gmem_fd, pad1;
    uint64_t userfault_bitmap;
    uint64_t pad2[13];
};
#define SET_REGION2 _IOW(KVMIO, 0x49, struct region2)

struct memory_fault {
    uint64_t flags, gpa, size;
};

/*
 * The guest: code in a page of its own, and memory above it that is registered with
 * userfaultfd.
 */
#define CODE_GPA 0x1000ul
#define TEST_GPA 0x10000ul
#define TEST_SIZE (64 * PAGE)
#define HUGE_GPA 0x200000ul
#define HUGE (2ul << 20)

#ifdef __x86_64__
/* 16-bit code; register SI has the address. */
static const uint8_t guest_code[] = {
    /* 1000: read  */ 0x67, 0x8a, 0x06,       /* mov al, [esi] */
    /* 1003:       */ 0xe6, 0x10,             /* out 0x10, al  */
    /* 1005: write */ 0x67, 0xc6, 0x06, 0x5a, /* mov byte [esi], 0x5a */
    /* 1009:       */ 0xe6, 0x10,
    /* 100b: exec  */ 0x66, 0xff, 0xe6,       /* jmp esi */
};
enum { READ = 0x1000, WRITE = 0x1005, EXEC = 0x100b };
static const uint8_t end_code[] = { 0xe6, 0x10 };
#else
/* Register x0 has the address, x2 that of a device. */
static const uint32_t guest_code[] = {
    /* 1000: read  */ 0x39400001,             /* ldrb w1, [x0] */
    /* 1004:       */ 0xb9000041,             /* str w1, [x2] */
    /* 1008: write */ 0x52800b41,             /* mov w1, #0x5a */
    /* 100c:       */ 0x39000001,             /* strb w1, [x0] */
    /* 1010:       */ 0xb9000041,
    /* 1014: exec  */ 0xd61f0000,             /* br x0 */
};
enum { READ = 0x1000, WRITE = 0x1008, EXEC = 0x1014 };
static const uint32_t end_code[] = { 0xb9000041 };
#define DEVICE_GPA 0x40000000ul
#endif

static int kvm, vm, vcpu, uffd;
static struct kvm_run *run;
static uint8_t *test_mem;
static bool by_bitmap;          /* --userfault */
static int tests, failures;

#define bail(format, ...) do { \
    printf("Bail out! " format ": %s\n", ##__VA_ARGS__, strerror(errno)); \
    exit(1); \
} while (0)

#define ok(good, format, ...) do { \
    bool good_ = (good); \
    printf("%sok %d - " format "\n", good_ ? "" : "not ", ++tests, ##__VA_ARGS__); \
    failures += !good_; \
} while (0)

/* 0 or the error number. */
static int set_slot(unsigned slot, uint32_t flags, uint64_t gpa, size_t size, void *hva, bool v2)
{
    struct region2 region = { slot, flags, gpa, size, (uintptr_t)hva };

    return ioctl(vm, v2 ? SET_REGION2 : KVM_SET_USER_MEMORY_REGION, &region) ? errno : 0;
}

static int set_userfault_slot(unsigned slot, uint32_t flags, uint64_t gpa, size_t size, void *hva, const void *bitmap)
{
    struct region2 region = { slot, flags, gpa, size, (uintptr_t)hva, .userfault_bitmap = (uintptr_t)bitmap };

    return ioctl(vm, SET_REGION2, &region) ? errno : 0;
}

static void *map(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        bail("mmap");
    }
    return p;
}

#ifdef __x86_64__
/* Real mode with flat segments: the guest can address all its memory. */
static void init_vcpu(void)
{
    struct kvm_sregs sregs;

    if (ioctl(vcpu, KVM_GET_SREGS, &sregs) < 0) {
        bail("KVM_GET_SREGS");
    }
    struct kvm_segment *segs[] = { &sregs.ds, &sregs.es, &sregs.fs, &sregs.gs, &sregs.ss, &sregs.cs };
    for (unsigned i = 0; i < 6; i++) {
        segs[i]->base = 0;
        segs[i]->selector = 16;
        segs[i]->limit = 0xffffffff;
        segs[i]->g = 1;
    }
    sregs.cr0 |= 1; /* protected mode, no paging; 16-bit code */
    sregs.cs.selector = 8;
    sregs.cs.type = 11;
    if (ioctl(vcpu, KVM_SET_SREGS, &sregs) < 0) {
        bail("KVM_SET_SREGS");
    }
}

static void start_at(unsigned what, uint64_t gpa)
{
    struct kvm_regs regs = { .rip = what, .rsi = gpa, .rflags = 2 };

    if (ioctl(vcpu, KVM_SET_REGS, &regs) < 0) {
        bail("KVM_SET_REGS");
    }
}

/* The guest has told the end, with a byte. */
static bool is_end(int value)
{
    return run->exit_reason == KVM_EXIT_IO && run->io.port == 0x10 &&
        (value < 0 || *((uint8_t *)run + run->io.data_offset) == value);
}
#else
/* As after a reset: at EL1, without stage 1. */
static void init_vcpu(void)
{
    struct kvm_vcpu_init init;

    if (ioctl(vm, KVM_ARM_PREFERRED_TARGET, &init) < 0 || ioctl(vcpu, KVM_ARM_VCPU_INIT, &init) < 0) {
        bail("KVM_ARM_VCPU_INIT");
    }
}

static void set_reg(size_t offset, uint64_t value)
{
    struct kvm_one_reg reg = {
        .id = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE | offset / sizeof(uint32_t),
        .addr = (uintptr_t)&value,
    };

    if (ioctl(vcpu, KVM_SET_ONE_REG, &reg) < 0) {
        bail("KVM_SET_ONE_REG");
    }
}

static void start_at(unsigned what, uint64_t gpa)
{
    set_reg(offsetof(struct kvm_regs, regs.pc), what);
    set_reg(offsetof(struct kvm_regs, regs.regs[0]), gpa);
    set_reg(offsetof(struct kvm_regs, regs.regs[2]), DEVICE_GPA);
}

static bool is_end(int value)
{
    return run->exit_reason == KVM_EXIT_MMIO && run->mmio.is_write && run->mmio.phys_addr == DEVICE_GPA &&
        (value < 0 || run->mmio.data[0] == value);
}
#endif

static void make_vcpu(void)
{
    vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    if (vcpu < 0) {
        bail("KVM_CREATE_VCPU");
    }
    run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    if (run == MAP_FAILED) {
        bail("vCPU");
    }
    init_vcpu();
}

/* KVM_RUN to the next exit: its error number, or 0. */
static int enter(void)
{
    run->exit_reason = 0x7777;
    return ioctl(vcpu, KVM_RUN, 0) ? errno : 0;
}

/* Entered once more, the guest tells its end, with this byte or, if it is -1, with any. */
static bool goes_on(int value)
{
    return !enter() && is_end(value);
}

/* Entered once more, it exits for memory that is missing. */
static bool misses(uint64_t gpa, uint64_t flags)
{
    int error = enter();
    const struct memory_fault *f = (const void *)&run->mmio; /* where the union of exits starts */
    bool good = error == EFAULT && run->exit_reason == EXIT_MEMORY_FAULT &&
        f->gpa == gpa && f->size == PAGE && f->flags == (by_bitmap ? flags | FAULT_USERFAULT : flags);

    if (!good) {
        printf("# errno %d, exit %u, gpa %#lx, size %#lx, flags %#lx\n", error, run->exit_reason,
               (long)f->gpa, (long)f->size, (long)f->flags);
    }
    return good;
}

static void make_uffd(void *mem, size_t size)
{
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = { .api = UFFD_API };
    struct uffdio_register reg = {
        .range = { (uintptr_t)mem, size },
        .mode = UFFDIO_REGISTER_MODE_MISSING,
    };

    if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) < 0 || ioctl(uffd, UFFDIO_REGISTER, &reg) < 0) {
        bail("userfaultfd");
    }
}

static uint8_t contents[PAGE]; /* of the next page */

static int copy_contents(void *dst, int mode)
{
    struct uffdio_copy copy = {
        .dst = (uintptr_t)dst, .src = (uintptr_t)contents, .len = PAGE, .mode = mode,
    };

    return ioctl(uffd, UFFDIO_COPY, &copy) < 0 ? errno : 0;
}

static int copy_page(void *dst, uint8_t fill, int mode)
{
    memset(contents, fill, PAGE);
    return copy_contents(dst, mode);
}

/* A page that tells the end if it is executed */
static int copy_end(void *dst)
{
    memset(contents, 0xf4, PAGE);
    memcpy(contents, end_code, sizeof(end_code));
    return copy_contents(dst, UFFDIO_COPY_MODE_DONTWAKE);
}

/* The next fault that userfaultfd tells, or 0 if there is none in time. */
static uint64_t uffd_event(int timeout_ms)
{
    struct pollfd p = { .fd = uffd, .events = POLLIN };
    struct uffd_msg msg;

    if (poll(&p, 1, timeout_ms) != 1 || read(uffd, &msg, sizeof(msg)) != sizeof(msg)) {
        return 0;
    }
    return msg.event == UFFD_EVENT_PAGEFAULT ? msg.arg.pagefault.address : 0;
}

static int warnings(void)
{
    static char log[1 << 20];
    int n = klogctl(3, log, sizeof(log) - 1);
    int count = 0;

    if (n < 0) {
        bail("cannot read the kernel's log");
    }
    log[n] = 0;
    for (char *p = log; (p = strstr(p, "WARNING:")); p++) {
        count++;
    }
    return count;
}

static void *enter_thread(void *error)
{
    *(int *)error = enter();
    return NULL;
}

/* A guest access that must sleep in userfaultfd until the page is copied. */
static void by_uffd(unsigned page, const char *when)
{
    uint8_t *hva = test_mem + page * PAGE;
    pthread_t thread;
    int error;

    start_at(READ, TEST_GPA + page * PAGE);
    pthread_create(&thread, NULL, enter_thread, &error);
    uint64_t told = uffd_event(10000);
    copy_page(hva, 0x33, 0);
    pthread_join(thread, NULL);
    ok(told == (uintptr_t)hva && !error && is_end(0x33), "%s: a missing page is faulted in by userfaultfd", when);
}

static void test_ioctls(bool hidden)
{
    void *mem = map(4 * PAGE);
    int want = hidden ? EINVAL : 0;

    ok(ioctl(kvm, KVM_CHECK_EXTENSION, CAP_EXIT_ON_MISSING) == !hidden, "the capability tells %d", !hidden);
    ok(ioctl(vm, KVM_CHECK_EXTENSION, CAP_EXIT_ON_MISSING) == !hidden, "the capability of the VM tells %d", !hidden);
#ifdef __x86_64__
    ok(ioctl(vm, KVM_CHECK_EXTENSION, CAP_PRE_FAULT_MEMORY) == 1, "capability 236 is PRE_FAULT_MEMORY");
#endif
    ok(ioctl(vm, KVM_CHECK_EXTENSION, CAP_MEMORY_FAULT_INFO) == 1, "memory faults are reported");
    for (int v2 = 0; v2 < 2; v2++) {
        const char *name = v2 ? "SET_USER_MEMORY_REGION2" : "SET_USER_MEMORY_REGION";
        uint64_t gpa = 0x1000000;

        ok(set_slot(9, MEM_EXIT_ON_MISSING, gpa, 4 * PAGE, mem, v2) == want, "%s: the flag gives %d", name, want);
        ok(set_slot(9, 0, gpa, 0, mem, v2) == want, "%s: delete", name);
        ok(set_slot(9, MEM_EXIT_ON_MISSING | KVM_MEM_LOG_DIRTY_PAGES, gpa, 4 * PAGE, mem, v2) == want,
           "%s: the flag with LOG_DIRTY_PAGES gives %d", name, want);
        set_slot(9, 0, gpa, 0, mem, v2);
        ok(set_slot(9, MEM_EXIT_ON_MISSING | KVM_MEM_READONLY, gpa, 4 * PAGE, mem, v2) == EINVAL,
           "%s: the flag with READONLY gives EINVAL", name);
        ok(set_slot(9, 0, gpa, 4 * PAGE, mem, v2) == 0, "%s: a slot without the flag", name);
        ok(set_slot(9, MEM_EXIT_ON_MISSING, gpa, 4 * PAGE, mem, v2) == want, "%s: flag a slot that is there", name);
        ok(set_slot(9, 0, gpa, 4 * PAGE, mem, v2) == 0, "%s: clear the flag", name);
        set_slot(9, 0, gpa, 0, mem, v2);
        ok(set_slot(9, KVM_MEM_READONLY, gpa, 4 * PAGE, mem, v2) == 0, "%s: a read-only slot", name);
        ok(set_slot(9, KVM_MEM_READONLY | MEM_EXIT_ON_MISSING, gpa, 4 * PAGE, mem, v2) == EINVAL,
           "%s: to flag a read-only slot gives EINVAL", name);
        ok(set_slot(9, 1u << 4, gpa + PAGE * 16, 4 * PAGE, mem, v2) == EINVAL, "%s: unknown flags give EINVAL", name);
        set_slot(9, 0, gpa, 0, mem, v2);
    }
    ok(ioctl(vm, KVM_ENABLE_CAP, &(struct kvm_enable_cap) { .cap = CAP_EXIT_ON_MISSING }) < 0 && errno == EINVAL,
       "KVM_ENABLE_CAP gives EINVAL");
}

static void set_test_slot(uint32_t flags, const uint64_t *bitmap, const char *how)
{
    errno = by_bitmap ? set_userfault_slot(1, flags, TEST_GPA, TEST_SIZE, test_mem, bitmap)
                      : set_slot(1, flags, TEST_GPA, TEST_SIZE, test_mem, false);
    if (errno) {
        bail("%s", how);
    }
    ok(true, "%s", how);
}

static const struct {
    const char *name;
    unsigned what, flags;
} kinds[] = {
    { "read", READ, FAULT_READ },
    { "write", WRITE, FAULT_WRITE },
    { "exec", EXEC, FAULT_EXEC },
};

/* The first pages, each accessed in another way. Returns their number. */
static unsigned test_kinds(uint64_t *bitmap)
{
    set_test_slot(MEM_EXIT_ON_MISSING, bitmap, "a slot with the flag");
    for (unsigned i = 0; i < 3; i++) {
        uint8_t *hva = test_mem + i * PAGE;
        uint64_t gpa = TEST_GPA + i * PAGE;

        start_at(kinds[i].what, gpa + (i < 2 ? 0x123 : 0));
        ok(misses(gpa, kinds[i].flags), "%s of a missing page exits", kinds[i].name);
        ok(misses(gpa, kinds[i].flags), "%s exits again while the page is missing", kinds[i].name);
        ok(uffd_event(0) == 0, "%s does not reach userfaultfd", kinds[i].name);
        ok(copy_end(hva) == 0, "the page is copied");
        if (bitmap) {
            ok(misses(gpa, kinds[i].flags), "%s exits while the bit is set, though the page is there", kinds[i].name);
            __atomic_and_fetch(bitmap, ~(1ull << i), __ATOMIC_RELEASE);
        }
        ok(goes_on(i ? -1 : 0xf4), "%s goes on", kinds[i].name);
        if (i == 1) {
            ok(hva[0x123] == 0x5a, "what the guest wrote is there");
        }
    }
    return 3;
}

/* The page is missing. */
static void test_dirty_logging(unsigned page, uint64_t *bitmap)
{
    uint64_t dirty = 0;
    struct kvm_dirty_log log = { .slot = 1, .dirty_bitmap = &dirty };

    set_test_slot(MEM_EXIT_ON_MISSING | KVM_MEM_LOG_DIRTY_PAGES, bitmap, "dirty logging on, flag kept");
    start_at(WRITE, TEST_GPA + page * PAGE);
    ok(misses(TEST_GPA + page * PAGE, FAULT_WRITE), "a write exits with dirty logging");
    copy_page(test_mem + page * PAGE, 0x22, UFFDIO_COPY_MODE_DONTWAKE);
    if (bitmap) {
        *bitmap &= ~(1ull << page);
    }
    ok(goes_on(-1) && ioctl(vm, KVM_GET_DIRTY_LOG, &log) == 0 && dirty == 1ull << page,
       "and the page is logged as dirty");
}

static void test_exits(void)
{
    unsigned page = test_kinds(NULL);

    /* Zero pages are mapped, but not writable. */
    uint8_t *hva = test_mem + page * PAGE;
    uint64_t gpa = TEST_GPA + page * PAGE;
    struct uffdio_zeropage zero = {
        .range = { (uintptr_t)hva, PAGE }, .mode = UFFDIO_ZEROPAGE_MODE_DONTWAKE,
    };
    start_at(READ, gpa);
    ok(misses(gpa, FAULT_READ), "read of a page exits before it comes as a zero page");
    ok(ioctl(uffd, UFFDIO_ZEROPAGE, &zero) == 0, "UFFDIO_ZEROPAGE");
    ok(misses(gpa, FAULT_READ), "read of a page that came as a zero page exits");
    ok(madvise(hva, PAGE, MADV_POPULATE_WRITE) == 0, "MADV_POPULATE_WRITE");
    ok(goes_on(0), "then the read goes on");
    page++;

    /* Pages that the host has touched. */
    copy_page(test_mem + page * PAGE, 0x11, 0);
    start_at(READ, TEST_GPA + page * PAGE);
    ok(goes_on(0x11), "a page that is there does not exit");
    page++;

    /* Toggling, in both directions, with pages that the guest has mapped. */
    set_test_slot(0, NULL, "clear the flag of a slot in use");
    by_uffd(page, "flag cleared");
    page++;
    set_test_slot(MEM_EXIT_ON_MISSING, NULL, "set the flag of a slot in use");
    start_at(READ, TEST_GPA + page * PAGE);
    ok(misses(TEST_GPA + page * PAGE, FAULT_READ), "flag set again: exits");
    start_at(READ, TEST_GPA + 0x123);
    ok(goes_on(0xf4), "what was mapped before is mapped still");
    test_dirty_logging(page, NULL);
    set_test_slot(KVM_MEM_LOG_DIRTY_PAGES, NULL, "flag off, dirty logging kept");
    page++;
    by_uffd(page, "dirty logging without the flag");
    set_test_slot(0, NULL, "both off");
}

/* A page of 2 MiB: the exit tells 4 KiB, and one copy serves all of it. */
static void test_huge(void)
{
    uint8_t *huge = mmap(NULL, HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);

    if (huge == MAP_FAILED) {
        bail("no page of 2 MiB (hugepages=)");
    }
    close(uffd);
    make_uffd(huge, HUGE);
    ok(set_slot(2, MEM_EXIT_ON_MISSING, HUGE_GPA, HUGE, huge, false) == 0, "a slot of hugetlb memory with the flag");
    start_at(READ, HUGE_GPA + 0x123456);
    ok(misses(HUGE_GPA + 0x123000, FAULT_READ), "a missing page of 2 MiB exits with 4 KiB of it");
    uint8_t *data = map(HUGE);
    memset(data, 0x44, HUGE);
    struct uffdio_copy copy = {
        .dst = (uintptr_t)huge, .src = (uintptr_t)data, .len = HUGE, .mode = UFFDIO_COPY_MODE_DONTWAKE,
    };
    ok(ioctl(uffd, UFFDIO_COPY, &copy) == 0, "2 MiB are copied");
    ok(goes_on(0x44), "the read goes on");
    start_at(WRITE, HUGE_GPA + HUGE - 1);
    ok(goes_on(-1) && huge[HUGE - 1] == 0x5a, "the rest of the 2 MiB does not exit");
}

static void test_userfault_ioctls(void)
{
    static uint64_t bitmap[2];
    void *mem = map(TEST_SIZE);
    uint64_t gpa = 0x1000000;

    ok(ioctl(kvm, KVM_CHECK_EXTENSION, CAP_USERFAULT) == 1, "the capability tells 1");
    ok(ioctl(vm, KVM_CHECK_EXTENSION, CAP_USERFAULT) == 1, "the capability of the VM tells 1");
    ok(set_slot(9, MEM_USERFAULT, gpa, TEST_SIZE, mem, false) == EINVAL,
       "SET_USER_MEMORY_REGION, which has no bitmap: EINVAL");
    ok(set_slot(9, MEM_USERFAULT, gpa, TEST_SIZE, mem, true) == EINVAL, "no bitmap: EINVAL");
    ok(set_userfault_slot(9, MEM_USERFAULT, gpa, TEST_SIZE, mem, (char *)bitmap + 4) == EINVAL,
       "a bitmap that is not aligned: EINVAL");
    ok(set_userfault_slot(9, MEM_USERFAULT, gpa, TEST_SIZE, mem, (void *)(1ul << 63)) == EINVAL,
       "a bitmap of the kernel: EINVAL");
    ok(set_userfault_slot(9, MEM_USERFAULT | KVM_MEM_READONLY, gpa, TEST_SIZE, mem, bitmap) == EINVAL,
       "with READONLY: EINVAL");
    ok(set_userfault_slot(9, MEM_USERFAULT | KVM_MEM_LOG_DIRTY_PAGES, gpa, TEST_SIZE, mem, bitmap) == 0,
       "with LOG_DIRTY_PAGES");
    ok(set_userfault_slot(9, KVM_MEM_LOG_DIRTY_PAGES, gpa, TEST_SIZE, mem, NULL) == 0, "the flag off, logging kept");
    ok(set_userfault_slot(9, 0, gpa, 0, mem, NULL) == 0, "delete");
}

static void test_userfault(void)
{
    static uint64_t bitmap = ~0ull;     /* TEST_SIZE is 64 pages */
    const uint64_t there = TEST_GPA + 0x123;
    unsigned page = test_kinds(&bitmap);

    bitmap &= ~(1ull << page);
    by_uffd(page, "bit clear");
    page++;

    struct uffdio_zeropage zero = {
        .range = { (uintptr_t)test_mem + page * PAGE, PAGE }, .mode = UFFDIO_ZEROPAGE_MODE_DONTWAKE,
    };
    ioctl(uffd, UFFDIO_ZEROPAGE, &zero);
    bitmap &= ~(1ull << page);
    start_at(READ, TEST_GPA + page * PAGE);
    ok(goes_on(0), "a zero page, which the host maps read-only, does not exit");
    page++;

    bitmap |= 1;
    start_at(READ, there);
    ok(goes_on(0xf4), "a bit that is set later: the page is mapped still");
    set_test_slot(0, NULL, "clear the flag of a slot in use");
    start_at(READ, there);
    ok(goes_on(0xf4), "without the flag, bits do not matter");
    set_test_slot(MEM_USERFAULT, &bitmap, "set the flag of a slot in use");
    start_at(READ, there);
    ok(misses(TEST_GPA, FAULT_READ), "what was mapped before exits: its bit is set");
    bitmap &= ~1ull;

    test_dirty_logging(page, &bitmap);

    void *gone = map(PAGE);
    ok(set_userfault_slot(1, MEM_USERFAULT | KVM_MEM_LOG_DIRTY_PAGES, TEST_GPA, TEST_SIZE, test_mem, gone) == EINVAL,
       "another bitmap while the flag stays: EINVAL");
    set_test_slot(0, NULL, "the flag off");
    set_test_slot(MEM_USERFAULT, gone, "another bitmap");
    munmap(gone, PAGE);
    start_at(READ, there);
    ok(enter() == EFAULT && run->exit_reason != EXIT_MEMORY_FAULT, "a bitmap that is gone: EFAULT without the exit");
    set_test_slot(0, NULL, "the flag off");
}

/* Bits of a huge page count one by one. */
static void test_userfault_huge(void)
{
    static uint64_t bitmap[HUGE / PAGE / 64];
    uint8_t *huge = mmap(NULL, HUGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE, -1, 0);

    if (huge == MAP_FAILED) {
        bail("no page of 2 MiB (hugepages=)");
    }
    memset(huge, 0x44, HUGE);
    bitmap[0] = 2;
    ok(set_userfault_slot(2, MEM_USERFAULT, HUGE_GPA, HUGE, huge, bitmap) == 0, "a slot of hugetlb memory");
    start_at(READ, HUGE_GPA);
    ok(goes_on(0x44), "page 0 of 2 MiB, whose bit is clear, is mapped");
    start_at(READ, HUGE_GPA + PAGE);
    ok(misses(HUGE_GPA + PAGE, FAULT_READ), "page 1 of them exits");
    start_at(READ, HUGE_GPA + 2 * PAGE);
    ok(goes_on(0x44), "page 2 of them is mapped");
    ok(set_userfault_slot(2, MEM_USERFAULT | KVM_MEM_LOG_DIRTY_PAGES, HUGE_GPA, HUGE, huge, bitmap) == 0 &&
       set_userfault_slot(2, MEM_USERFAULT, HUGE_GPA, HUGE, huge, bitmap) == 0, "dirty logging on and off");
    start_at(READ, HUGE_GPA);
    ok(goes_on(0x44), "page 0 is mapped");
    start_at(READ, HUGE_GPA + PAGE);
    ok(misses(HUGE_GPA + PAGE, FAULT_READ), "page 1 exits as before");
}

int main(int argc, char **argv)
{
    bool hidden = argc == 2 && !strcmp(argv[1], "--hidden");

    by_bitmap = argc == 2 && !strcmp(argv[1], "--userfault");
    setvbuf(stdout, NULL, _IOLBF, 0);
    alarm(120); /* nothing here may sleep for good */
    kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (kvm < 0) {
        bail("/dev/kvm");
    }
    vm = ioctl(kvm, KVM_CREATE_VM, 0);
    if (vm < 0) {
        bail("KVM_CREATE_VM");
    }
    int before = warnings();
    test_ioctls(hidden || by_bitmap);
    if (by_bitmap) {
        test_userfault_ioctls();
    }

    uint8_t *code = map(PAGE);
    memcpy(code, guest_code, sizeof(guest_code));
    set_slot(0, 0, CODE_GPA, PAGE, code, false);
    make_vcpu();
    test_mem = map(TEST_SIZE);
    make_uffd(test_mem, TEST_SIZE);
    if (by_bitmap) {
        test_userfault();
        test_userfault_huge();
    } else if (hidden) {
        set_test_slot(0, NULL, "a slot");
        by_uffd(0, "no flag");
    } else {
        test_exits();
        test_huge();
    }
    ok(warnings() == before, "the kernel has no warnings");
    printf("1..%d\n", tests);
    return failures != 0;
}
