/*
 * KVM exits on missing memory
 *
 * A memslot with KVM_MEM_EXIT_ON_MISSING makes KVM_RUN return to its vCPU
 * thread where the stage-2 fault handler would have had to fault in the
 * userspace mapping.  It adds to userfaultfd and does not replace it: KVM's
 * own accesses, vhost and QEMU's threads still fault in the usual way.
 *
 * The kernel interface was never merged and its numbers collide with others,
 * so they stay behind the functions of this header.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef SYSTEM_KVM_EXIT_ON_MISSING_H
#define SYSTEM_KVM_EXIT_ON_MISSING_H

#include "exec/memattrs.h"
#include "exec/hwaddr.h"

struct kvm_run;

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
} KVMMissingOps;

/**
 * kvm_exit_on_missing_available: whether the host has the feature
 *
 * The first call makes a scratch VM whose vCPU touches a missing page of a
 * flagged memslot: only the exit proves the feature, since the capability
 * number (236) and the flag (bit 3) mean something else to other kernels.
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

/** kvm_exit_on_missing_disable: clear the flags.  Needs no lock. */
void kvm_exit_on_missing_disable(void);

/*
 * Call sites in accel/kvm/
 */

/* The flag for kvm_mem_flags(): KVM_MEM_EXIT_ON_MISSING or 0 */
int kvm_exit_on_missing_flag(MemoryRegion *mr);

/* Set the thread kick of @cpu; the accelerator's kick_vcpu_thread */
void kvm_exit_on_missing_kick(CPUState *cpu);

/*
 * Serve KVM_EXIT_MEMORY_FAULT.  Returns false if it is none of ours (a
 * conversion of private memory); otherwise *@ret is the result.
 */
bool kvm_exit_on_missing_handle(CPUState *cpu, struct kvm_run *run,
                                MemTxAttrs attrs, int *ret);

#endif
