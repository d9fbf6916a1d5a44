/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that makes all calls of SDEI, and checks results and handlers. Then
 * it checks events that ran, were pending, masked or disabled when the guest
 * moved to another QEMU.
 *
 * Builds of QEMU for tests have more events than the software event.
 */
#include "touch.h"

enum {
    VERSION = 0xc4000020, REGISTER, ENABLE, DISABLE, CONTEXT, COMPLETE,
    COMPLETE_AND_RESUME, UNREGISTER, STATUS, GET_INFO, ROUTING_SET, PE_MASK,
    PE_UNMASK, INTERRUPT_BIND, INTERRUPT_RELEASE, SIGNAL, FEATURES,
    PRIVATE_RESET, SHARED_RESET, UNUSED, END = VERSION + 0x20
};

/* Calls of async page faults, and their results */
enum {
    APF_ENABLE = 0xc6005100, APF_DISABLE, APF_TAKEN,
    APF_UNUSED = APF_ENABLE + 4, APF_END = APF_ENABLE + 0x10
};
#define APF_EVENT           0x40400001
#define APF_NOT_REQUIRED    (-2)
#define APF_INVALID         (-3)

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

/* sdei_entry.S */
extern char sdei_entry[], sdei_resume[], sdei_loop[], sdei_loop_end[];
void sdei_interrupted(uint64_t x0, uint64_t x1, uint64_t x2,
                      const volatile uint32_t *until, uint64_t *out);
uint64_t resumed[4];

static uint32_t checks, failed;

static void check_(const char *what, uint64_t got, uint64_t expected)
{
    __atomic_add_fetch(&checks, 1, __ATOMIC_SEQ_CST);
    if (got != expected) {
        __atomic_add_fetch(&failed, 1, __ATOMIC_SEQ_CST);
        report("'failed', 'what': '%s', 'got': '%x', 'expected': '%x'",
               what, got, expected);
    }
}

#define check(got, expected) check_(#got, got, expected)

/* A call with up to three parameters */
#define sdei(function, ...) sdei_(function, ##__VA_ARGS__, 0, 0, 0)
#define sdei_(function, a, b, c, ...) call(function, a, b, c, 0, 0)

static int64_t status(int event)
{
    return sdei(STATUS, number[event]);
}

static int64_t info(int event, int what)
{
    return sdei(GET_INFO, number[event], what);
}

static struct handler *handler_of(int event)
{
    bool shared = event == COMMON || event == URGENT;

    return &handlers[shared ? 0 : this_cpu()][event];
}

static int64_t register_routed(int event, uint64_t flags, uint64_t to)
{
    struct handler *h = handler_of(event);

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
    struct handler *h = handler_of(event);

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
    return sdei(SIGNAL, number[event], affinity(this_cpu()));
}

/* sdei_entry.S calls it. */
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
    pause_while(__atomic_load_n(&tasks[cpu], __ATOMIC_ACQUIRE));
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

static void check_registers(const uint64_t *out, uint64_t x1, uint64_t x2)
{
    check(out[0], SUCCESS);
    check(out[1], x1);
    check(out[2], x2);
    for (int n = 3; n < GPRS; n++) {
        check(out[n], PATTERN + n);
    }
    check(out[GPRS], FLAGS);
}

/* Events do not change registers while this makes a call, or none, and waits */
static void be_interrupted(uint64_t call, uint64_t x1, uint64_t x2,
                           const volatile uint32_t *until)
{
    uint64_t out[GPRS + 1];

    sdei_interrupted(call, x1, x2, until, out);
    check_registers(out, x1, x2);
}

/* Checks the state after a reset, on each processor */
static void first_state(uint32_t cpu)
{
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
    for (size_t i = 0; i < ARRAY_SIZE(of_an_event); i++) {
        check(sdei(of_an_event[i], UNKNOWN), INVALID_PARAMETERS);
    }
    for (size_t i = 0; i < ARRAY_SIZE(not_running); i++) {
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
    for (uint32_t function = UNUSED; function < END; function++) {
        check(sdei(function), NOT_SUPPORTED);
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
    check(sdei(SIGNAL, APF_EVENT, affinity(0)), INVALID_PARAMETERS);

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
    for (uint32_t function = APF_UNUSED; function < APF_END; function++) {
        check(sdei(function), NOT_SUPPORTED);
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
    check_registers(x, 0, affinity(h->cpu));
    check(sdei(CONTEXT, GPRS), INVALID_PARAMETERS);
    check(h->pc, (uintptr_t)sdei_loop);
    go_on = 1;
}

static void registers(void)
{
    struct handler *h = ready(NORMAL, look_at_context);
    uint32_t cpu = this_cpu();

    go_on = 0;
    be_interrupted(SIGNAL, 0, affinity(cpu), &go_on);
    check(h->count, 1);

    go_on = 0;
    h->resume = (uintptr_t)sdei_resume;
    be_interrupted(SIGNAL, 0, affinity(cpu), &go_on);
    check(h->count, 2);
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

static void loop_until_event(uint32_t cpu)
{
    check(sdei(PE_UNMASK), SUCCESS);
    ready(NORMAL, go_on_from_loop);
    be_interrupted(0, 1, 2, &go_on);
    check(handlers[cpu][NORMAL].cpu, cpu);
}

static void wake_up(struct handler *h)
{
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

        check(sdei(SIGNAL, 0, affinity(cpu)), SUCCESS);
        pause_while(!go_on && ticks() - start < 20 * khz);
    }
}

static void to_others(void)
{
    for (uint32_t cpu = 1; cpu < CPUS; cpu++) {
        go_on = 0;
        give(cpu, loop_until_event);
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
    kept = status(NORMAL);
    if (kept) {
        sdei(UNREGISTER, 0);
        sdei(PE_MASK);
    }
}

static void signal_while_off(void)
{
    uint32_t cpu = CPUS - 1;
    uint64_t ms = 25;

    /* On a busy host, the processor may get the event when it is on again */
    do {
        ms *= 2;
        on(cpu, turn_off);
        pause_while(call(PSCI_AFFINITY_INFO, affinity(cpu), 0, 0, 0, 0) !=
                    PSCI_IS_OFF);
        check(sdei(SIGNAL, 0, affinity(cpu)), SUCCESS);
        delay_ms(ms);
        check(call(PSCI_AFFINITY_INFO, affinity(cpu), 0, 0, 0, 0), PSCI_IS_OFF);
        check(handlers[cpu][NORMAL].count, 0);
        check(call(PSCI_CPU_ON, affinity(cpu), 0, cpu, 0, 0), SUCCESS);
        on(cpu, look_and_forget);
    } while (kept && ms < 5000);
    check(kept, 0);
    check(handlers[cpu][NORMAL].count, 0);
    on(cpu, first_state);
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

static void check_order(const char *expected)
{
    order[ordered] = 0;
    if (!equal(order, expected)) {
        report("'order', 'is': '%s', 'expected': '%s'", order, expected);
    }
    check(equal(order, expected), true);
    ordered = 0;
}

static void in_urgent(struct handler *h)
{
    log_order('u');
}

static void in_critical(struct handler *h)
{
    log_order('c');
    check(sdei(CONTEXT, 0), SUCCESS);
    check(sdei(CONTEXT, 1), number[CRITICAL]);
    check(sdei(CONTEXT, 2), affinity(h->cpu));
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
    check(sdei(PE_UNMASK), SUCCESS);
}

static void mask(uint32_t cpu)
{
    check(sdei(PE_MASK), 1);
}

static void hold_handler(struct handler *h)
{
    pause_while(!go_on);
}

static void shared(void)
{
    struct handler *h = ready(COMMON, NULL);

    check(register_event(COMMON), DENIED);
    check(info(COMMON, TYPE), 1);
    check(info(COMMON, ROUTING_MODE), 0);
    check(info(COMMON, ROUTING_AFFINITY), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, number[COMMON], 1, affinity(2)), DENIED);

    /* The event goes to any unmasked processor: the others are masked */
    check(signal_self(COMMON), SUCCESS);
    check(h->count, 1);
    check(h->cpu, 0);
    check(sdei(PE_MASK), 1);
    check(signal_self(COMMON), SUCCESS);
    check(h->count, 1);
    on(2, unmask);
    pause_while(h->count == 1);
    check(h->cpu, 2);
    check(sdei(PE_UNMASK), SUCCESS);

    /* The event goes to one processor */
    check(sdei(DISABLE, number[COMMON]), SUCCESS);
    check(sdei(ROUTING_SET, number[COMMON], 2, 0), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, number[COMMON], 1, 0xffff), INVALID_PARAMETERS);
    check(sdei(ROUTING_SET, number[COMMON], 1, affinity(2)), SUCCESS);
    check(info(COMMON, ROUTING_MODE), 1);
    check(info(COMMON, ROUTING_AFFINITY), affinity(2));
    check(sdei(ENABLE, number[COMMON]), SUCCESS);
    go_on = 0;
    h->action = hold_handler;
    check(signal_self(COMMON), SUCCESS);
    pause_while(h->count == 2);
    check(h->cpu, 2);
    check(status(COMMON), REGISTERED | ENABLED | RUNNING);
    check(sdei(SHARED_RESET), DENIED);
    check(status(COMMON), RUNNING);
    check(register_event(COMMON), DENIED);
    check(sdei(UNREGISTER, number[COMMON]), PENDING);
    go_on = 1;
    pause_while(status(COMMON));
    check(h->count, 3);
    check(register_routed(COMMON, 1, 0xffff), INVALID_PARAMETERS);
    check(register_routed(COMMON, 1, affinity(1)), SUCCESS);
    check(info(COMMON, ROUTING_AFFINITY), affinity(1));
    check(sdei(UNREGISTER, number[COMMON]), SUCCESS);
    on(2, mask);
}

/* Events while the guest moves */

static volatile uint32_t held, moved;

static void wait_moved(void)
{
    __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
    pause_while(!moved);
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
    struct handler *h = ready(NORMAL, hold_normal);

    if (test_events) {
        ready(CRITICAL, hold_critical);
    }
    go_on = 0;
    check(sdei(PE_UNMASK), SUCCESS);
    be_interrupted(SIGNAL, 0, affinity(cpu), &go_on);
    check(h->count, 2);
    check(status(NORMAL), REGISTERED | ENABLED);
}

static void move_masked(uint32_t cpu)
{
    struct handler *h = ready(NORMAL, NULL);

    if (test_events) {
        handlers[0][COMMON].action = NULL;
        handlers[0][COMMON].count = 0;
        check(register_routed(COMMON, 1, affinity(cpu)), SUCCESS);
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
        check(info(COMMON, ROUTING_AFFINITY), affinity(cpu));
    }
}

static void move_disabled(uint32_t cpu)
{
    struct handler *h = ready(NORMAL, NULL);

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
    check(sdei(PE_UNMASK), SUCCESS);
    ready(NORMAL, NULL);
    __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
    be_interrupted(0, 1, 2, &moved);
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
    pause_while(held < CPUS - 1);
    report("'ready', 'checks': %u, 'failed': %u, 'test_events': %u, "
           "'async_pf': %u", (uint64_t)checks, (uint64_t)failed,
           (uint64_t)test_events, (uint64_t)async_pf);
    /* No event is lost, and none is delivered twice */
    do {
        uint32_t count = to->count;

        check(sdei(SIGNAL, 0, affinity(4)), SUCCESS);
        pause_while(to->count == count);
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
    report("'moved', 'checks': %u, 'failed': %u, 'signals': %u, "
           "'injected': %u", (uint64_t)checks, (uint64_t)failed,
           (uint64_t)to->count, (uint64_t)handlers[0][CRITICAL].count);
}

void run_payload(uint32_t cpu)
{
    if (cpu) {
        serve(cpu);
    }
    if (par.cpus != CPUS) {
        die("this payload wants five processors");
    }
    if (sdei(VERSION) == NOT_SUPPORTED) {
        report("'none'");
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
