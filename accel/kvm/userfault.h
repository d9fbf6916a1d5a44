/*
 * KVM Userfault: which pages are missing, for KVM to read
 *
 * With KVM_MEM_USERFAULT, a memslot has a bitmap in userspace: KVM_RUN returns
 * for a page whose bit is set, without a look at the page.  A page that is
 * present never exits, however the host maps it.
 *
 * A RAMBlock has one bitmap, with a bit for each page of the host; the memslots
 * that map parts of the block point into it.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef ACCEL_KVM_USERFAULT_H
#define ACCEL_KVM_USERFAULT_H

#include "system/kvm_int.h"
#include "system/kvm-exit-on-missing.h"

/*
 * "KVM: Introduce KVM Userfault", v3, 2025-06-18.  Not in linux-headers, since
 * Linux does not have it.  The flag is that of KVM_MEM_EXIT_ON_MISSING, but for
 * KVM_SET_USER_MEMORY_REGION2, whose first word of padding contains the address
 * of the bitmap.
 */
#define KVM_MEM_USERFAULT (1UL << 3)
#define KVM_MEMORY_EXIT_FLAG_USERFAULT (1ULL << 4)

static inline void
kvm_userfault_set_bitmap(struct kvm_userspace_memory_region2 *mem,
                         const unsigned long *bitmap)
{
    mem->pad2[0] = (uintptr_t)bitmap;
}

/**
 * kvm_userfault_start: give each RAMBlock with missing pages a bitmap of them
 *
 * Called before the guest runs, and before pages are placed.
 */
void kvm_userfault_start(const KVMMissingOps *ops);

/**
 * kvm_userfault_stop: free the bitmaps
 *
 * Called when no memslot has the flag and no page is placed any more.
 */
void kvm_userfault_stop(void);

/**
 * kvm_userfault_slot: set the bitmap in @mem, which is for @slot
 *
 * Returns false if @slot cannot have one: KVM reads the bitmap from the start
 * of a 64-bit word, so the part of the block that @slot maps has to begin with
 * one.
 */
bool kvm_userfault_slot(const KVMSlot *slot,
                        struct kvm_userspace_memory_region2 *mem);

#endif
