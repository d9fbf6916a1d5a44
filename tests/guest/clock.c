/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that reads its clocks continuously, two on every processor. After
 * each move to another QEMU, and every second, each processor reports the
 * largest step of its clocks since the last move, whether one ever went
 * backwards, and the values of ARCH/clocks.c.
 */
#include "clock.h"
#include "touch.h"

/* Returns how far @now is behind @last; @last becomes the later one of both. */
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

void run_payload(uint32_t cpu)
{
    static struct reading all;          /* of all processors, the latest */
    static bool busy;                   /* protects @all */
    static uint32_t moves;              /* written by processor 0 */
    static uint32_t reports;
    uint32_t reported = ~0u;            /* the move of the last report */
    uint64_t report_tick = 0;
    bool ready = false;
    uint8_t here = 0;
    struct reading own;
    struct { struct reading step, back, all_back; } most = { 0 };

    if (cpu == 0) {
        here = side();
        start_cpus();
    }
    barrier();
    start_clocks(cpu);
    own = read_clocks(cpu);
    for (;;) {
        struct reading r, before = own;
        uint32_t seen = __atomic_load_n(&moves, __ATOMIC_SEQ_CST);

        pause_while(__atomic_exchange_n(&busy, true, __ATOMIC_ACQUIRE));
        r = read_clocks(cpu);
        for (int i = 0; i < CLOCKS; i++) {
            keep_most(&most.all_back.clock[i],
                      behind(&all.clock[i], r.clock[i]));
        }
        __atomic_store_n(&busy, false, __ATOMIC_RELEASE);

        for (int i = 0; i < CLOCKS; i++) {
            keep_most(&most.back.clock[i], behind(&own.clock[i], r.clock[i]));
            if (r.clock[i] > before.clock[i]) {
                keep_most(&most.step.clock[i], r.clock[i] - before.clock[i]);
            }
        }

        if (seen != reported || r.clock[0] - report_tick > 1000 * khz) {
            report("'clock', 'cpu': %u, 'move': %u, "
                   "'" CLOCK_0 "': %u, '" CLOCK_1 "': %u, "
                   "'step_" CLOCK_0 "': %u, 'step_" CLOCK_1 "': %u, "
                   "'back_" CLOCK_0 "': %u, 'back_" CLOCK_1 "': %u, "
                   "'all_back_" CLOCK_0 "': %u, 'all_back_" CLOCK_1 "': %u, "
                   CLOCK_FORMAT,
                   (uint64_t)cpu, (uint64_t)seen, r.clock[0], r.clock[1],
                   most.step.clock[0], most.step.clock[1],
                   most.back.clock[0], most.back.clock[1],
                   most.all_back.clock[0], most.all_back.clock[1],
                   CLOCK_VALUES(cpu));
            if (seen != reported) {
                have_reported(cpu);
                most.step = (struct reading) { 0 };
                __atomic_add_fetch(&reports, 1, __ATOMIC_SEQ_CST);
            }
            reported = seen;
            report_tick = r.clock[0];
        }
        report_timers(cpu, seen);
        if (cpu) {
            continue;
        }
        if (!ready && __atomic_load_n(&reports, __ATOMIC_SEQ_CST) == par.cpus) {
            ready = true;
            report("'ready', 'khz': %u", khz);
        }
        if (side() != here) {
            here = side();
            __atomic_store_n(&moves, moves + 1, __ATOMIC_SEQ_CST);
        }
    }
}
