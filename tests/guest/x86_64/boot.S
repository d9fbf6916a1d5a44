/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Leads from 32-bit protected mode (boot processor) or real mode (application
 * processors) to C in long mode; the SMI handler.
 */
#include "layout.h"

        .section .entry, "ax"
        .code32
        .globl  start
start:
        movl    $bss_start, %edi
        movl    $image_end, %ecx
        subl    %edi, %ecx
        xorl    %eax, %eax
        rep stosb

        /* 4 GiB identity map of 2 MiB pages, for ring 3, too */
        movl    $(pdpt + 7), pml4
        movl    $(page_dirs + 7), %eax
        movl    $pdpt, %edi
        movl    $4, %ecx
1:      movl    %eax, (%edi)
        addl    $4096, %eax
        addl    $8, %edi
        loop    1b
        movl    $0x87, %eax             /* present, writable, user, 2 MiB */
        movl    $page_dirs, %edi
        movl    $2048, %ecx
1:      movl    %eax, (%edi)
        addl    $0x200000, %eax
        addl    $8, %edi
        loop    1b

        movl    $ap_start, %esi
        movl    $AP_ADDR, %edi
        movl    $(ap_end - ap_start), %ecx
        rep movsb
        movl    $smi_start, %esi
        movl    $SMI_ADDR, %edi
        movl    $(smi_end - smi_start), %ecx
        rep movsb

/* Every processor gets here in 32-bit protected mode. */
enter_long:
        movl    %cr4, %eax
        orl     $0x20, %eax             /* PAE */
        movl    %eax, %cr4
        movl    $pml4, %eax
        movl    %eax, %cr3
        movl    $0xc0000080, %ecx       /* EFER.LME */
        rdmsr
        orl     $0x100, %eax
        wrmsr
        movl    %cr0, %eax
        andl    $~0x60000000, %eax
        orl     $0x80000001, %eax
        movl    %eax, %cr0
        lgdt    gdt_ptr
        ljmpl   $8, $1f

        .code64
1:      movl    $16, %eax
        movl    %eax, %ds
        movl    %eax, %es
        movl    %eax, %ss
        movl    $1, %edi                /* numbers in order of arrival: */
        lock xaddl %edi, cpus_started   /* the boot processor is 0 */
        cmpl    $MAX_CPUS, %edi
        jae     2f
        movl    %edi, %eax
        incl    %eax
        imull   $STACK_SIZE, %eax
        leaq    stacks(%rax), %rsp
        call    cpu_main
2:      cli
        hlt
        jmp     2b

/* The interrupt that ends a barrier's hlt. */
        .code64
        .globl  wake_interrupt
wake_interrupt:
        pushq   %rax
        movl    $LAPIC + 0xb0, %eax
        movl    $0, (%rax)              /* end of interrupt */
        popq    %rax
        iretq

/* A copy at AP_ADDR runs in real mode with CS = AP_ADDR / 16. */
        .code16
ap_start:
        cli
        lgdtl   %cs:(ap_gdt_ptr - ap_start)
        movl    %cr0, %eax
        orl     $1, %eax
        movl    %eax, %cr0
        ljmpl   $24, $ap_start32
ap_gdt_ptr:
        .word   gdt_end - gdt - 1
        .long   gdt
ap_end:

        .code32
ap_start32:
        movl    $16, %eax
        movl    %eax, %ds
        movl    %eax, %es
        movl    %eax, %ss
        jmp     enter_long

/*
 * A copy at SMI_ADDR adds one to the word at smi_target, then clears
 * smi_target. Segments have base 0 and no limit here.
 */
        .code16
smi_start:
        movl    $smi_target, %ebx
        addr32 movl (%ebx), %eax
        addr32 lock incl (%eax)
        addr32 movl $0, (%ebx)
        rsm
smi_end:

        .data
        .balign 8
        .globl  gdt
gdt:    .quad   0
        .quad   0x00af9b000000ffff      /* 08: 64-bit code */
        .quad   0x00cf93000000ffff      /* 10: data */
        .quad   0x00cf9b000000ffff      /* 18: 32-bit code */
        .quad   0x00cff3000000ffff      /* 20: data of ring 3 */
        .quad   0x00affb000000ffff      /* 28: 64-bit code of ring 3 */
        .quad   0, 0                    /* 30: async.c's task state */
gdt_end:
gdt_ptr:
        .word   gdt_end - gdt - 1
        .quad   gdt

        .bss
        .balign 4096
pml4:   .skip   4096
pdpt:   .skip   4096
page_dirs:
        .skip   4 * 4096
stacks: .skip   MAX_CPUS * STACK_SIZE
        .globl  cpus_started
cpus_started:
        .skip   4
        .globl  smi_target
smi_target:
        .skip   4

        .section .note.GNU-stack, "", @progbits
