/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Entered from the ROM, with MMU and caches on; x0: the processor's number. */
#include "layout.h"

        .section .entry, "ax"
        .globl  start
start:
        adrp    x1, level1              /* tables in RAM, which a guest has */
        add     x1, x1, :lo12:level1
        msr     ttbr0_el1, x1
        isb
        tlbi    vmalle1
        dsb     nsh
        isb
        adr     x1, vectors
        msr     vbar_el1, x1
        isb

        cbnz    x0, 2f
        ldr     x1, =bss_start
        ldr     x2, =image_end
1:      str     xzr, [x1], #8
        cmp     x1, x2
        b.lo    1b
2:      ldr     x1, =stacks
        add     x2, x0, #1
        mov     x3, #STACK_SIZE
        madd    x1, x2, x3, x1
        mov     sp, x1
        ldr     x1, =cpus_started
        mov     w2, #1
        staddl  w2, [x1]
        bl      cpu_main

        .ltorg

        .balign 2048
vectors:
        .rept   5
        b       exception
        .balign 128
        .endr
        b       enter_interrupt         /* IRQ from EL1 */
        .balign 128
        .rept   10
        b       exception
        .balign 128
        .endr

        .macro  caller_saved op
        \op     x0, x1, [sp]
        \op     x2, x3, [sp, #16]
        \op     x4, x5, [sp, #32]
        \op     x6, x7, [sp, #48]
        \op     x8, x9, [sp, #64]
        \op     x10, x11, [sp, #80]
        \op     x12, x13, [sp, #96]
        \op     x14, x15, [sp, #112]
        \op     x16, x17, [sp, #128]
        \op     x18, x30, [sp, #144]
        .endm

enter_interrupt:
        sub     sp, sp, #160
        caller_saved stp
        bl      interrupt
        caller_saved ldp
        add     sp, sp, #160
        eret

        .data
#include "tables.S"

        .bss
        .balign 16
stacks: .skip   MAX_CPUS * STACK_SIZE
        .globl  cpus_started
cpus_started:
        .skip   4

        .section .note.GNU-stack, "", @progbits
