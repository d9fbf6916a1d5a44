/* SPDX-License-Identifier: GPL-2.0-or-later */
/* KVM's async page faults, see Linux's Documentation/virt/kvm/x86/msr.rst. */
#ifndef ASYNC_H
#define ASYNC_H

#include <stdint.h>
#include "arch.h"

/* Parameter `async` */
#define ASYNC_KERNEL        1   /* the kernel misses pages, its tasks do not */
#define ASYNC_ANEW          2   /* move the data block while tasks wait */
#define ASYNC_SMM           4   /* an SMI handler misses a page, too */
#define ASYNC_NESTED        8   /* nested.c: on while the nested guest faults */
#define ASYNC_REFUSED       16  /* move it to a device while tasks wait */

#define MSR_ASYNC_PF_EN     0x4b564d02
#define MSR_ASYNC_PF_INT    0x4b564d06
#define MSR_ASYNC_PF_ACK    0x4b564d07
#define EN_ENABLED          1
#define EN_BY_INTERRUPT     8
#define WAKE_ALL            0xffffffff
#define ASYNC_VECTOR        0x40

struct async_data {
    volatile uint32_t flags, token;
    uint8_t reserved[56];
};

static inline void async_enable(const struct async_data *data)
{
    wrmsr(MSR_ASYNC_PF_INT, ASYNC_VECTOR);
    wrmsr(MSR_ASYNC_PF_EN, (uintptr_t)data | EN_ENABLED | EN_BY_INTERRUPT);
}

#endif
