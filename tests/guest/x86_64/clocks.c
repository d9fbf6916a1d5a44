/* SPDX-License-Identifier: GPL-2.0-or-later */
/* TSC and kvmclock, and a timer of the local APIC that hangs on the TSC. */
#include "clock.h"
#include "touch.h"

#define MSR_TSC_ADJUST          0x3b
#define MSR_TSC_DEADLINE        0x6e0
#define MSR_KVM_SYSTEM_TIME     0x4b564d01
#define LAPIC_LVT_TIMER         0x320
#define LVT_TSC_DEADLINE        0x40000
#define VECTOR                  32
#define GUEST_STOPPED           2

struct pvclock pv_pages[MAX_CPUS];

/* Of processor 0's timer, for processor 0 alone */
static uint64_t deadline, tsc_khz;

void start_clocks(uint32_t cpu)
{
    if (cpu == 1 && par.adjust) {
        wrmsr(MSR_TSC_ADJUST, par.adjust);
    }
    wrmsr(MSR_KVM_SYSTEM_TIME, (uintptr_t)&pv_pages[cpu] | 1);
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

/* Let a timer of the local APIC expire. */
void start_timers(uint32_t cpu, uint64_t khz)
{
    if (cpu || !par.deadline_ms) {
        return;
    }
    tsc_khz = khz;
    deadline = ticks() + par.deadline_ms * khz;
    *(volatile uint32_t *)(uintptr_t)(LAPIC + LAPIC_LVT_TIMER)
        = LVT_TSC_DEADLINE | VECTOR;
    asm volatile("mfence" : : : "memory");
    wrmsr(MSR_TSC_DEADLINE, deadline);
}

void report_timers(uint32_t cpu)
{
    if (!cpu && deadline && !rdmsr(MSR_TSC_DEADLINE)) {
        print("{\"event\": \"deadline\", \"deadline\": %u, \"tsc\": %u, "
              "\"khz\": %u}\n", deadline, ticks(), tsc_khz);
        deadline = 0;
    }
}
