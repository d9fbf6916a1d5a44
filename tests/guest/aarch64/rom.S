/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The 64 KiB image given to QEMU with -bios. All processors start here, the
 * boot processor with x0 = 0. The ROM turns on MMU and caches, with page tables
 * in the ROM, so that no write to memory bypasses the caches. The boot
 * processor copies the payload to RAM and jumps to it; the others only jump.
 */
#include "layout.h"

#define MAIR    0x04ff              /* 0: write-back memory, 1: device nGnRE */
#define TCR     0x200803519         /* 39 bits, write-back, inner shareable, no TTBR1 */
#define SCTLR   0x30d0180d          /* MMU, caches, stack alignment; RES1 */

        .section .rom, "ax"
        adr     x1, level1
        msr     ttbr0_el1, x1
        ldr     x1, =MAIR
        msr     mair_el1, x1
        ldr     x1, =TCR
        msr     tcr_el1, x1
        isb
        tlbi    vmalle1
        ic      iallu
        dsb     nsh
        isb
        ldr     x1, =SCTLR
        msr     sctlr_el1, x1
        isb

        ldr     x9, =LOAD_ADDR
        cbnz    x0, 2f
        adr     x1, payload
        ldr     x2, =payload_size
        add     x2, x1, x2
        mov     x3, x9
1:      ldr     x4, [x1], #8
        str     x4, [x3]
        dc      cvau, x3
        add     x3, x3, #8
        cmp     x1, x2
        b.lo    1b
        dsb     ish
        ic      ialluis
        dsb     ish
        isb
2:      br      x9

        .ltorg
#include "tables.S"

        .section .reset, "a"
        .zero   16                      /* end of the image: no copy begins */

        .section .note.GNU-stack, "", @progbits
