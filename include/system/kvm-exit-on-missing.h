/*
 * KVM exits on missing memory
 *
 * On a memslot with KVM_MEM_EXIT_ON_MISSING, KVM_RUN returns to its vCPU thread
 * where the stage-2 fault handler would have had to fault in the userspace
 * mapping.  The flag does not replace userfaultfd: KVM's own accesses, vhost
 * and QEMU's threads still fault in the usual way.
 *
 * Two kernel interfaces do that.  With KVM_MEM_EXIT_ON_MISSING, KVM looks for
 * the page in the host's page tables; with KVM_MEM_USERFAULT, in a bitmap of
 * QEMU's.  Neither was merged, and their numbers collide with others, so only
 * the functions of this header use them.
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
     * @offset is the byte in @rb that the guest touched.  It is a hint, of
     * which only the target page is exact.
     *
     * Returns 1 if the page has been placed, 0 to enter the guest again without
     * it; negative, after reporting an error, to stop the VM.
     */
    int (*fault)(CPUState *cpu, RAMBlock *rb, ram_addr_t offset);

    /**
     * @kick: @cpu is to leave KVM_RUN.  Called in any thread, after the signal
     * has been sent.  @fault must return soon after the kick.
     */
    void (*kick)(CPUState *cpu);

    /**
     * @missing: set the bits of @rb's pages that are missing, one bit for each
     * page of the host, in @bitmap, which is clear.  Called before the guest
     * runs, under RCU.
     *
     * Returns false if no page of @rb is missing.
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
 * @ops must stay valid indefinitely: a vCPU that has already left KVM_RUN may
 * call one of them after kvm_exit_on_missing_disable().
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
 * kvm_exit_on_missing_placed: @size bytes at @offset of @rb have been placed
 *
 * Both are multiples of the host's page size.  Call it after placing the pages
 * and before waking vCPUs that wait for them.  Needs no lock.
 */
void kvm_exit_on_missing_placed(RAMBlock *rb, ram_addr_t offset, size_t size);

/**
 * kvm_exit_on_missing_forget: pages that are still missing will not be placed
 *
 * With a bitmap, a vCPU that touches such a page makes no exit any more.  It
 * waits in userfaultfd until the memory is unregistered.  Needs no lock.
 */
void kvm_exit_on_missing_forget(void);

/*
 * Call sites in accel/kvm/
 */

/* The flag for kvm_mem_flags(), of either interface, or 0 */
int kvm_exit_on_missing_flag(MemoryRegion *mr);

/*
 * Set the bitmap of @mem, the region of @slot.  If @slot has none, clear @mem's
 * flag.  Returns whether KVM_SET_USER_MEMORY_REGION2 is needed.
 */
bool kvm_exit_on_missing_region(const struct KVMSlot *slot,
                                struct kvm_userspace_memory_region2 *mem);

/* Set the thread kick of @cpu; the accelerator's kick_vcpu_thread */
void kvm_exit_on_missing_kick(CPUState *cpu);

/*
 * Serve KVM_EXIT_MEMORY_FAULT.  Returns false if the exit is not for missing
 * memory (a conversion of private memory); otherwise *@ret is the result.
 */
bool kvm_exit_on_missing_handle(CPUState *cpu, struct kvm_run *run,
                                MemTxAttrs attrs, int *ret);

/*
 * Call sites in accel/tcg/: in builds for tests, vCPUs of TCG serve the same
 * exit, so that real threads run the code behind it at the host's speed where
 * no KVM has it.  vCPUs look in KVM Userfault's bitmaps when they fill their
 * TLB.  All other accesses to memory fault by userfaultfd, as always.
 */
#ifdef CONFIG_MIGRATION_INJECT

/*
 * The TLB has an entry for @addr, which no access has used.  Returns when
 * @addr + @addend may be accessed, or leaves cpu_exec() if @cpu is kicked
 * meanwhile.  With @probe it stays: then the access waits in userfaultfd.
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
