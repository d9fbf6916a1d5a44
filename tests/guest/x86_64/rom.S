/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The 64 KiB image given to QEMU with -bios. It starts at the reset vector,
 * enters protected mode, copies the payload to RAM at 1 MiB and jumps to it.
 * There is no other firmware.
 */
#include "layout.h"

        .section .rom, "ax"
        .code16
start16:
        cli
        cld
        lgdtl   %cs:(gdt_ptr - start16)
        movl    %cr0, %eax
        andl    $~0x60000000, %eax      /* caches on: CD and NW off */
        orl     $1, %eax
        movl    %eax, %cr0
        ljmpl   $8, $start32

        .code32
start32:
        movw    $16, %ax
        movw    %ax, %ds
        movw    %ax, %es
        movw    %ax, %ss
        inb     $0x92, %al              /* A20 on */
        orb     $2, %al
        outb    %al, $0x92
        movl    $payload, %esi
        movl    $LOAD_ADDR, %edi
        movl    $payload_size, %ecx
        rep movsb
        movl    $LOAD_ADDR, %eax
        jmp     *%eax

        .balign 8
gdt:    .quad   0
        .quad   0x00cf9b000000ffff      /* 08: 32-bit code */
        .quad   0x00cf93000000ffff      /* 10: data */
gdt_ptr:
        .word   . - gdt - 1
        .long   gdt

        .section .reset, "ax"
        .code16
        .byte   0xe9                    /* jmp start16, which has offset 0 */
        .word   0x10000 - 0xfff3
        .balign 16

        .section .note.GNU-stack, "", @progbits
