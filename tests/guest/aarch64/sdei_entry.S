/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Code that calls SDEI, or is interrupted, with known values in registers. */
#define COMPLETE            0xc4000025
#define COMPLETE_AND_RESUME 0xc4000026
#define FLAGS               0xa0000000      /* flags N and C */
#define PATTERN             0x5de10000

        .text

/* The handler of all events; passes x0 to x3 of SDEI on to sdei_handler() */
        .globl  sdei_entry
sdei_entry:
        stp     x29, x30, [sp, #-32]!
        str     x18, [sp, #16]
        bl      sdei_handler            /* returns where to resume, or 0 */
        ldr     x18, [sp, #16]
        ldp     x29, x30, [sp], #32
        mov     x1, x0
        ldr     x0, =COMPLETE
        cbz     x1, 1f
        ldr     x0, =COMPLETE_AND_RESUME
1:      hvc     #0
        b       exception               /* the call has returned */

/*
 * As an exception vector: store the registers of an exception in resumed[], and
 * return to the interrupted code.
 */
        .globl  sdei_resume
sdei_resume:
        stp     x0, x1, [sp, #-16]!
        ldr     x0, =resumed
        mrs     x1, elr_el1
        str     x1, [x0]
        mrs     x1, spsr_el1
        str     x1, [x0, #8]
        mrs     x1, daif
        str     x1, [x0, #16]
        mrs     x1, spsel
        str     x1, [x0, #24]
        ldp     x0, x1, [sp], #16
        eret

/*
 * void sdei_interrupted(x0, x1, x2, const volatile uint32_t *until, uint64_t *out)
 *
 * Call x0, unless it is 0, with x1 and x2 and known values in x3 to x17 and the
 * flags. Wait until *until is not 0; then store x0 to x17 and the flags.
 */
        .globl  sdei_interrupted, sdei_loop, sdei_loop_end
sdei_interrupted:
        stp     x19, x20, [sp, #-32]!
        stp     x21, x22, [sp, #16]
        mov     x19, x3
        mov     x20, x4
        ldr     x21, =FLAGS
        msr     nzcv, x21
        ldr     x3, =PATTERN
        .irp    n, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17
        add     x\n, x3, #\n
        .endr
        add     x3, x3, #3
        cbz     x0, sdei_loop
        hvc     #0
sdei_loop:
        ldr     w22, [x19]
        cbz     w22, sdei_loop
sdei_loop_end:
        stp     x0, x1, [x20]
        stp     x2, x3, [x20, #16]
        stp     x4, x5, [x20, #32]
        stp     x6, x7, [x20, #48]
        stp     x8, x9, [x20, #64]
        stp     x10, x11, [x20, #80]
        stp     x12, x13, [x20, #96]
        stp     x14, x15, [x20, #112]
        stp     x16, x17, [x20, #128]
        mrs     x22, nzcv
        str     x22, [x20, #144]
        ldp     x21, x22, [sp, #16]
        ldp     x19, x20, [sp], #32
        ret

        .ltorg

        .section .note.GNU-stack, "", @progbits
