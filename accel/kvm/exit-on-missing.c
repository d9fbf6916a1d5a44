/*
 * KVM exits on missing memory: the kernel interface
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/kvm.h>
#include <sys/ioctl.h>
#include "qapi/error.h"
#include "qemu/bswap.h"
#include "qemu/error-report.h"
#include "qemu/madvise.h"
#include "qemu/main-loop.h"
#include "exec/cputlb.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "hw/core/cpu.h"
#include "system/cpus.h"
#include "system/kvm_int.h"
#include "system/kvm-exit-on-missing.h"
#include "system/tcg.h"
#include "trace.h"
#include "userfault.h"

/*
 * "KVM: Improve KVM + userfaultfd performance via KVM_EXIT_MEMORY_FAULTs on
 * stage-2 faults", v7, 2024-02-15.  Not in linux-headers, since Linux does not
 * have it.
 */
#define KVM_MEM_EXIT_ON_MISSING (1UL << 3)

/*
 * Set once, then constant.  Load-acquire pairs with the store-release in
 * kvm_exit_on_missing_enable(), so that *ops is seen complete.
 */
static const KVMMissingOps *missing_ops;

/*
 * Atomic.  A memslot that another thread makes either uses the new value, or
 * kvm_slots_update_flags() corrects it: both hold the slots lock.
 */
static bool missing_enabled;

/*
 * How the kernel finds out that a page is missing: it looks for the page
 * itself, or in a bitmap.  Set by the probe, then constant.
 */
static bool missing_by_bitmap;

/* In builds for tests, TCG's vCPUs exit; a single TCG thread could not wait */
static bool missing_by_tcg(void)
{
#ifdef CONFIG_MIGRATION_INJECT
    return tcg_enabled() && qemu_tcg_mttcg_enabled();
#else
    return false;
#endif
}

static const char *missing_interface(void)
{
    return missing_by_tcg() ? "TCG" :
           missing_by_bitmap ? "KVM_MEM_USERFAULT" : "KVM_MEM_EXIT_ON_MISSING";
}

static int missing_update_slots(void)
{
    return missing_by_tcg() ? 0 : kvm_slots_update_flags();
}

/* KVM rejects an unknown flag or ioctl with one of these errors */
static bool missing_unknown(int err)
{
    return err == EINVAL || err == ENOTTY;
}

static bool missing_eligible(MemoryRegion *mr)
{
    /*
     * KVM refuses read-only slots.  Fast GUP can never pin device memory
     * (VFIO), which would exit indefinitely.  guest_memfd slots cannot change
     * their flags.  Memory that does not migrate is never missing.
     */
    return memory_region_is_ram(mr) && !memory_region_is_ram_device(mr) &&
           !mr->readonly && !memory_region_is_romd(mr) &&
           !memory_region_has_guest_memfd(mr) &&
           qemu_ram_is_migratable(mr->ram_block);
}

int kvm_exit_on_missing_flag(MemoryRegion *mr)
{
    if (!qatomic_read(&missing_enabled) || !missing_eligible(mr) ||
        (missing_by_bitmap && !mr->ram_block->userfault_bmap)) {
        return 0;
    }
    QEMU_BUILD_BUG_ON(KVM_MEM_USERFAULT != KVM_MEM_EXIT_ON_MISSING);
    return KVM_MEM_EXIT_ON_MISSING;
}

bool kvm_exit_on_missing_region(const KVMSlot *slot,
                                struct kvm_userspace_memory_region2 *mem)
{
    kvm_userfault_set_bitmap(mem, NULL);
    if (!missing_by_bitmap || !(mem->flags & KVM_MEM_USERFAULT)) {
        return false;
    }
    if (!kvm_userfault_slot(slot, mem)) {
        mem->flags &= ~KVM_MEM_USERFAULT;
        return false;
    }
    return true;
}

bool kvm_exit_on_missing_enable(const KVMMissingOps *ops, Error **errp)
{
    int ret;

    if (missing_by_bitmap) {
        kvm_userfault_start(ops);
    }
    qatomic_store_release(&missing_ops, ops);
    qatomic_set(&missing_enabled, true);
    ret = missing_update_slots();
    trace_kvm_exit_on_missing_enable(missing_interface(), ret);
    if (ret < 0) {
        kvm_exit_on_missing_disable();
        error_setg_errno(errp, -ret, "KVM refused %s for a memslot",
                         missing_interface());
        return false;
    }
    return true;
}

void kvm_exit_on_missing_disable(void)
{
    int ret;

    if (!qatomic_xchg(&missing_enabled, false)) {
        return;
    }
    kvm_exit_on_missing_forget();
    ret = missing_update_slots();
    trace_kvm_exit_on_missing_disable(ret);
    if (ret < 0) {
        warn_report("KVM kept %s of a memslot (%s): the guest stays correct, "
                    "but swapped pages can cost exits",
                    missing_interface(), strerror(-ret));
        return; /* KVM reads the bitmaps, too */
    }
    if (!missing_by_tcg()) { /* its vCPUs may be reading them */
        kvm_userfault_stop();
    }
}

void kvm_exit_on_missing_kick(CPUState *cpu)
{
    const KVMMissingOps *ops;

    /*
     * The signal comes first: a vCPU that the next lines take out of its wait
     * returns to KVM_RUN, where the signal makes it leave with -EINTR.
     */
    cpus_kick_thread(cpu);

    ops = qatomic_load_acquire(&missing_ops);
    if (ops) {
        ops->kick(cpu);
    }
}

/*
 * Otherwise the guest would exit once more, as soon as it was entered, for KVM
 * to map the page.
 */
static void missing_map_page(CPUState *cpu, hwaddr gpa)
{
    /* Atomic.  Linux has it since 6.11, for x86 with two-dimensional paging. */
    static bool unknown;
    size_t page_size = qemu_real_host_page_size();
    struct kvm_pre_fault_memory range = {
        .gpa = ROUND_DOWN(gpa, page_size),
        .size = page_size,
    };
    int ret = 0;

    if (!qatomic_read(&unknown)) {
        ret = kvm_vcpu_ioctl(cpu, KVM_PRE_FAULT_MEMORY, &range);
    }
    /* EOPNOTSUPP is only about this fault: the vCPU runs a nested guest */
    if (missing_unknown(-ret)) {
        qatomic_set(&unknown, true);
    }
}

bool kvm_exit_on_missing_handle(CPUState *cpu, struct kvm_run *run,
                                MemTxAttrs attrs, int *ret)
{
    const KVMMissingOps *ops = qatomic_load_acquire(&missing_ops);
    /* The second address space is x86's SMM, which attrs calls secure */
    int as_id = attrs.secure && kvm_state->nr_as > 1;
    hwaddr gpa = run->memory_fault.gpa;
    hwaddr offset, len = 1;
    MemoryRegion *mr;

    if (!ops) {
        return false;
    }

    /*
     * flags and size are hints: the kernel reports 4 KiB for any backing, and
     * a walk of the guest's page tables counts as a write.
     */
    WITH_RCU_READ_LOCK_GUARD() {
        mr = address_space_translate(kvm_state->as[as_id].as, gpa, &offset,
                                     &len, true, attrs);
        if (!mr->ram_block &&
            !(run->memory_fault.flags & KVM_MEMORY_EXIT_FLAG_PRIVATE)) {
            /* The memslot was removed after the exit: KVM looks again */
            *ret = 0;
            return true;
        }
        if (!memory_region_is_ram(mr) || memory_region_has_guest_memfd(mr)) {
            return false;
        }
        /* The wait outlasts the RCU critical section */
        memory_region_ref(mr);
    }

    trace_kvm_exit_on_missing(cpu->cpu_index, as_id, gpa,
                              run->memory_fault.flags);
    *ret = ops->fault(cpu, mr->ram_block, offset);
    if (*ret > 0) {
        missing_map_page(cpu, gpa);
        *ret = 0;
    }
    memory_region_unref(mr);
    return true;
}

/*
 * PROBE_GPA: of a memslot with PROBE_PAGES pages, the last of which is missing.
 * The first instructions of a new vCPU access it.
 */
#if defined(TARGET_I386)
#define PROBE_GPA 0xfffff000ull /* the page of the reset vector */
#define PROBE_PAGES 1

static int missing_probe_vcpu_init(int vmfd, int vcpufd, void *page)
{
    return 0; /* KVM creates it in its reset state */
}
#elif defined(TARGET_AARCH64)
#define PROBE_GPA 0ull
#define PROBE_PAGES 2

static int missing_probe_vcpu_init(int vmfd, int vcpufd, void *page)
{
    struct kvm_vcpu_init init;
    uint8_t *code = page;

    /*
     * An access to data: where the flag means something else, code that cannot
     * be fetched or is undefined would raise exceptions indefinitely.
     */
    stl_le_p(code, 0x18000000 | qemu_real_host_page_size() / 4 << 5); /* ldr */
    stl_le_p(code + 4, 0xd2a80001); /* mov x1, #0x40000000: no memory there */
    stl_le_p(code + 8, 0xb9000020); /* str w0, [x1] */

    if (ioctl(vmfd, KVM_ARM_PREFERRED_TARGET, &init) < 0) {
        return -1;
    }
    return ioctl(vcpufd, KVM_ARM_VCPU_INIT, &init);
}
#endif

#ifdef PROBE_GPA
/* Sets missing_by_bitmap; returns 0, or -1 with errno */
static int missing_probe_set_slot(int vmfd,
                                  struct kvm_userspace_memory_region2 *slot,
                                  unsigned long *bitmap)
{
    /* This ioctl reads only the first fields: it refuses KVM_MEM_USERFAULT */
    int ret = ioctl(vmfd, KVM_SET_USER_MEMORY_REGION, slot);

    if (ret < 0 && errno == EINVAL) {
        missing_by_bitmap = true;
        kvm_userfault_set_bitmap(slot, bitmap);
        ret = ioctl(vmfd, KVM_SET_USER_MEMORY_REGION2, slot);
    }
    return ret;
}

/* Whether KVM_RUN returns for the page at @missing; else sets @errp */
static bool missing_probe_run(int vcpufd, const struct kvm_run *run,
                              uint64_t missing, Error **errp)
{
    bool found;
    int ret;

    /*
     * Where the flag means something else, the vCPU soon accesses memory that
     * no slot has: KVM_RUN returns in any case.
     */
    do {
        ret = ioctl(vcpufd, KVM_RUN, 0);
    } while (ret < 0 && errno == EINTR);
    found = ret < 0 && errno == EFAULT &&
            run->exit_reason == KVM_EXIT_MEMORY_FAULT &&
            ROUND_DOWN(run->memory_fault.gpa, qemu_real_host_page_size()) ==
            missing &&
            (!missing_by_bitmap ||
             run->memory_fault.flags & KVM_MEMORY_EXIT_FLAG_USERFAULT);
    trace_kvm_exit_on_missing_probe(missing_interface(), ret < 0 ? errno : 0,
                                    run->exit_reason);
    if (!found) {
        error_setg(errp, "the host kernel takes %s, but does not exit on "
                   "missing memory (exit reason %u)",
                   missing_interface(), run->exit_reason);
    }
    return found;
}

static bool missing_probe(Error **errp)
{
    size_t page_size = qemu_real_host_page_size();
    struct kvm_userspace_memory_region2 slot = {
        .flags = KVM_MEM_EXIT_ON_MISSING,
        .guest_phys_addr = ROUND_DOWN(PROBE_GPA, page_size),
        .memory_size = PROBE_PAGES * page_size,
    };
    uint64_t missing = slot.guest_phys_addr + slot.memory_size - page_size;
    unsigned long bitmap = 1UL << (PROBE_PAGES - 1);
    void *page = MAP_FAILED;
    struct kvm_run *run = MAP_FAILED;
    int vmfd, vcpufd = -1, run_size;
    bool found = false;

    vmfd = ioctl(kvm_state->fd, KVM_CREATE_VM, 0);
    if (vmfd < 0) {
        error_setg_errno(errp, errno, "cannot create a scratch VM to probe "
                         "exits on missing memory");
        return false;
    }

    page = mmap(NULL, slot.memory_size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (page == MAP_FAILED) {
        goto failed;
    }
    qemu_madvise(page, slot.memory_size, QEMU_MADV_NOHUGEPAGE);
    slot.userspace_addr = (uintptr_t)page;
    if (missing_probe_set_slot(vmfd, &slot, &bitmap) < 0) {
        if (!missing_unknown(errno)) {
            goto failed;
        }
        error_setg(errp, "the host kernel has neither KVM_MEM_EXIT_ON_MISSING "
                   "nor KVM_MEM_USERFAULT");
        goto out;
    }

    run_size = ioctl(kvm_state->fd, KVM_GET_VCPU_MMAP_SIZE, 0);
    vcpufd = ioctl(vmfd, KVM_CREATE_VCPU, 0);
    if (run_size < 0 || vcpufd < 0 ||
        missing_probe_vcpu_init(vmfd, vcpufd, page) < 0) {
        goto failed;
    }
    run = mmap(NULL, run_size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpufd, 0);
    if (run == MAP_FAILED) {
        goto failed;
    }

    found = missing_probe_run(vcpufd, run, missing, errp);
    goto out;

failed:
    error_setg_errno(errp, errno, "cannot probe exits on missing memory in a "
                     "scratch VM");
out:
    if (run != MAP_FAILED) {
        munmap(run, run_size);
    }
    if (vcpufd >= 0) {
        close(vcpufd);
    }
    close(vmfd);
    if (page != MAP_FAILED) {
        munmap(page, slot.memory_size);
    }
    return found;
}
#else
static bool missing_probe(Error **errp)
{
    error_setg(errp, "exits on missing memory are not known for this target");
    return false;
}
#endif

bool kvm_exit_on_missing_available(Error **errp)
{
    static Error *reason;
    static bool probed, found;

    if (missing_by_tcg()) {
        missing_by_bitmap = true;
        return true;
    }
    if (!kvm_enabled()) {
        error_setg(errp, "exits on missing memory need the KVM accelerator");
        return false;
    }
    if (!probed) {
        found = missing_probe(&reason);
        probed = true;
    }
    if (!found && errp) {
        *errp = error_copy(reason);
    }
    return found;
}

#if defined(CONFIG_MIGRATION_INJECT) && defined(CONFIG_TCG)

void kvm_exit_on_missing_tcg_filled(CPUState *cpu, vaddr addr, int mmu_idx,
                                    uintptr_t addend, bool probe, uintptr_t ra)
{
    const KVMMissingOps *ops = qatomic_load_acquire(&missing_ops);
    unsigned long *bitmap;
    ram_addr_t offset;
    RAMBlock *rb;
    size_t page;

    /* With the BQL, interrupts are delivered: a wait would block all others */
    if (!ops || !qatomic_read(&missing_enabled) || !cpu->running ||
        bql_locked()) {
        return;
    }
    /* Without RAM, this is an address in the first page.  Under RCU. */
    rb = qemu_ram_block_from_host((void *)((uintptr_t)addr + addend), false,
                                  &offset);
    bitmap = rb ? qatomic_read(&rb->userfault_bmap) : NULL;
    page = offset / qemu_real_host_page_size();
    if (!bitmap ||
        !(qatomic_read(&bitmap[BIT_WORD(page)]) & BIT_MASK(page)) ||
        ops->fault(cpu, rb, offset)) {
        return;
    }
    /* The vCPU was kicked.  A probing caller is not prepared to restart. */
    if (!probe) {
        tlb_flush_page_by_mmuidx(cpu, addr, 1 << mmu_idx);
        cpu_exit(cpu); /* to where thread_kicked is cleared */
        cpu_loop_exit_restore(cpu, ra);
    }
}

void kvm_exit_on_missing_tcg_kick(CPUState *cpu)
{
    const KVMMissingOps *ops = qatomic_load_acquire(&missing_ops);

    if (ops) {
        /* As cpus_kick_thread() does, but TCG needs no signal */
        qatomic_set(&cpu->thread_kicked, true);
        ops->kick(cpu);
    }
}

#endif
