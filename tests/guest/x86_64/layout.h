/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Guest physical addresses, used by assembly, C and the linker script */
#ifndef LAYOUT_H
#define LAYOUT_H

#define ROM_START   0xffff0000
#define ROM_SIZE    0x10000
#define AP_ADDR     0x8000          /* where application processors start */
#define SMI_ADDR    0x38000         /* of the handler: SMBASE 0x30000 + 0x8000 */
#define LOAD_ADDR   0x100000        /* see memory_layout() for what follows */
#define RAM_START   0
#define RAM_MOST    0x80000000      /* q35 and pc: all of it below 4 GiB */
#define LAPIC       0xfee00000
#define STACK_SIZE  4096
#define MAX_CPUS    64

#endif
