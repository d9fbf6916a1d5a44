/*
 * SDEI: results of calls, and which event interrupts which code
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "target/arm/kvm-sdei-state.h"

#define NORMAL      0           /* private */
#define CRITICAL    0x40400100  /* private */
#define SHARED      0x40400101  /* normal */
#define URGENT      0x40400102  /* shared, critical */
#define UNKNOWN     0x40400103

#define PES         3
#define ENTRY       0x8000
#define ARGUMENT    0xa5
#define PSTATE      0x3c5       /* EL1h, all masked */
#define KEPT        (1 << 22)
#define BUSY        0x80000004  /* the interrupted code: EL1t, flag N */

typedef struct VM {
    Sdei sdei;
    SdeiPE pe[PES];
    SdeiRegs regs[PES];
    /* The registers of the code that each running handler has interrupted */
    SdeiRegs interrupted[PES][SDEI_PRIORITIES];
    unsigned handlers[PES];
} VM;

static uint64_t affinity(int pe)
{
    return 0x100000000 | pe;
}

static void set_up(VM *vm, gconstpointer data)
{
    static const SdeiEvent events[] = {
        { .number = NORMAL, .signalable = true },
        { .number = SHARED, .shared = true, .signalable = true },
        { .number = CRITICAL, .critical = true, .signalable = true },
        { .number = URGENT, .shared = true, .critical = true },
    };

    for (int i = 0; i < ARRAY_SIZE(events); i++) {
        sdei_add_event(&vm->sdei, &events[i]);
    }
    for (int i = 0; i < PES; i++) {
        vm->pe[i].affinity = affinity(i);
        sdei_reset_pe(&vm->pe[i]);
        sdei_add_pe(&vm->sdei, &vm->pe[i]);
        vm->regs[i] = (SdeiRegs) {
            .pc = 0x1000 * (i + 1),
            .pstate = BUSY | KEPT,
            .pstate_kept = KEPT,
            .pstate_set = PSTATE,
        };
        for (int n = 0; n < SDEI_GPRS; n++) {
            vm->regs[i].x[n] = 0x100 * i + n;
        }
    }
}

static void tear_down(VM *vm, gconstpointer data)
{
    g_ptr_array_free(vm->sdei.pes, true);
}

/* Checks that the result is true if other PEs can newly take an event */
static void call_regs(VM *vm, int pe, SdeiFunction function, SdeiRegs *regs)
{
    unsigned before = 0;
    bool others;

    for (int i = 0; i < G_N_ELEMENTS(vm->pe); i++) {
        before |= (sdei_next(&vm->sdei, &vm->pe[i]) >= 0) << i;
    }
    others = sdei_call(&vm->sdei, &vm->pe[pe], function, regs);
    for (int i = 0; i < G_N_ELEMENTS(vm->pe); i++) {
        if (i != pe && !(before & 1 << i)) {
            g_assert_true(others || sdei_next(&vm->sdei, &vm->pe[i]) < 0);
        }
    }
}

/* Calls without the delivery that follows in QEMU; @arg: x1 to x5 */
static int64_t call_args(VM *vm, int pe, SdeiFunction function,
                         const uint64_t arg[5])
{
    SdeiRegs regs = vm->regs[pe];

    memcpy(regs.x + 1, arg, 5 * sizeof(*arg));
    call_regs(vm, pe, function, &regs);
    return regs.x[0];
}

#define call(vm, pe, function, ...) \
    call_args(vm, pe, function, (uint64_t[5]) { __VA_ARGS__ })

static int64_t register_at(VM *vm, int pe, uint32_t event)
{
    return call(vm, pe, SDEI_EVENT_REGISTER, event, ENTRY + 4ULL * event,
                ARGUMENT + event);
}

static void ready(VM *vm, int pe, uint32_t event)
{
    g_assert_cmpint(register_at(vm, pe, event), ==, SDEI_SUCCESS);
    g_assert_cmpint(call(vm, pe, SDEI_EVENT_ENABLE, event), ==,
                    SDEI_SUCCESS);
}

static void comes(VM *vm, int pe, uint32_t event)
{
    g_assert_true(sdei_make_pending(&vm->sdei, &vm->pe[pe],
                                    sdei_find(&vm->sdei, event)));
}

/* Returns the number of the event that @pe takes, or -1 */
static int64_t takes(VM *vm, int pe)
{
    SdeiRegs was = vm->regs[pe], *regs = &vm->regs[pe];
    int event = sdei_deliver(&vm->sdei, &vm->pe[pe], regs);
    uint32_t number;

    if (event < 0) {
        g_assert_cmpmem(&was, sizeof(was), regs, sizeof(*regs));
        return -1;
    }
    vm->interrupted[pe][vm->handlers[pe]++] = was;
    number = vm->sdei.event[event].number;
    g_assert_cmphex(regs->pc, ==, ENTRY + 4ULL * number);
    g_assert_cmphex(regs->pstate, ==, PSTATE | (was.pstate & KEPT));
    g_assert_cmphex(regs->x[0], ==, number);
    g_assert_cmphex(regs->x[1], ==, ARGUMENT + number);
    g_assert_cmphex(regs->x[2], ==, was.pc);
    g_assert_cmphex(regs->x[3], ==, was.pstate);
    g_assert_cmphex(regs->elr, ==, was.elr);
    g_assert_cmphex(regs->spsr, ==, was.spsr);
    return number;
}

static void complete(VM *vm, int pe)
{
    SdeiRegs *was = &vm->interrupted[pe][--vm->handlers[pe]];

    vm->regs[pe].x[1] = 0;
    call_regs(vm, pe, SDEI_EVENT_COMPLETE, &vm->regs[pe]);
    g_assert_cmpmem(was, sizeof(*was), &vm->regs[pe], sizeof(*was));
}

static int64_t status(VM *vm, int pe, uint32_t event)
{
    return call(vm, pe, SDEI_EVENT_STATUS, event);
}

#define is(value, expected) g_assert_cmpint(value, ==, expected)

static void test_errors(VM *vm, gconstpointer data)
{
    static const SdeiFunction of_an_event[] = {
        SDEI_EVENT_REGISTER, SDEI_EVENT_ENABLE, SDEI_EVENT_DISABLE,
        SDEI_EVENT_UNREGISTER, SDEI_EVENT_STATUS, SDEI_EVENT_GET_INFO,
        SDEI_EVENT_ROUTING_SET, SDEI_EVENT_SIGNAL,
    };

    is(call(vm, 0, SDEI_VERSION), 1LL << 48);
    for (int i = 0; i < ARRAY_SIZE(of_an_event); i++) {
        is(call(vm, 0, of_an_event[i], UNKNOWN, ENTRY),
           SDEI_INVALID_PARAMETERS);
    }
    is(call(vm, 0, SDEI_EVENT_ENABLE, 0), SDEI_DENIED);
    is(call(vm, 0, SDEI_EVENT_DISABLE, 0), SDEI_DENIED);
    is(call(vm, 0, SDEI_EVENT_UNREGISTER, 0), SDEI_DENIED);
    is(call(vm, 0, SDEI_EVENT_CONTEXT, 0), SDEI_DENIED);
    is(call(vm, 0, SDEI_EVENT_COMPLETE), SDEI_DENIED);
    is(call(vm, 0, SDEI_EVENT_COMPLETE_AND_RESUME), SDEI_DENIED);
    is(status(vm, 0, 0), 0);

    is(call(vm, 0, SDEI_EVENT_REGISTER, 0), SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_EVENT_REGISTER, 0, 2), SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_EVENT_REGISTER, 0, ENTRY, 0, 2),
       SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_EVENT_REGISTER, SHARED, ENTRY, 0, 1, 7),
       SDEI_INVALID_PARAMETERS);
    is(register_at(vm, 0, 0), SDEI_SUCCESS);
    is(register_at(vm, 0, 0), SDEI_DENIED);
    is(status(vm, 0, 0), SDEI_STATUS_REGISTERED);
    is(status(vm, 1, 0), 0);

    is(call(vm, 0, SDEI_INTERRUPT_BIND, 15), SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_INTERRUPT_BIND, 16), SDEI_OUT_OF_RESOURCE);
    is(call(vm, 0, SDEI_INTERRUPT_BIND, 1019), SDEI_OUT_OF_RESOURCE);
    is(call(vm, 0, SDEI_INTERRUPT_BIND, 1020), SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_INTERRUPT_RELEASE), SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_FEATURES, SDEI_FEATURE_BIND_SLOTS), 0);
    is(call(vm, 0, SDEI_FEATURES, 1), SDEI_INVALID_PARAMETERS);
    for (int function = SDEI_SHARED_RESET + 1; function < 0x10000; function++) {
        is(call(vm, 0, function), SDEI_NOT_SUPPORTED);
    }
}

static void test_info(VM *vm, gconstpointer data)
{
    for (int i = 0; i < vm->sdei.events; i++) {
        uint32_t number = vm->sdei.event[i].number;
        bool shared = number == SHARED || number == URGENT;

#define info(what) call(vm, 0, SDEI_EVENT_GET_INFO, number, what)
        is(info(SDEI_INFO_TYPE), shared);
        is(info(SDEI_INFO_SIGNALED), number == URGENT);
        is(info(SDEI_INFO_PRIORITY), number == CRITICAL || number == URGENT);
        is(info(SDEI_INFO_ROUTING_MODE),
           shared ? SDEI_DENIED : SDEI_INVALID_PARAMETERS);
        is(info(SDEI_INFO_ROUTING_AFFINITY),
           shared ? SDEI_DENIED : SDEI_INVALID_PARAMETERS);
        is(info(5), SDEI_INVALID_PARAMETERS);
        is(register_at(vm, 0, number), SDEI_SUCCESS);
        is(info(SDEI_INFO_ROUTING_MODE), shared ? 0 : SDEI_INVALID_PARAMETERS);
        is(info(SDEI_INFO_ROUTING_AFFINITY), SDEI_INVALID_PARAMETERS);
        is(call(vm, 1, SDEI_EVENT_ROUTING_SET, number, 1, affinity(2)),
           shared ? SDEI_SUCCESS : SDEI_INVALID_PARAMETERS);
        is(info(SDEI_INFO_ROUTING_MODE), shared ? 1 : SDEI_INVALID_PARAMETERS);
        is(info(SDEI_INFO_ROUTING_AFFINITY),
           shared ? affinity(2) : SDEI_INVALID_PARAMETERS);
#undef info
    }
}

static void test_mask(VM *vm, gconstpointer data)
{
    is(call(vm, 0, SDEI_PE_MASK), 0);
    ready(vm, 0, 0);
    comes(vm, 0, 0);
    is(takes(vm, 0), -1);
    is(call(vm, 0, SDEI_PE_UNMASK), SDEI_SUCCESS);
    is(call(vm, 0, SDEI_PE_MASK), 1);
    is(takes(vm, 0), -1);
    is(call(vm, 0, SDEI_PE_UNMASK), SDEI_SUCCESS);
    is(call(vm, 0, SDEI_EVENT_DISABLE, 0), SDEI_SUCCESS);
    is(takes(vm, 0), -1);
    is(call(vm, 0, SDEI_EVENT_ENABLE, 0), SDEI_SUCCESS);
    is(call(vm, 0, SDEI_EVENT_ENABLE, 0), SDEI_SUCCESS);
    is(takes(vm, 0), 0);
    is(status(vm, 0, 0), 7);
}

/* A pending event runs once, and again if triggered while its handler runs */
static void test_pending(VM *vm, gconstpointer data)
{
    is(call(vm, 0, SDEI_PE_UNMASK), SDEI_SUCCESS);
    is(sdei_make_pending(&vm->sdei, &vm->pe[0], 0), false);
    ready(vm, 0, 0);
    is(takes(vm, 0), -1);
    comes(vm, 0, 0);
    comes(vm, 0, 0);
    is(takes(vm, 0), 0);
    comes(vm, 0, 0);
    is(takes(vm, 0), -1);
    complete(vm, 0);
    is(takes(vm, 0), 0);
    complete(vm, 0);
    is(takes(vm, 0), -1);
    is(status(vm, 0, 0), 3);

    comes(vm, 0, 0);
    is(call(vm, 0, SDEI_EVENT_UNREGISTER, 0), SDEI_SUCCESS);
    ready(vm, 0, 0);
    is(takes(vm, 0), -1);
}

static void test_priorities(VM *vm, gconstpointer data)
{
    SdeiRegs *interrupted = vm->interrupted[0];

    is(call(vm, 0, SDEI_PE_UNMASK), SDEI_SUCCESS);
    ready(vm, 0, NORMAL);
    ready(vm, 0, CRITICAL);
    ready(vm, 0, SHARED);
    ready(vm, 0, URGENT);

    /* Critical events first */
    comes(vm, 0, NORMAL);
    comes(vm, 0, CRITICAL);
    is(takes(vm, 0), CRITICAL);
    is(takes(vm, 0), -1);
    comes(vm, 0, URGENT);
    is(takes(vm, 0), -1);
    complete(vm, 0);
    is(takes(vm, 0), URGENT);
    complete(vm, 0);
    is(takes(vm, 0), NORMAL);

    /* A critical event within a normal one, and the contexts of both */
    comes(vm, 0, SHARED);
    is(takes(vm, 0), -1);
    for (int n = 0; n < SDEI_GPRS; n++) {
        is(call(vm, 0, SDEI_EVENT_CONTEXT, n), interrupted[0].x[n]);
    }
    is(call(vm, 0, SDEI_EVENT_CONTEXT, SDEI_GPRS), SDEI_INVALID_PARAMETERS);
    comes(vm, 0, CRITICAL);
    is(takes(vm, 0), CRITICAL);
    for (int n = 0; n < SDEI_GPRS; n++) {
        is(call(vm, 0, SDEI_EVENT_CONTEXT, n), interrupted[1].x[n]);
    }
    complete(vm, 0);
    is(takes(vm, 0), -1);
    complete(vm, 0);
    is(takes(vm, 0), SHARED);
}

static void test_resume(VM *vm, gconstpointer data)
{
    SdeiRegs *regs = &vm->regs[0], *was = vm->interrupted[0];

    is(call(vm, 0, SDEI_PE_UNMASK), SDEI_SUCCESS);
    ready(vm, 0, 0);
    comes(vm, 0, 0);
    is(takes(vm, 0), 0);
    regs->x[1] = 0x7000;
    call_regs(vm, 0, SDEI_EVENT_COMPLETE_AND_RESUME, regs);
    g_assert_cmphex(regs->pc, ==, 0x7000);
    g_assert_cmphex(regs->pstate, ==, PSTATE | KEPT);
    g_assert_cmphex(regs->elr, ==, was->pc);
    g_assert_cmphex(regs->spsr, ==, was->pstate);
    g_assert_cmpmem(regs->x, sizeof(regs->x), was->x, sizeof(was->x));
    is(status(vm, 0, 0), 3);
}

/* An event whose handler runs is unregistered when the handler completes */
static void test_unregister(VM *vm, gconstpointer data)
{
    uint32_t event = GPOINTER_TO_UINT(data);
    bool shared = event == SHARED;
    int other = shared ? 1 : 0;

    is(call(vm, 0, SDEI_PE_UNMASK), SDEI_SUCCESS);
    ready(vm, 0, event);
    comes(vm, 0, event);
    is(takes(vm, 0), event);
    if (shared) {
        is(call(vm, 1, SDEI_EVENT_DISABLE, event), SDEI_SUCCESS);
        is(call(vm, 1, SDEI_EVENT_ROUTING_SET, event), SDEI_DENIED);
    }
    is(call(vm, other, SDEI_EVENT_UNREGISTER, event), SDEI_PENDING);
    is(call(vm, other, SDEI_EVENT_UNREGISTER, event), SDEI_PENDING);
    is(status(vm, other, event), SDEI_STATUS_RUNNING);
    is(register_at(vm, other, event), SDEI_DENIED);
    is(call(vm, other, SDEI_EVENT_ENABLE, event), SDEI_DENIED);
    is(call(vm, other, SDEI_PRIVATE_RESET),
       shared ? SDEI_SUCCESS : SDEI_DENIED);
    is(call(vm, other, SDEI_SHARED_RESET), shared ? SDEI_DENIED : SDEI_SUCCESS);
    complete(vm, 0);
    is(status(vm, other, event), 0);
    ready(vm, other, event);
}

static void test_shared(VM *vm, gconstpointer data)
{
    ready(vm, 0, SHARED);
    is(status(vm, 2, SHARED), 3);
    is(call(vm, 1, SDEI_EVENT_ROUTING_SET, SHARED), SDEI_DENIED);
    comes(vm, 0, SHARED);
    is(takes(vm, 0), -1);

    /* Any unmasked PE takes the event, one PE at a time */
    is(call(vm, 1, SDEI_PE_UNMASK), SDEI_SUCCESS);
    is(call(vm, 2, SDEI_PE_UNMASK), SDEI_SUCCESS);
    is(sdei_next(&vm->sdei, &vm->pe[2]), 1);
    is(takes(vm, 1), SHARED);
    comes(vm, 0, SHARED);
    is(takes(vm, 2), -1);
    complete(vm, 1);
    is(takes(vm, 2), SHARED);
    complete(vm, 2);

    /* Only one PE takes the event */
    is(call(vm, 0, SDEI_EVENT_DISABLE, SHARED), SDEI_SUCCESS);
    is(call(vm, 0, SDEI_EVENT_ROUTING_SET, SHARED, 2), SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_EVENT_ROUTING_SET, SHARED, 1, 5),
       SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_EVENT_ROUTING_SET, SHARED, 1, affinity(2)),
       SDEI_SUCCESS);
    is(call(vm, 0, SDEI_EVENT_ENABLE, SHARED), SDEI_SUCCESS);
    comes(vm, 1, SHARED);
    is(takes(vm, 1), -1);
    is(takes(vm, 2), SHARED);
}

static void test_signal(VM *vm, gconstpointer data)
{
    is(call(vm, 0, SDEI_EVENT_SIGNAL, URGENT, affinity(1)),
       SDEI_INVALID_PARAMETERS);
    is(call(vm, 0, SDEI_EVENT_SIGNAL, 0, affinity(PES)),
       SDEI_INVALID_PARAMETERS);
    /* The event is not registered */
    is(call(vm, 0, SDEI_EVENT_SIGNAL, 0, affinity(1)), SDEI_SUCCESS);
    for (int i = 0; i < PES; i++) {
        is(call(vm, i, SDEI_PE_UNMASK), SDEI_SUCCESS);
        ready(vm, i, 0);
        is(takes(vm, i), -1);
    }
    is(call(vm, 0, SDEI_EVENT_SIGNAL, 0, affinity(1)), SDEI_SUCCESS);
    is(takes(vm, 0), -1);
    is(takes(vm, 2), -1);
    is(takes(vm, 1), 0);
    is(status(vm, 0, 0), 3);
    is(status(vm, 1, 0), 7);
}

static void test_resets(VM *vm, gconstpointer data)
{
    for (int i = 0; i < 2; i++) {
        is(call(vm, i, SDEI_PE_UNMASK), SDEI_SUCCESS);
        ready(vm, i, NORMAL);
    }
    ready(vm, 0, SHARED);
    is(call(vm, 0, SDEI_PRIVATE_RESET), SDEI_SUCCESS);
    is(status(vm, 0, NORMAL), 0);
    is(status(vm, 1, NORMAL), 3);
    is(status(vm, 0, SHARED), 3);
    is(call(vm, 1, SDEI_SHARED_RESET), SDEI_SUCCESS);
    is(status(vm, 0, SHARED), 0);
    is(call(vm, 0, SDEI_PE_MASK), 1);

    /* Resets of the machine while a handler runs */
    ready(vm, 0, SHARED);
    comes(vm, 1, NORMAL);
    is(takes(vm, 1), NORMAL);
    sdei_reset_pe(&vm->pe[1]);
    sdei_reset_shared(&vm->sdei);
    is(status(vm, 1, NORMAL), 0);
    is(status(vm, 1, SHARED), 0);
    is(call(vm, 1, SDEI_EVENT_COMPLETE), SDEI_DENIED);
    is(call(vm, 1, SDEI_PE_MASK), 0);
    is(vm->pe[1].affinity, affinity(1));
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
#define TEST(name, fn, data) \
    g_test_add("/kvm-sdei/" name, VM, GUINT_TO_POINTER(data), set_up, fn, \
               tear_down)
    TEST("errors", test_errors, 0);
    TEST("info", test_info, 0);
    TEST("mask", test_mask, 0);
    TEST("pending", test_pending, 0);
    TEST("priorities", test_priorities, 0);
    TEST("resume", test_resume, 0);
    TEST("unregister/private", test_unregister, NORMAL);
    TEST("unregister/shared", test_unregister, SHARED);
    TEST("shared", test_shared, 0);
    TEST("signal", test_signal, 0);
    TEST("resets", test_resets, 0);
    return g_test_run();
}
