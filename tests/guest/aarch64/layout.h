/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Guest physical addresses of machine virt, used by assembly, C and the linker script */
#ifndef LAYOUT_H
#define LAYOUT_H

#define ROM_START   0               /* flash, where all processors start */
#define ROM_SIZE    0x10000
#define GICD        0x08000000
#define GICR        0x080a0000
#define UART        0x09000000
#define FW_CFG      0x09020000
#define RAM_START   0x40000000      /* QEMU's device tree, 1 MiB */
#define RAM_MOST    0x4000000000
#define LOAD_ADDR   0x40200000      /* see memory_layout() for what follows */
#define STACK_SIZE  4096
#define MAX_CPUS    64

#endif
