/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Page tables of 4 KiB granule: 512 GiB identity mapped. The first GiB is flash
 * (2 MiB blocks up to GICD) and devices, the rest is memory.
 */
#define MEMORY  0x701               /* block, inner shareable, accessed, MAIR 0 */
#define DEVICE  0x60000000000405    /* block, accessed, MAIR 1, not to execute */

        .balign 4096
level1: .quad   level2 + 3
        .set    address, 0x40000000
        .rept   511
        .quad   address + MEMORY
        .set    address, address + 0x40000000
        .endr
level2: .set    address, 0
        .rept   GICD / 0x200000
        .quad   address + MEMORY
        .set    address, address + 0x200000
        .endr
        .rept   (0x40000000 - GICD) / 0x200000
        .quad   address + DEVICE
        .set    address, address + 0x200000
        .endr
