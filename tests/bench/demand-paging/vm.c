/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "arch.h"
#include "fail.h"
#include "kvm-abi.h"
#include "vm.h"

#define LOW_GPA 0x100000ul
#define PROGRAM 0x0ul           /* offsets in low memory */
#define TABLES 0x1000ul
#define SAMPLES (TABLES + ARCH_TABLES_SIZE)
#define STATUS_NO_EXITS 2

static void set_slot(int vm, unsigned slot, uint32_t flags, uint64_t gpa, void *memory, size_t size,
                     const unsigned long *bitmap)
{
    struct abi_region2 region = { slot, flags, gpa, size, (uintptr_t)memory, .userfault_bitmap = (uintptr_t)bitmap };

    /* The smaller structure of the older ioctl begins alike. */
    if (!ioctl(vm, bitmap ? ABI_SET_REGION2 : KVM_SET_USER_MEMORY_REGION, &region)) {
        return;
    }
    if ((errno == EINVAL || errno == ENOTTY) && flags) {
        fail_with(STATUS_NO_EXITS, "this kernel's KVM has no %s (memory slot flag 8 is refused: %m)",
                  bitmap ? "KVM_MEM_USERFAULT" : "KVM_MEM_EXIT_ON_MISSING");
    }
    fail("KVM_SET_USER_MEMORY_REGION: %m");
}

struct vm make_vm(const struct memory *m)
{
    struct vm vm = { .kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC) };
    size_t low_size;
    int run_size;

    if (vm.kvm < 0) {
        fail("/dev/kvm: %m");
    }
    vm.fd = ioctl(vm.kvm, KVM_CREATE_VM, 0);
    run_size = ioctl(vm.kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    if (vm.fd < 0 || run_size < 0) {
        fail("KVM_CREATE_VM: %m");
    }
    vm.run_size = run_size;
    vm.samples_per_vcpu = m->options->bytes_per_vcpu / m->page_size;
    low_size = SAMPLES + m->options->vcpus * vm.samples_per_vcpu * sizeof(uint64_t);
    low_size = (low_size + 0xffff) & ~0xfffful;
    if (LOW_GPA + low_size > 2ul << 30 || TEST_GPA + m->size > ARCH_ADDRESSES) {
        fail("this is too much memory for the guest's addresses");
    }
    vm.low = mmap(NULL, low_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (vm.low == MAP_FAILED) {
        fail("cannot map %zu MiB: %m", low_size >> 20);
    }
    memcpy(vm.low + PROGRAM, guest_program, guest_program_end - guest_program);
    arch_make_tables(vm.low + TABLES, LOW_GPA + TABLES);
    set_slot(vm.fd, 0, 0, LOW_GPA, vm.low, low_size, NULL);
    /* The same bit */
    set_slot(vm.fd, 1, m->options->exits ? ABI_MEM_EXIT_ON_MISSING : 0, TEST_GPA, m->guest, m->size, m->bitmap);
    return vm;
}

static size_t samples_offset(const struct vm *vm, unsigned vcpu)
{
    return SAMPLES + vcpu * vm->samples_per_vcpu * sizeof(uint64_t);
}

int make_vcpu(const struct vm *vm, const struct memory *m, unsigned number)
{
    const struct options *o = m->options;
    /* Byte n of each page is vCPU n's. */
    struct guest_job job = {
        .address = TEST_GPA + (o->shared ? 0 : number * o->bytes_per_vcpu) + number,
        .stride = m->page_size,
        .count = vm->samples_per_vcpu,
        .samples = LOW_GPA + samples_offset(vm, number),
    };
    int vcpu = ioctl(vm->fd, KVM_CREATE_VCPU, number);

    if (vcpu < 0) {
        fail("KVM_CREATE_VCPU %u: %m", number);
    }
    arch_start_vcpu(vm->kvm, vm->fd, vcpu, LOW_GPA + PROGRAM, LOW_GPA + TABLES, &job);
    return vcpu;
}

const uint64_t *samples_of(const struct vm *vm, unsigned vcpu)
{
    return (const uint64_t *)(vm->low + samples_offset(vm, vcpu));
}
