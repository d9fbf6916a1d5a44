/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that reads its clocks without end: TSC and kvmclock on every
 * processor. After each move to another QEMU, and every second, each processor
 * reports how far its clocks stepped at most since the last move, whether one
 * ever went backwards, and what KVM tells it of the kvmclock.
 */
#include "touch.h"

#define MSR_TSC_ADJUST          0x3b
#define MSR_TSC_DEADLINE        0x6e0
#define MSR_KVM_SYSTEM_TIME     0x4b564d01
#define LAPIC_LVT_TIMER         0x320
#define LVT_TSC_DEADLINE        0x40000
#define VECTOR                  32
#define GUEST_STOPPED           2

/* What KVM writes; the layout is the guest's interface. */
struct pvclock {
    volatile uint32_t version;
    uint32_t pad;
    uint64_t tsc_timestamp;
    uint64_t system_time;
    uint32_t mul;
    int8_t shift;
    uint8_t flags;
    uint8_t pad2[2];
} __attribute__((aligned(64)));

struct reading {
    uint64_t tsc, clock;
};

static struct pvclock pv_pages[MAX_CPUS];
static uint32_t moves;          /* written by processor 0 */
static uint32_t reports;

static uint64_t rdmsr(uint32_t msr)
{
    uint32_t lo, hi;
    asm volatile("rdmsr" : "=a"(lo), "=d"(hi) : "c"(msr));
    return (uint64_t)hi << 32 | lo;
}

static void wrmsr(uint32_t msr, uint64_t value)
{
    asm volatile("wrmsr" : : "c"(msr), "a"((uint32_t)value),
                 "d"((uint32_t)(value >> 32)) : "memory");
}

static struct reading read_clocks(const struct pvclock *pv)
{
    struct reading r;
    uint32_t version;

    do {
        uint64_t passed;

        version = pv->version;
        asm volatile("" : : : "memory");
        r.tsc = ticks();
        passed = r.tsc - pv->tsc_timestamp;
        passed = pv->shift < 0 ? passed >> -pv->shift : passed << pv->shift;
        r.clock = pv->system_time
                  + (uint64_t)((unsigned __int128)passed * pv->mul >> 32);
        asm volatile("" : : : "memory");
    } while (version & 1 || version != pv->version);
    return r;
}

/* How far *last is behind; keep the later one of both. */
static uint64_t behind(uint64_t *last, uint64_t now)
{
    uint64_t back = now < *last ? *last - now : 0;

    *last = now;
    return back;
}

static void keep_most(uint64_t *most, uint64_t value)
{
    *most = value > *most ? value : *most;
}

/* Let a timer of the local APIC expire in so many milliseconds. */
static uint64_t set_deadline(uint64_t khz)
{
    uint64_t deadline = ticks() + par.deadline_ms * khz;

    *(volatile uint32_t *)(uintptr_t)(LAPIC + LAPIC_LVT_TIMER)
        = LVT_TSC_DEADLINE | VECTOR;
    asm volatile("mfence" : : : "memory");
    wrmsr(MSR_TSC_DEADLINE, deadline);
    return deadline;
}

_Noreturn void cpu_main(uint32_t cpu)
{
    static struct reading all;          /* the last ones of all processors */
    static bool busy;                   /* protects them */
    static uint64_t khz;
    struct pvclock *pv = &pv_pages[cpu];
    uint8_t here = side();
    uint32_t reported = ~0u;            /* moves */
    uint64_t report_tsc = 0;
    uint64_t deadline = 0;
    bool ready = false;
    struct reading own;
    struct { uint64_t step_tsc, step_clock, tsc, clock, all_tsc, all_clock; }
        most = { 0 };

    set_up_interrupts();
    if (cpu == 0) {
        khz = measure_khz();
        read_parameters();
        start_cpus();
    }
    barrier();
    if (cpu == 1 && par.adjust) {
        wrmsr(MSR_TSC_ADJUST, par.adjust);
    }
    wrmsr(MSR_KVM_SYSTEM_TIME, (uintptr_t)pv | 1);
    barrier();
    own = read_clocks(pv);
    for (;;) {
        struct reading r, before = own;
        uint32_t seen = __atomic_load_n(&moves, __ATOMIC_SEQ_CST);

        while (__atomic_exchange_n(&busy, true, __ATOMIC_ACQUIRE)) {
            pause();
        }
        r = read_clocks(pv);
        keep_most(&most.all_tsc, behind(&all.tsc, r.tsc));
        keep_most(&most.all_clock, behind(&all.clock, r.clock));
        __atomic_store_n(&busy, false, __ATOMIC_RELEASE);

        keep_most(&most.tsc, behind(&own.tsc, r.tsc));
        keep_most(&most.clock, behind(&own.clock, r.clock));
        if (r.tsc > before.tsc) {
            keep_most(&most.step_tsc, r.tsc - before.tsc);
        }
        if (r.clock > before.clock) {
            keep_most(&most.step_clock, r.clock - before.clock);
        }

        if (seen != reported || r.tsc - report_tsc > 1000 * khz) {
            print("{\"event\": \"clock\", \"cpu\": %u, \"move\": %u, "
                  "\"tsc\": %u, \"clock\": %u, "
                  "\"pv_tsc\": %u, \"pv_time\": %u, \"pv_mul\": %u, "
                  "\"pv_shift\": %u, \"pv_flags\": %u, "
                  "\"step_tsc\": %u, \"step_clock\": %u, "
                  "\"back_tsc\": %u, \"back_clock\": %u, "
                  "\"all_back_tsc\": %u, \"all_back_clock\": %u}\n",
                  (uint64_t)cpu, (uint64_t)seen, r.tsc, r.clock,
                  pv->tsc_timestamp, pv->system_time, (uint64_t)pv->mul,
                  (uint64_t)(uint8_t)pv->shift, (uint64_t)pv->flags,
                  most.step_tsc, most.step_clock, most.tsc, most.clock,
                  most.all_tsc, most.all_clock);
            if (seen != reported) {
                pv->flags &= ~GUEST_STOPPED;
                most.step_tsc = most.step_clock = 0;
                __atomic_add_fetch(&reports, 1, __ATOMIC_SEQ_CST);
            }
            reported = seen;
            report_tsc = r.tsc;
        }
        if (cpu) {
            continue;
        }
        if (!ready && __atomic_load_n(&reports, __ATOMIC_SEQ_CST) == par.cpus) {
            ready = true;
            if (par.deadline_ms) {
                deadline = set_deadline(khz);
            }
            print("{\"event\": \"ready\"}\n");
        }
        if (side() != here) {
            here = side();
            __atomic_store_n(&moves, moves + 1, __ATOMIC_SEQ_CST);
        }
        if (deadline && !rdmsr(MSR_TSC_DEADLINE)) {
            print("{\"event\": \"deadline\", \"deadline\": %u, \"tsc\": %u, "
                  "\"khz\": %u}\n", deadline, ticks(), khz);
            deadline = 0;
        }
    }
}
