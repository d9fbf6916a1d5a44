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

struct pvclock pv_pages[MAX_CPUS];

/* Written by QEMU; the layout is the guest's interface. */
struct vmclock {
    uint32_t magic, size;
    uint16_t version;
    uint8_t counter_id, time_type;
    uint32_t seq_count;
    uint64_t disruption_marker, flags;
    uint8_t pad[2], clock_status, leap_second_smearing_hint;
    uint16_t tai_offset_sec;
    uint8_t leap_indicator, counter_period_shift;
    uint64_t counter_value, counter_period_frac_sec;
    uint64_t counter_period_esterror_rate, counter_period_maxerror_rate;
    uint64_t time_sec, time_frac_sec;
    uint64_t time_esterror_nanosec, time_maxerror_nanosec;
};

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
        *(volatile uint32_t *)(uintptr_t)(LAPIC + LAPIC_LVT_TIMER)
            = LVT_TSC_DEADLINE | VECTOR;
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

/* The device's time of day when the TSC is @tsc, by its specification. */
static uint64_t vmclock_ns(const struct vmclock *clk, uint64_t tsc)
{
    unsigned __int128 passed = (unsigned __int128)(tsc - clk->counter_value)
        * clk->counter_period_frac_sec >> clk->counter_period_shift;

    passed += clk->time_frac_sec;
    return (clk->time_sec + (uint64_t)(passed >> 64)) * 1000000000
        + (uint64_t)((unsigned __int128)(uint64_t)passed * 1000000000 >> 64);
}

static void report_vmclock(uint32_t move)
{
    static uint64_t reported;
    volatile struct vmclock *page = (void *)(uintptr_t)VMCLOCK;
    struct vmclock clk;
    uint64_t tsc;

    if (ticks() - reported < 1000000000) {
        return;
    }
    do {
        clk = *(struct vmclock *)page;
        asm volatile("" : : : "memory");
        tsc = ticks();
        asm volatile("" : : : "memory");
    } while (clk.seq_count & 1 || clk.seq_count != page->seq_count);
    report("'vmclock', 'tsc': %u, 'ns': %u, 'magic': %u, 'counter_id': %u, "
           "'time_type': %u, 'status': %u, 'flags': %u, 'maxerror': %u, "
           "'marker': %u, 'move': %u",
           tsc, vmclock_ns(&clk, tsc), (uint64_t)clk.magic,
           (uint64_t)clk.counter_id, (uint64_t)clk.time_type,
           (uint64_t)clk.clock_status, clk.flags, clk.time_maxerror_nanosec,
           clk.disruption_marker, (uint64_t)move);
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
