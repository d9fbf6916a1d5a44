/*
 * KVM exits on missing memory
 *
 * A memslot with KVM_MEM_EXIT_ON_MISSING makes KVM_RUN return to its vCPU
 * thread where the stage-2 fault handler would have had to fault in the
 * userspace mapping.  It adds to userfaultfd and does not replace it: KVM's
 * own accesses, vhost and QEMU's threads still fault in the usual way.
 *
 * There are two kernel interfaces for that.  KVM_MEM_EXIT_ON_MISSING lets KVM
 * look for the page in the host's page tables; KVM_MEM_USERFAULT, in a bitmap
 * of ours.  Neither was merged, and their numbers collide with others, so they
 * stay behind the functions of this header.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef SYSTEM_KVM_EXIT_ON_MISSING_H
#define SYSTEM_KVM_EXIT_ON_MISSING_H

#include "exec/cpu-common.h"
#include "exec/memattrs.h"
#include "exec/hwaddr.h"
#include "exec/vaddr.h"
#include "migration/inject.h"

struct kvm_run;
struct kvm_userspace_memory_region2;
struct KVMSlot;

typedef struct KVMMissingOps {
    /**
     * @fault: serve an exit, in the vCPU thread and without the BQL.
     * @offset is the byte in @rb that the guest touched; it is a hint that is
     * exact to the target page only.
     *
     * Returns 1 if the page is there now, 0 to enter the guest again without
     * it; negative after it has reported an error, to stop the VM.
     */
    int (*fault)(CPUState *cpu, RAMBlock *rb, ram_addr_t offset);

    /**
     * @kick: somebody wants @cpu to leave KVM_RUN; called in any thread after
     * the signal has been sent.  @fault must return soon after it.
     */
    void (*kick)(CPUState *cpu);

    /**
     * @missing: set the bits of @rb's pages that are missing, one bit for each
     * page of the host, in @bitmap, which is clear.  Called before the guest
     * runs, under RCU.
     *
     * Returns false if @rb misses nothing.
     */
    bool (*missing)(RAMBlock *rb, unsigned long *bitmap);
} KVMMissingOps;

/**
 * kvm_exit_on_missing_available: whether the host has the feature
 *
 * The first call makes a scratch VM whose vCPU touches a missing page of a
 * flagged memslot: only the exit proves the feature, since the capability
 * numbers (236, 243) and the flag (bit 3) mean something else to other kernels.
 * Later calls return what the first one found.  Call with the BQL held.
 */
bool kvm_exit_on_missing_available(Error **errp);

/**
 * kvm_exit_on_missing_enable: flag all eligible memslots of all address spaces
 *
 * @ops must live for ever: a vCPU that has left KVM_RUN already may call into
 * it after kvm_exit_on_missing_disable().
 *
 * Returns false and leaves no flag set on error.
 */
bool kvm_exit_on_missing_enable(const KVMMissingOps *ops, Error **errp);

/**
 * kvm_exit_on_missing_disable: clear the flags
 *
 * After the last kvm_exit_on_missing_placed().  Needs no lock.
 */
void kvm_exit_on_missing_disable(void);

/**
 * kvm_exit_on_missing_placed: @size bytes at @offset of @rb are there now
 *
 * Both are multiples of the host's page size.  Call it after the pages were
 * placed, and before vCPUs that wait for them go on.  Needs no lock.
 */
void kvm_exit_on_missing_placed(RAMBlock *rb, ram_addr_t offset, size_t size);

/**
 * kvm_exit_on_missing_forget: pages that are still missing will not be placed
 *
 * A vCPU that touches one makes no exit that tells of a bitmap.  It waits in
 * userfaultfd, until that lets go of the memory.  Needs no lock.
 */
void kvm_exit_on_missing_forget(void);

/*
 * Call sites in accel/kvm/
 */

/* The flag for kvm_mem_flags(), of either interface, or 0 */
int kvm_exit_on_missing_flag(MemoryRegion *mr);

/*
 * The bitmap for @mem, which is for @slot, or none: then @mem has no flag if it
 * was to have one.  Returns whether KVM_SET_USER_MEMORY_REGION2 is needed.
 */
bool kvm_exit_on_missing_region(const struct KVMSlot *slot,
                                struct kvm_userspace_memory_region2 *mem);

/* Set the thread kick of @cpu; the accelerator's kick_vcpu_thread */
void kvm_exit_on_missing_kick(CPUState *cpu);

/*
 * Serve KVM_EXIT_MEMORY_FAULT.  Returns false if it is none of ours (a
 * conversion of private memory); otherwise *@ret is the result.
 */
bool kvm_exit_on_missing_handle(CPUState *cpu, struct kvm_run *run,
                                MemTxAttrs attrs, int *ret);

/*
 * Call sites in accel/tcg/: in builds for tests, vCPUs of TCG serve the same
 * exit, so that what follows it runs by real threads at the host's speed where
 * no KVM has it.  They look in the bitmaps of KVM Userfault when their TLB is
 * filled.  What accesses memory in other ways faults by userfaultfd, as always.
 */
#ifdef CONFIG_MIGRATION_INJECT

/*
 * The entry for @addr is there, and nothing was accessed by it.  Returns when
 * @addr + @addend may be accessed, or leaves cpu_exec() if somebody wants that
 * meanwhile; not if the caller probes: then the access waits in userfaultfd.
 */
void kvm_exit_on_missing_tcg_filled(CPUState *cpu, vaddr addr, int mmu_idx,
                                    uintptr_t addend, bool probe, uintptr_t ra);

/* After cpu_exit() */
void kvm_exit_on_missing_tcg_kick(CPUState *cpu);

#else

static inline void
kvm_exit_on_missing_tcg_filled(CPUState *cpu, vaddr addr, int mmu_idx,
                               uintptr_t addend, bool probe, uintptr_t ra)
{
}

static inline void kvm_exit_on_missing_tcg_kick(CPUState *cpu)
{
}

#endif

#endif
