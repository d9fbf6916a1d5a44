/* SPDX-License-Identifier: GPL-2.0-or-later */
/* TSC and kvmclock, and a timer of the local APIC that follows the TSC. */
#include "clock.h"
#include "touch.h"

#define MSR_TSC_ADJUST          0x3b
#define MSR_TSC_DEADLINE        0x6e0
#define MSR_KVM_SYSTEM_TIME     0x4b564d01
#define LAPIC_LVT_TIMER         0x320
#define LVT_TSC_DEADLINE        0x40000
#define VECTOR                  32
#define GUEST_STOPPED           2
#define VMCLOCK                 0xfeffb000
#define VMCLOCK_WORDS           13

struct pvclock pv_pages[MAX_CPUS];

/* The timer of processor 0, which only processor 0 uses */
static uint64_t deadline;

void start_clocks(uint32_t cpu)
{
    if (cpu == 1 && par.adjust) {
        wrmsr(MSR_TSC_ADJUST, par.adjust);
    }
    wrmsr(MSR_KVM_SYSTEM_TIME, (uintptr_t)&pv_pages[cpu] | 1);
    barrier();
    if (cpu == 0 && par.deadline_ms) {
        deadline = ticks() + par.deadline_ms * khz;
        LAPIC_REG(LAPIC_LVT_TIMER) = LVT_TSC_DEADLINE | VECTOR;
        asm volatile("mfence" : : : "memory");
        wrmsr(MSR_TSC_DEADLINE, deadline);
    }
}

struct reading read_clocks(uint32_t cpu)
{
    const struct pvclock *pv = &pv_pages[cpu];
    struct reading r;
    uint32_t version;

    do {
        uint64_t passed;

        version = pv->version;
        asm volatile("" : : : "memory");
        r.clock[0] = ticks();
        passed = r.clock[0] - pv->tsc_timestamp;
        passed = pv->shift < 0 ? passed >> -pv->shift : passed << pv->shift;
        r.clock[1] = pv->system_time
                     + (uint64_t)((unsigned __int128)passed * pv->mul >> 32);
        asm volatile("" : : : "memory");
    } while (version & 1 || version != pv->version);
    return r;
}

void have_reported(uint32_t cpu)
{
    pv_pages[cpu].flags &= ~GUEST_STOPPED;
}

/* The device's page, of which the upper half of word 1 counts the changes */
static void report_vmclock(uint32_t move)
{
    static uint64_t reported;
    const volatile uint64_t *page = (void *)(uintptr_t)VMCLOCK;
    uint64_t w[VMCLOCK_WORDS], changes, tsc;

    if (ticks() - reported < 1000000000) {
        return;
    }
    do {
        changes = page[1] >> 32;
        for (int i = 0; i < VMCLOCK_WORDS; i++) {
            w[i] = page[i];
        }
        tsc = ticks();
    } while (changes & 1 || changes != page[1] >> 32);
    report("'vmclock', 'move': %u, 'tsc': %u, 'page': [%u, %u, %u, %u, %u, "
           "%u, %u, %u, %u, %u, %u, %u, %u]", (uint64_t)move, tsc, w[0], w[1],
           w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12]);
    reported = ticks();
}

void report_timers(uint32_t cpu, uint32_t move)
{
    if (!cpu && par.vmclock) {
        report_vmclock(move);
    }
    if (!cpu && deadline && !rdmsr(MSR_TSC_DEADLINE)) {
        report("'deadline', 'deadline': %u, 'tsc': %u, 'khz': %u",
               deadline, ticks(), khz);
        deadline = 0;
    }
}
