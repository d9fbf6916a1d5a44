/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that makes all calls of SDEI, and checks results and handlers. Then
 * it checks events that ran, were pending, masked or disabled when the guest
 * moved to another QEMU.
 *
 * Builds of QEMU for tests have more events than the software event.
 */
#include "touch.h"

#define FN(n)               (0xc4000020 + (n))
#define VERSION             FN(0x00)
#define REGISTER            FN(0x01)
#define ENABLE              FN(0x02)
#define DISABLE             FN(0x03)
#define CONTEXT             FN(0x04)
#define COMPLETE            FN(0x05)
#define COMPLETE_AND_RESUME FN(0x06)
#define UNREGISTER          FN(0x07)
#define STATUS              FN(0x08)
#define GET_INFO            FN(0x09)
#define ROUTING_SET         FN(0x0a)
#define PE_MASK             FN(0x0b)
#define PE_UNMASK           FN(0x0c)
#define INTERRUPT_BIND      FN(0x0d)
#define INTERRUPT_RELEASE   FN(0x0e)
#define SIGNAL              FN(0x0f)
#define FEATURES            FN(0x10)
#define PRIVATE_RESET       FN(0x11)
#define SHARED_RESET        FN(0x12)

/* Calls of async page faults, and their results */
#define APF(n)              (0xc6005100 + (n))
#define APF_ENABLE          APF(0)
#define APF_DISABLE         APF(1)
#define APF_TAKEN           APF(2)
#define APF_EVENT           0x40400001
#define APF_NOT_REQUIRED    (-2)
#define APF_INVALID         (-3)

#define PSCI_CPU_OFF        0x84000002
#define PSCI_CPU_ON         0xc4000003
#define PSCI_AFFINITY_INFO  0xc4000004
#define PSCI_IS_OFF         1

#define SUCCESS             0
#define NOT_SUPPORTED       (-1)
#define INVALID_PARAMETERS  (-2)
#define DENIED              (-3)
#define PENDING             (-5)
#define OUT_OF_RESOURCE     (-10)

#define REGISTERED          1       /* bits of the result of STATUS */
#define ENABLED             2
#define RUNNING             4

enum { TYPE, SIGNALED, PRIORITY, ROUTING_MODE, ROUTING_AFFINITY };

#define UNKNOWN             0x40400fff
#define MASKED              0x3c0   /* all bits of DAIF */
#define EL1H                5
#define GPRS                18
#define FLAGS               0xa0000000
#define PATTERN             0x5de10000
#define CPUS                5

/* The software event, and the events of builds for tests */
enum { NORMAL, CRITICAL, COMMON, URGENT, EVENTS };
static const uint32_t number[EVENTS] = { 0, 0x40400100, 0x40400101, 0x40400102 };
static bool test_events, async_pf;

/* The argument of an event's handler; a private event has one per processor */
struct handler {
    int event;
    void (*volatile action)(struct handler *h);
    volatile uint64_t resume;       /* 0: return to the interrupted code */
    volatile uint32_t count;
    volatile uint32_t cpu;          /* the processor that ran it last */
    volatile uint64_t pc, pstate;   /* of the interrupted code */
};
static struct handler handlers[CPUS][EVENTS];
static uint64_t affinity[CPUS];

/* sdei_entry.S */
extern char sdei_entry[], sdei_resume[], sdei_loop[], sdei_loop_end[];
void sdei_interrupted(uint64_t x0, uint64_t x1, uint64_t x2,
                      const volatile uint32_t *until, uint64_t *out);
uint64_t resumed[4];
uint64_t sdei_handler(uint64_t event, struct handler *h, uint64_t pc,
                      uint64_t pstate);

static uint32_t checks, failed;

static void check_(const char *what, uint64_t got, uint64_t expected)
{
    __atomic_add_fetch(&checks, 1, __ATOMIC_SEQ_CST);
    if (got != expected) {
        __atomic_add_fetch(&failed, 1, __ATOMIC_SEQ_CST);
        print("{\"event\": \"failed\", \"what\": \"%s\", \"got\": \"%x\", "
              "\"expected\": \"%x\"}\n", what, got, expected);
    }
}

#define check(got, expected) check_(#got, got, expected)

static int64_t call(uint32_t function, uint64_t a, uint64_t b, uint64_t c,
                    uint64_t d, uint64_t e)
{
    register uint64_t x0 asm("x0") = function;
    register uint64_t x1 asm("x1") = a;
    register uint64_t x2 asm("x2") = b;
    register uint64_t x3 asm("x3") = c;
    register uint64_t x4 asm("x4") = d;
    register uint64_t x5 asm("x5") = e;

    asm volatile("hvc #0" : "+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3), "+r"(x4),
                 "+r"(x5)
                 : : "memory", "x6", "x7", "x8", "x9", "x10", "x11", "x12",
                 "x13", "x14", "x15", "x16", "x17");
    return x0;
}

/* A call with up to three parameters */
#define sdei(function, ...) sdei_(function, ##__VA_ARGS__, 0, 0, 0)
#define sdei_(function, a, b, c, ...) call(function, a, b, c, 0, 0)

static uint32_t this_cpu(void)
{
    return read_sysreg(mpidr_el1) & 0xff;   /* one cluster at most */
}

static int64_t status(int event)
{
    return sdei(STATUS, number[event]);
}

static int64_t info(int event, int what)
{
    return sdei(GET_INFO, number[event], what);
}

static int64_t register_routed(int event, uint64_t flags, uint64_t to)
{
    uint32_t cpu = event == COMMON || event == URGENT ? 0 : this_cpu();
    struct handler *h = &handlers[cpu][event];

    h->event = event;
    return call(REGISTER, number[event], (uintptr_t)sdei_entry, (uintptr_t)h,
                flags, to);
}

static int64_t register_event(int event)
{
    return register_routed(event, 0, 0);
}

static struct handler *ready(int event, void (*action)(struct handler *h))
{
    uint32_t cpu = event == COMMON || event == URGENT ? 0 : this_cpu();
    struct handler *h = &handlers[cpu][event];

    h->action = action;
    h->resume = 0;
    h->count = 0;
    check(register_event(event), SUCCESS);
    check(sdei(ENABLE, number[event]), SUCCESS);
    return h;
}

/* Signals this processor; if its handler can run, it runs before the return */
static int64_t signal_self(int event)
{
    return sdei(SIGNAL, number[event], affinity[this_cpu()]);
}

uint64_t sdei_handler(uint64_t event, struct handler *h, uint64_t pc,
                      uint64_t pstate)
{
    check(event, number[h->event]);
    check(read_sysreg(daif), MASKED);
    check(read_sysreg(spsel), 1);
    h->pc = pc;
    h->pstate = pstate;
    h->cpu = this_cpu();
    h->count++;
    if (h->action) {
        h->action(h);
    }
    return h->resume;
}

/* Tasks of other processors */

typedef void task(uint32_t cpu);
static task *tasks[CPUS];

static void give(uint32_t cpu, task *t)
{
    __atomic_store_n(&tasks[cpu], t, __ATOMIC_RELEASE);
}

static void wait_done(uint32_t cpu)
{
    while (__atomic_load_n(&tasks[cpu], __ATOMIC_ACQUIRE)) {
        pause();
    }
}

static void on(uint32_t cpu, task *t)
{
    give(cpu, t);
    wait_done(cpu);
}

static _Noreturn void serve(uint32_t cpu)
{
    for (;;) {
        task *t = __atomic_load_n(&tasks[cpu], __ATOMIC_ACQUIRE);

        if (t) {
            t(cpu);
            give(cpu, NULL);
        }
        pause();
    }
}

static void check_registers(const uint64_t *out, uint64_t x0, uint64_t x1,
                            uint64_t x2)
{
    check(out[0], x0);
    check(out[1], x1);
    check(out[2], x2);
    for (int n = 3; n < GPRS; n++) {
        check(out[n], PATTERN + n);
    }
    check(out[GPRS], FLAGS);
}

/* Checks the state after a reset, on each processor */
static void first_state(uint32_t cpu)
{
    (void)cpu;
    check(sdei(PE_MASK), 0);
    check(status(NORMAL), 0);
    check(sdei(CONTEXT, 0), DENIED);
}

static void errors(void)
{
    static const uint32_t of_an_event[] = {
        ENABLE, DISABLE, UNREGISTER, STATUS, GET_INFO, ROUTING_SET, SIGNAL,
    };
    static const uint32_t not_running[] = {
        CONTEXT, COMPLETE, COMPLETE_AND_RESUME,
    };

    check(sdei(VERSION), 1ull << 48);
    for (size_t i = 0; i < sizeof(of_an_event) / sizeof(of_an_event[0]); i++) {
        check(sdei(of_an_event[i], UNKNOWN), INVALID_PARAMETERS);
    }
    for (size_t i = 0; i < sizeof(not_running) / sizeof(not_running[0]); i++) {
        check(sdei(not_running[i]), DENIED);
    }
    check(sdei(ENABLE, 0), DENIED);
    check(sdei(DISABLE, 0), DENIED);
    check(sdei(UNREGISTER, 0), DENIED);

    check(sdei(REGISTER, UNKNOWN, 0x1000), INVALID_PARAMETERS);
    check(sdei(REGISTER, 0, 0), INVALID_PARAMETERS);
    check(sdei(REGISTER, 0, 0x1002), INVALID_PARAMETERS);
    check(call(REGISTER, 0, 0x1000, 0, 2, 0), INVALID_PARAMETERS);

    check(info(NORMAL, TYPE), 0);
    check(info(NORMAL, SIGNALED), 0);
    check(info(NORMAL, PRIORITY), 0);
    check(info(NORMAL, ROUTING_MODE), INVALID_PARAMETERS);
    check(info(NORMAL, ROUTING_AFFINITY), INVALID_PARAMETERS);
    check(info(NORMAL, 5), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, 0, 0, 0), INVALID_PARAMETERS);
    check(sdei(SIGNAL, 0, 0xffff), INVALID_PARAMETERS);

    check(sdei(INTERRUPT_BIND, 15), INVALID_PARAMETERS);
    check(sdei(INTERRUPT_BIND, 16), OUT_OF_RESOURCE);
    check(sdei(INTERRUPT_BIND, 1020), INVALID_PARAMETERS);
    check(sdei(INTERRUPT_RELEASE, 0), INVALID_PARAMETERS);
    check(sdei(FEATURES, 0), 0);
    check(sdei(FEATURES, 1), INVALID_PARAMETERS);
    for (int n = 0x13; n < 0x20; n++) {
        check(sdei(FN(n)), NOT_SUPPORTED);
    }
    check(sdei(PRIVATE_RESET), SUCCESS);
    check(sdei(SHARED_RESET), SUCCESS);
}

/* Calls of async page faults, where QEMU has them; no page is missing here */
static void async_page_faults(void)
{
    static uint8_t block[64] __attribute__((aligned(64)));
    uint64_t where = (uintptr_t)block;

    async_pf = sdei(APF_DISABLE) != NOT_SUPPORTED;
    if (!async_pf) {
        return;
    }
    check(sdei(GET_INFO, APF_EVENT, TYPE), 0);
    check(sdei(GET_INFO, APF_EVENT, SIGNALED), 1);
    check(sdei(GET_INFO, APF_EVENT, PRIORITY), 0);
    check(sdei(SIGNAL, APF_EVENT, affinity[0]), INVALID_PARAMETERS);

    check(sdei(APF_DISABLE), APF_NOT_REQUIRED);
    check(sdei(APF_TAKEN), APF_NOT_REQUIRED);
    check(sdei(APF_ENABLE, where + 4), APF_INVALID);
    check(sdei(APF_ENABLE, ROM_START), APF_INVALID);
    check(sdei(APF_ENABLE, UART), APF_INVALID);
    check(sdei(APF_ENABLE, -64), APF_INVALID);
    check(sdei(APF_DISABLE), APF_NOT_REQUIRED);
    check(sdei(APF_ENABLE, where), SUCCESS);
    check(sdei(APF_ENABLE, where), SUCCESS);
    check(sdei(APF_TAKEN), APF_NOT_REQUIRED);
    check(sdei(APF_DISABLE), SUCCESS);
    check(sdei(APF_DISABLE), APF_NOT_REQUIRED);
    for (int n = 4; n < 0x10; n++) {
        check(sdei(APF(n)), NOT_SUPPORTED);
    }
}

static void states(void)
{
    struct handler *h;

    /* The event is not registered: it is lost */
    check(sdei(PE_UNMASK), SUCCESS);
    check(signal_self(NORMAL), SUCCESS);
    h = ready(NORMAL, NULL);
    check(h->count, 0);
    check(register_event(NORMAL), DENIED);
    check(status(NORMAL), REGISTERED | ENABLED);
    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 1);
    check(h->pstate & 0xf, EL1H);

    check(sdei(DISABLE, 0), SUCCESS);
    check(sdei(DISABLE, 0), SUCCESS);
    check(status(NORMAL), REGISTERED);
    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 1);
    check(sdei(PE_MASK), 1);
    check(sdei(PE_MASK), 0);
    check(sdei(ENABLE, 0), SUCCESS);
    check(sdei(ENABLE, 0), SUCCESS);
    check(h->count, 1);
    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 1);
    check(sdei(PE_UNMASK), SUCCESS);
    check(h->count, 2);
    check(sdei(PE_UNMASK), SUCCESS);
    check(h->count, 2);

    check(sdei(UNREGISTER, 0), SUCCESS);
    check(status(NORMAL), 0);
    check(sdei(UNREGISTER, 0), DENIED);
    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 2);
}

static void again(struct handler *h)
{
    check(status(NORMAL), REGISTERED | ENABLED | RUNNING);
    if (h->count == 1) {
        check(signal_self(NORMAL), SUCCESS);
        check(h->count, 1);
    }
}

static void unregister(struct handler *h)
{
    (void)h;
    check(sdei(UNREGISTER, 0), PENDING);
    check(sdei(UNREGISTER, 0), PENDING);
    check(status(NORMAL), RUNNING);
    check(register_event(NORMAL), DENIED);
    check(sdei(ENABLE, 0), DENIED);
    check(sdei(DISABLE, 0), DENIED);
    check(sdei(PRIVATE_RESET), DENIED);
    check(sdei(SHARED_RESET), SUCCESS);
}

static void in_handlers(void)
{
    struct handler *h = ready(NORMAL, again);

    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 2);
    h->action = unregister;
    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 3);
    check(status(NORMAL), 0);

    ready(NORMAL, NULL);
    check(sdei(PRIVATE_RESET), SUCCESS);
    check(status(NORMAL), 0);
}

/* Registers of the interrupted code, also as a handler sees them */

static volatile uint32_t go_on;

static void look_at_context(struct handler *h)
{
    uint64_t x[GPRS + 1];

    for (int n = 0; n < GPRS; n++) {
        x[n] = sdei(CONTEXT, n);
    }
    x[GPRS] = h->pstate & 0xf0000000;
    check_registers(x, SUCCESS, 0, affinity[h->cpu]);
    check(sdei(CONTEXT, GPRS), INVALID_PARAMETERS);
    check(h->pc, (uintptr_t)sdei_loop);
    go_on = 1;
}

static void registers(void)
{
    uint64_t out[GPRS + 1];
    struct handler *h = ready(NORMAL, look_at_context);
    uint32_t cpu = this_cpu();

    go_on = 0;
    sdei_interrupted(SIGNAL, 0, affinity[cpu], &go_on, out);
    check(h->count, 1);
    check_registers(out, SUCCESS, 0, affinity[cpu]);

    go_on = 0;
    h->resume = (uintptr_t)sdei_resume;
    sdei_interrupted(SIGNAL, 0, affinity[cpu], &go_on, out);
    check(h->count, 2);
    check_registers(out, SUCCESS, 0, affinity[cpu]);
    check(resumed[0], (uintptr_t)sdei_loop);
    check(resumed[1], h->pstate);
    check(resumed[2], MASKED);
    check(resumed[3], 1);
    check(sdei(UNREGISTER, 0), SUCCESS);
}

/* Events of other processors */

static void go_on_from_loop(struct handler *h)
{
    if (h->pc >= (uintptr_t)sdei_loop && h->pc < (uintptr_t)sdei_loop_end) {
        go_on = 1;
    }
}

static void be_interrupted(uint32_t cpu)
{
    uint64_t out[GPRS + 1];

    check(sdei(PE_UNMASK), SUCCESS);
    ready(NORMAL, go_on_from_loop);
    sdei_interrupted(0, 1, 2, &go_on, out);
    check_registers(out, 0, 1, 2);
    check(handlers[cpu][NORMAL].cpu, cpu);
}

static void wake_up(struct handler *h)
{
    (void)h;
    go_on = 1;
}

static void sleep_until_event(uint32_t cpu)
{
    handlers[cpu][NORMAL].action = wake_up;
    while (!go_on) {
        asm volatile("wfi" : : : "memory");
    }
    check(sdei(UNREGISTER, 0), SUCCESS);
    check(sdei(PE_MASK), 1);
}

static void signal_until(uint32_t cpu)
{
    while (!go_on) {
        uint64_t start = ticks();

        check(sdei(SIGNAL, 0, affinity[cpu]), SUCCESS);
        while (!go_on && ticks() - start < 20 * measure_khz()) {
            pause();
        }
    }
}

static void to_others(void)
{
    for (uint32_t cpu = 1; cpu < CPUS; cpu++) {
        go_on = 0;
        give(cpu, be_interrupted);
        signal_until(cpu);
        wait_done(cpu);
        go_on = 0;
        give(cpu, sleep_until_event);
        signal_until(cpu);
        wait_done(cpu);
    }
}

/* A processor that is off gets no event; it gets pending ones when it is on */

static void turn_off(uint32_t cpu)
{
    check(sdei(PE_UNMASK), SUCCESS);
    ready(NORMAL, NULL);
    give(cpu, NULL);
    call(PSCI_CPU_OFF, 0, 0, 0, 0, 0);
    die("PSCI does not turn a processor off");
}

static volatile uint64_t kept;

static void look_and_forget(uint32_t cpu)
{
    (void)cpu;
    kept = status(NORMAL);
    if (kept) {
        sdei(UNREGISTER, 0);
        sdei(PE_MASK);
    }
}

/* Checks the state, which is that after a reset */
static void was_off(uint32_t cpu)
{
    check(status(NORMAL), 0);
    check(handlers[cpu][NORMAL].count, 0);
    check(sdei(PE_MASK), 0);
}

static void signal_while_off(void)
{
    uint32_t cpu = CPUS - 1;
    uint64_t ms = 25, start;

    /* On a busy host, the processor may get the event when it is on again */
    do {
        ms *= 2;
        on(cpu, turn_off);
        while (call(PSCI_AFFINITY_INFO, affinity[cpu], 0, 0, 0, 0) !=
               PSCI_IS_OFF) {
            pause();
        }
        check(sdei(SIGNAL, 0, affinity[cpu]), SUCCESS);
        for (start = ticks(); ticks() - start < ms * measure_khz();) {
            pause();
        }
        check(call(PSCI_AFFINITY_INFO, affinity[cpu], 0, 0, 0, 0), PSCI_IS_OFF);
        check(handlers[cpu][NORMAL].count, 0);
        check(call(PSCI_CPU_ON, affinity[cpu], 0, cpu, 0, 0), SUCCESS);
        on(cpu, look_and_forget);
    } while (kept && ms < 5000);
    check(kept, 0);
    on(cpu, was_off);
}

/* Several events; only in builds for tests */

static char order[16];
static volatile uint32_t ordered;

static void log_order(char c)
{
    if (ordered < sizeof(order) - 1) {
        order[ordered++] = c;
    }
}

static void check_order_(const char *expected, uint32_t line)
{
    bool same = true;

    order[ordered] = 0;
    for (uint32_t i = 0; i <= ordered; i++) {
        same &= order[i] == expected[i];
        if (!expected[i]) {
            break;
        }
    }
    if (!same) {
        print("{\"event\": \"order\", \"is\": \"%s\", \"expected\": \"%s\", "
              "\"line\": %u}\n", order, expected, (uint64_t)line);
    }
    check(same, true);
    ordered = 0;
}

#define check_order(expected) check_order_(expected, __LINE__)

static void in_urgent(struct handler *h)
{
    (void)h;
    log_order('u');
}

static void in_critical(struct handler *h)
{
    log_order('c');
    check(sdei(CONTEXT, 0), SUCCESS);
    check(sdei(CONTEXT, 1), number[CRITICAL]);
    check(sdei(CONTEXT, 2), affinity[h->cpu]);
    check(signal_self(NORMAL), SUCCESS);
    check(signal_self(URGENT), SUCCESS);
    log_order('C');
}

static void in_normal(struct handler *h)
{
    uint64_t x1 = sdei(CONTEXT, 1);

    log_order('n');
    if (h->count == 1) {
        check(signal_self(CRITICAL), SUCCESS);
        check(sdei(CONTEXT, 1), x1);
    }
    log_order('N');
}

static void nesting(void)
{
    ready(NORMAL, in_normal);
    ready(CRITICAL, in_critical);
    ready(URGENT, in_urgent);
    check(signal_self(NORMAL), SUCCESS);
    check_order("ncCuNnN");

    /* Both are pending: the critical one runs first */
    handlers[this_cpu()][CRITICAL].action = NULL;
    handlers[0][URGENT].count = 0;
    check(sdei(PE_MASK), 1);
    check(signal_self(NORMAL), SUCCESS);
    check(signal_self(URGENT), SUCCESS);
    check_order("");
    check(sdei(PE_UNMASK), SUCCESS);
    check_order("unN");

    check(info(CRITICAL, PRIORITY), 1);
    check(info(CRITICAL, TYPE), 0);
    check(info(URGENT, PRIORITY), 1);
    check(info(URGENT, TYPE), 1);
    check(sdei(PRIVATE_RESET), SUCCESS);
    check(status(CRITICAL), 0);
    check(status(URGENT), REGISTERED | ENABLED);
    check(sdei(SHARED_RESET), SUCCESS);
    check(status(URGENT), 0);
}

static void unmask(uint32_t cpu)
{
    (void)cpu;
    check(sdei(PE_UNMASK), SUCCESS);
}

static void mask(uint32_t cpu)
{
    (void)cpu;
    check(sdei(PE_MASK), 1);
}

static void hold_handler(struct handler *h)
{
    (void)h;
    while (!go_on) {
        pause();
    }
}

static void shared(void)
{
    struct handler *h = ready(COMMON, NULL);

    check(register_event(COMMON), DENIED);
    check(info(COMMON, TYPE), 1);
    check(info(COMMON, ROUTING_MODE), 0);
    check(info(COMMON, ROUTING_AFFINITY), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, number[COMMON], 1, affinity[2]), DENIED);

    /* The event goes to any unmasked processor: the others are masked */
    check(signal_self(COMMON), SUCCESS);
    check(h->count, 1);
    check(h->cpu, 0);
    check(sdei(PE_MASK), 1);
    check(signal_self(COMMON), SUCCESS);
    check(h->count, 1);
    on(2, unmask);
    while (h->count == 1) {
        pause();
    }
    check(h->cpu, 2);
    check(sdei(PE_UNMASK), SUCCESS);

    /* The event goes to one processor */
    check(sdei(DISABLE, number[COMMON]), SUCCESS);
    check(sdei(ROUTING_SET, number[COMMON], 2, 0), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, number[COMMON], 1, 0xffff), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, number[COMMON], 1, affinity[2]), SUCCESS);
    check(info(COMMON, ROUTING_MODE), 1);
    check(info(COMMON, ROUTING_AFFINITY), affinity[2]);
    check(sdei(ENABLE, number[COMMON]), SUCCESS);
    go_on = 0;
    h->action = hold_handler;
    check(signal_self(COMMON), SUCCESS);
    while (h->count == 2) {
        pause();
    }
    check(h->cpu, 2);
    check(status(COMMON), REGISTERED | ENABLED | RUNNING);
    check(sdei(SHARED_RESET), DENIED);
    check(status(COMMON), RUNNING);
    check(register_event(COMMON), DENIED);
    check(sdei(UNREGISTER, number[COMMON]), PENDING);
    go_on = 1;
    while (status(COMMON)) {
        pause();
    }
    check(h->count, 3);
    check(register_routed(COMMON, 1, 0xffff), INVALID_PARAMETERS);
    check(register_routed(COMMON, 1, affinity[1]), SUCCESS);
    check(info(COMMON, ROUTING_AFFINITY), affinity[1]);
    check(sdei(UNREGISTER, number[COMMON]), SUCCESS);
    on(2, mask);
}

/* Events while the guest moves */

static volatile uint32_t held, moved;

static void wait_moved(void)
{
    __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
    while (!moved) {
        pause();
    }
}

static void hold_critical(struct handler *h)
{
    wait_moved();
    check(sdei(CONTEXT, 1), number[CRITICAL]);
    check(status(CRITICAL), REGISTERED | ENABLED | RUNNING);
    check(h->count, 1);
}

/* Signals its own event once more while it runs */
static void hold_normal(struct handler *h)
{
    if (h->count == 1) {
        check(signal_self(NORMAL), SUCCESS);
        if (test_events) {
            check(signal_self(CRITICAL), SUCCESS);
        } else {
            wait_moved();
        }
        look_at_context(h);
    }
}

static void move_running(uint32_t cpu)
{
    uint64_t out[GPRS + 1];
    struct handler *h = ready(NORMAL, hold_normal);

    if (test_events) {
        ready(CRITICAL, hold_critical);
    }
    go_on = 0;
    check(sdei(PE_UNMASK), SUCCESS);
    sdei_interrupted(SIGNAL, 0, affinity[cpu], &go_on, out);
    check_registers(out, SUCCESS, 0, affinity[cpu]);
    check(h->count, 2);
    check(status(NORMAL), REGISTERED | ENABLED);
}

static void move_masked(uint32_t cpu)
{
    struct handler *h = ready(NORMAL, NULL);

    if (test_events) {
        handlers[0][COMMON].action = NULL;
        handlers[0][COMMON].count = 0;
        check(register_routed(COMMON, 1, affinity[cpu]), SUCCESS);
        check(sdei(ENABLE, number[COMMON]), SUCCESS);
        check(signal_self(COMMON), SUCCESS);
    }
    check(signal_self(NORMAL), SUCCESS);
    wait_moved();
    check(h->count, 0);
    check(sdei(PE_UNMASK), SUCCESS);
    check(h->count, 1);
    if (test_events) {
        check(handlers[0][COMMON].count, 1);
        check(handlers[0][COMMON].cpu, cpu);
        check(info(COMMON, ROUTING_AFFINITY), affinity[cpu]);
    }
}

static void move_disabled(uint32_t cpu)
{
    struct handler *h = ready(NORMAL, NULL);

    (void)cpu;
    check(sdei(PE_UNMASK), SUCCESS);
    check(sdei(DISABLE, 0), SUCCESS);
    check(signal_self(NORMAL), SUCCESS);
    wait_moved();
    check(h->count, 0);
    check(status(NORMAL), REGISTERED);
    check(sdei(ENABLE, 0), SUCCESS);
    check(h->count, 1);
}

/* Processor 0 signals this one until the guest has moved */
static void move_signalled(uint32_t cpu)
{
    uint64_t out[GPRS + 1];

    (void)cpu;
    check(sdei(PE_UNMASK), SUCCESS);
    ready(NORMAL, NULL);
    __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
    sdei_interrupted(0, 1, 2, &moved, out);
    check_registers(out, 0, 1, 2);
}

static void move(void)
{
    static task *const other[CPUS] = {
        NULL, move_running, move_masked, move_disabled, move_signalled,
    };
    struct handler *h = ready(NORMAL, NULL), *to = &handlers[4][NORMAL];
    uint8_t here = side();

    if (test_events) {
        ready(CRITICAL, NULL);
    }
    for (uint32_t cpu = 1; cpu < CPUS; cpu++) {
        give(cpu, other[cpu]);
    }
    while (held < CPUS - 1) {
        pause();
    }
    print("{\"event\": \"ready\", \"checks\": %u, \"failed\": %u, "
          "\"test_events\": %u, \"async_pf\": %u}\n",
          (uint64_t)checks, (uint64_t)failed, (uint64_t)test_events,
          (uint64_t)async_pf);
    /* No event is lost, and none is delivered twice */
    do {
        uint32_t count = to->count;

        check(sdei(SIGNAL, 0, affinity[4]), SUCCESS);
        while (to->count == count) {
            pause();
        }
        check(to->count, count + 1);
    } while (side() == here);
    moved = 1;
    for (uint32_t cpu = 1; cpu < CPUS; cpu++) {
        wait_done(cpu);
    }
    check(h->count, 0);
    check(status(NORMAL), REGISTERED | ENABLED);
    check(signal_self(NORMAL), SUCCESS);
    check(h->count, 1);

    /* Each processor gets one more event on the destination */
    for (uint32_t cpu = 0; cpu < CPUS; cpu++) {
        go_on = 0;
        handlers[cpu][NORMAL].action = wake_up;
        signal_until(cpu);
        check(handlers[cpu][NORMAL].cpu, cpu);
    }
    print("{\"event\": \"moved\", \"checks\": %u, \"failed\": %u, "
          "\"signals\": %u, \"injected\": %u}\n",
          (uint64_t)checks, (uint64_t)failed, (uint64_t)to->count,
          (uint64_t)handlers[0][CRITICAL].count);
}

_Noreturn void cpu_main(uint32_t cpu)
{
    set_up_interrupts();
    affinity[cpu % CPUS] = read_sysreg(mpidr_el1) & 0xff00ffffff;
    if (cpu) {
        serve(cpu);
    }
    read_parameters();
    if (par.cpus != CPUS) {
        die("this payload wants five processors");
    }
    if (sdei(VERSION) == NOT_SUPPORTED) {
        print("{\"event\": \"none\"}\n");
        power_off();
    }
    start_cpus();
    first_state(cpu);
    for (uint32_t other = 1; other < CPUS; other++) {
        on(other, first_state);
    }
    errors();
    async_page_faults();
    states();
    in_handlers();
    registers();
    to_others();
    signal_while_off();
    test_events = info(CRITICAL, TYPE) >= 0;
    if (test_events) {
        nesting();
        shared();
    }
    move();
    serve(cpu);
}
