/*
 * KVM Userfault: which pages are missing, for KVM to read
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bitmap.h"
#include "qemu/rcu.h"
#include "exec/cpu-common.h"
#include "exec/ram_addr.h"
#include "exec/ramblock.h"
#include "userfault.h"

/* Bits of a long, also of a 64-bit kernel below a 32-bit QEMU */
#define USERFAULT_WORD 64

/*
 * RAMBlock::userfault_bmap is set before vCPUs run and pages are placed.  It is
 * cleared after the last page was placed, under RCU, since a block may be
 * unplugged meanwhile.
 */

static size_t userfault_pages(RAMBlock *rb)
{
    return rb->max_length / qemu_real_host_page_size();
}

void kvm_userfault_start(const KVMMissingOps *ops)
{
    RAMBlock *rb;

    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH(rb) {
        unsigned long *bitmap = bitmap_new(userfault_pages(rb));

        if (!ops->missing(rb, bitmap)) {
            g_free(bitmap);
            continue;
        }
        qatomic_set(&rb->userfault_bmap, bitmap);
    }
}

void kvm_exit_on_missing_forget(void)
{
    RAMBlock *rb;

    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH(rb) {
        unsigned long *bitmap = qatomic_read(&rb->userfault_bmap);

        if (bitmap) {
            bitmap_test_and_clear_atomic(bitmap, 0, userfault_pages(rb));
        }
    }
}

void kvm_userfault_stop(void)
{
    RAMBlock *rb;

    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH(rb) {
        g_free(qatomic_xchg(&rb->userfault_bmap, NULL));
    }
}

void kvm_exit_on_missing_placed(RAMBlock *rb, ram_addr_t offset, size_t size)
{
    unsigned long *bitmap = qatomic_read(&rb->userfault_bmap);

    /*
     * An atomic operation orders this after the placement of the page, as KVM
     * requires: it reads the bit first, and the page's mapping after that.
     */
    if (bitmap) {
        bitmap_test_and_clear_atomic(bitmap,
                                     offset / qemu_real_host_page_size(),
                                     size / qemu_real_host_page_size());
    }
}

bool kvm_userfault_slot(const KVMSlot *slot,
                        struct kvm_userspace_memory_region2 *mem)
{
    ram_addr_t offset;
    RAMBlock *rb;
    size_t page;

    RCU_READ_LOCK_GUARD();
    rb = qemu_ram_block_from_host(slot->ram, false, &offset);
    if (!rb || !rb->userfault_bmap) {
        return false;
    }
    page = offset / qemu_real_host_page_size();
    if (page % USERFAULT_WORD) {
        return false;
    }
    kvm_userfault_set_bitmap(mem, rb->userfault_bmap + page / BITS_PER_LONG);
    return true;
}
