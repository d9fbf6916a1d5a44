/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Of the kernel interfaces what the headers of the build machine may lack; see docs/kernel.md. */
#ifndef KVM_ABI_H
#define KVM_ABI_H

#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <sys/mman.h>

#define ABI_MEM_EXIT_ON_MISSING (1u << 3)
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
