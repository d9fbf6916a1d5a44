/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <string.h>
#include <sys/ioctl.h>

#include "arch.h"
#include "fail.h"

/* RDI address, RSI stride, RCX count, R8 samples; the byte 0x5a is TOUCHED. */
asm(".pushsection .rodata\n"
    ".globl guest_program, guest_program_end\n"
    "guest_program:\n"
    "1:  rdtsc\n"
    "    shl $32, %rdx\n"
    "    lea (%rdx, %rax), %r9\n"
    "    movb $0x5a, (%rdi)\n"
    "    rdtsc\n"
    "    shl $32, %rdx\n"
    "    add %rdx, %rax\n"
    "    sub %r9, %rax\n"
    "    mov %rax, (%r8)\n"
    "    add $8, %r8\n"
    "    add %rsi, %rdi\n"
    "    dec %rcx\n"
    "    jnz 1b\n"
    "    hlt\n"
    "guest_program_end:\n"
    ".popsection\n");

enum { PRESENT = 1, WRITABLE = 2, ACCESSED = 0x20, DIRTY = 0x40, LARGE = 0x80 };

void arch_make_tables(void *tables, uint64_t gpa)
{
    uint64_t *top = tables, *second = top + 512;

    top[0] = (gpa + 0x1000) | PRESENT | WRITABLE | ACCESSED;
    for (uint64_t i = 0; i < 512; i++) {
        second[i] = i << 30 | PRESENT | WRITABLE | ACCESSED | DIRTY | LARGE;
    }
}

static void set_cpuid(int kvm, int vcpu)
{
    enum { ENTRIES = 256 };
    struct kvm_cpuid2 *cpuid = calloc(1, sizeof(*cpuid) + ENTRIES * sizeof(cpuid->entries[0]));
    bool gigabytes = false;

    cpuid->nent = ENTRIES;
    if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid) || ioctl(vcpu, KVM_SET_CPUID2, cpuid)) {
        fail("CPUID: %m");
    }
    for (unsigned i = 0; i < cpuid->nent; i++) {
        gigabytes |= cpuid->entries[i].function == 0x80000001 && cpuid->entries[i].edx & 1u << 26;
    }
    if (!gigabytes) {
        fail("this processor has no pages of 1 GiB");
    }
    free(cpuid);
}

void arch_start_vcpu(int kvm, int vm, int vcpu, uint64_t program, uint64_t tables, const struct guest_job *job)
{
    enum { CR0_PE = 1, CR0_ET = 0x10, CR0_NE = 0x20, CR4_PAE = 0x20, EFER_LME = 0x100, EFER_LMA = 0x400 };
    struct kvm_segment data = { .selector = 16, .limit = ~0u, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1 };
    struct kvm_segment code = { .selector = 8, .limit = ~0u, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1 };
    struct kvm_regs regs = {
        .rip = program, .rflags = 2, .rdi = job->address, .rsi = job->stride, .rcx = job->count, .r8 = job->samples,
    };
    struct kvm_sregs sregs;

    (void)vm;
    set_cpuid(kvm, vcpu);
    if (ioctl(vcpu, KVM_GET_SREGS, &sregs)) {
        fail("KVM_GET_SREGS: %m");
    }
    sregs.cs = code;
    sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = data;
    sregs.cr0 = CR0_PE | CR0_ET | CR0_NE | 1u << 31;
    sregs.cr3 = tables;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
    if (ioctl(vcpu, KVM_SET_SREGS, &sregs) || ioctl(vcpu, KVM_SET_REGS, &regs)) {
        fail("a vCPU's registers: %m");
    }
}

bool arch_is_done(const struct kvm_run *run)
{
    return run->exit_reason == KVM_EXIT_HLT;
}

double arch_ticks_per_us(int vcpu)
{
    int khz = ioctl(vcpu, KVM_GET_TSC_KHZ, 0);

    if (khz <= 0) {
        fail("KVM_GET_TSC_KHZ: %m");
    }
    return khz / 1000.0;
}
