/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Of the kernel interfaces what the headers of the build machine may lack; see docs/kernel.md. */
#ifndef KVM_ABI_H
#define KVM_ABI_H

#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <sys/mman.h>

#define ABI_MEM_EXIT_ON_MISSING (1u << 3)
#define ABI_MEM_USERFAULT (1u << 3)

struct abi_region2 {
    uint32_t slot, flags;
    uint64_t gpa, size, hva, gmem_offset;
    uint32_t gmem_fd, padding1;
    uint64_t userfault_bitmap, padding2[13];
};
#define ABI_SET_REGION2 _IOW(KVMIO, 0x49, struct abi_region2)

#define ABI_EXIT_MEMORY_FAULT 39

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

#endif
