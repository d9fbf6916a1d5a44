/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The virtual and the physical counter, and a timer of each. */
#include "clock.h"
#include "touch.h"

#define ENABLE  1               /* bit of CNTx_CTL */

volatile uint32_t fired[MAX_CPUS][CLOCKS];

/* The timers of this processor. Interrupts write them, at[] before fired[]. */
static struct timer {
    uint64_t deadline;
    struct reading at;
    bool reported;
} timers[MAX_CPUS][CLOCKS];

/* Reads the virtual counter first: with the same offset it is never ahead. */
struct reading read_clocks(uint32_t cpu)
{
    struct reading r;

    asm volatile("dsb ish; isb; mrs %0, cntvct_el0; isb; mrs %1, cntpct_el0; isb"
                 : "=&r"(r.clock[0]), "=r"(r.clock[1]) : : "memory");
    return r;
}

void have_reported(uint32_t cpu)
{
}

static void expired(uint32_t cpu, uint32_t interrupt)
{
    struct reading r = read_clocks(cpu);
    int i = interrupt == PHYSICAL_TIMER;

    if (i) {
        write_sysreg(cntp_ctl_el0, 0);
    } else {
        write_sysreg(cntv_ctl_el0, 0);
    }
    isb();
    timers[cpu][i].at = r;
    fired[cpu][i]++;
}

void start_clocks(uint32_t cpu)
{
    struct reading now = read_clocks(cpu);

    if (!par.deadline_ms) {
        return;
    }
    timer_expired = expired;
    for (int i = 0; i < CLOCKS; i++) {
        timers[cpu][i].deadline = now.clock[i] + par.deadline_ms * khz;
    }
    write_sysreg(cntv_cval_el0, timers[cpu][0].deadline);
    write_sysreg(cntp_cval_el0, timers[cpu][1].deadline);
    write_sysreg(cntv_ctl_el0, ENABLE);
    write_sysreg(cntp_ctl_el0, ENABLE);
    asm volatile("msr daifclr, #2; isb" : : : "memory");
}

void report_timers(uint32_t cpu, uint32_t move)
{
    static const char *const names[CLOCKS] = { CLOCK_0, CLOCK_1 };

    for (int i = 0; i < CLOCKS; i++) {
        struct timer *t = &timers[cpu][i];

        if (fired[cpu][i] && !t->reported) {
            t->reported = true;
            report("'timer', 'cpu': %u, 'timer': '%s', 'deadline': %u, "
                   "'at_" CLOCK_0 "': %u, 'at_" CLOCK_1 "': %u, 'khz': %u",
                   (uint64_t)cpu, names[i], t->deadline, t->at.clock[0],
                   t->at.clock[1], khz);
        }
    }
}
