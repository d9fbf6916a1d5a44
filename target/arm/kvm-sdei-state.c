/*
 * SDEI 1.0: the events that a client has registered, and running handlers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "kvm-sdei-state.h"

#define VERSION         (1ULL << 48)    /* 1.0, without a vendor */
#define INTERRUPT_FIRST 16              /* lower ones are SGIs */
#define INTERRUPT_LAST  1019

void sdei_add_event(Sdei *s, const SdeiEvent *event)
{
    g_assert(s->events < SDEI_EVENTS && sdei_find(s, event->number) < 0);
    s->event[s->events++] = *event;
}

void sdei_add_pe(Sdei *s, SdeiPE *pe)
{
    if (!s->pes) {
        s->pes = g_ptr_array_new();
    }
    g_ptr_array_add(s->pes, pe);
}

void sdei_reset_pe(SdeiPE *pe)
{
    *pe = (SdeiPE) { .affinity = pe->affinity, .masked = true };
}

void sdei_reset_shared(Sdei *s)
{
    memset(s->shared, 0, sizeof(s->shared));
}

int sdei_find(const Sdei *s, uint32_t number)
{
    for (int i = 0; i < s->events; i++) {
        if (s->event[i].number == number) {
            return i;
        }
    }
    return -1;
}

static SdeiPE *sdei_pe(const Sdei *s, uint64_t affinity)
{
    for (int i = 0; i < s->pes->len; i++) {
        SdeiPE *pe = g_ptr_array_index(s->pes, i);

        if (pe->affinity == affinity) {
            return pe;
        }
    }
    return NULL;
}

static SdeiHandler *sdei_handler(Sdei *s, SdeiPE *pe, int event)
{
    return s->event[event].shared ? &s->shared[event] : &pe->own[event];
}

/* The innermost handler: a normal event never interrupts a critical one */
static SdeiContext *sdei_current(SdeiPE *pe)
{
    for (int i = SDEI_PRIORITIES - 1; i >= 0; i--) {
        if (pe->context[i].running) {
            return &pe->context[i];
        }
    }
    return NULL;
}

static bool sdei_runs_on(const Sdei *s, const SdeiPE *pe, int event)
{
    const SdeiContext *context = &pe->context[s->event[event].critical];

    return context->running && context->event == s->event[event].number;
}

static bool sdei_runs(const Sdei *s, const SdeiPE *pe, int event)
{
    if (!s->event[event].shared) {
        return sdei_runs_on(s, pe, event);
    }
    for (int i = 0; i < s->pes->len; i++) {
        if (sdei_runs_on(s, g_ptr_array_index(s->pes, i), event)) {
            return true;
        }
    }
    return false;
}

bool sdei_make_pending(Sdei *s, SdeiPE *pe, int event)
{
    SdeiHandler *handler = sdei_handler(s, pe, event);

    handler->pending = handler->registered;
    return handler->pending;
}

bool sdei_could_take(const Sdei *s, const SdeiPE *pe, int event)
{
    const SdeiEvent *e = &s->event[event];
    const SdeiHandler *handler = e->shared ? &s->shared[event] :
                                 &pe->own[event];

    return handler->registered && handler->enabled && !pe->masked &&
           !pe->context[1].running &&
           (e->critical || !pe->context[0].running) &&
           (!e->shared || !handler->to_pe ||
            handler->affinity == pe->affinity) &&
           !sdei_runs(s, pe, event);
}

static bool sdei_can_take(const Sdei *s, const SdeiPE *pe, int event)
{
    const SdeiHandler *handler = s->event[event].shared ? &s->shared[event] :
                                 &pe->own[event];

    return handler->pending && sdei_could_take(s, pe, event);
}

int sdei_next(const Sdei *s, const SdeiPE *pe)
{
    int next = -1;

    for (int i = 0; i < s->events; i++) {
        if ((next < 0 || (s->event[i].critical && !s->event[next].critical)) &&
            sdei_can_take(s, pe, i)) {
            next = i;
        }
    }
    return next;
}

static uint64_t sdei_exception_pstate(const SdeiRegs *regs, uint64_t from)
{
    return (from & regs->pstate_kept) | regs->pstate_set;
}

int sdei_deliver(Sdei *s, SdeiPE *pe, SdeiRegs *regs)
{
    int event = sdei_next(s, pe);
    SdeiContext *context;
    SdeiHandler *handler;

    if (event < 0) {
        return -1;
    }
    context = &pe->context[s->event[event].critical];
    context->running = true;
    context->event = s->event[event].number;
    memcpy(context->x, regs->x, sizeof(context->x));
    context->pc = regs->pc;
    context->pstate = regs->pstate;

    handler = sdei_handler(s, pe, event);
    handler->pending = false;
    regs->x[0] = context->event;
    regs->x[1] = handler->argument;
    regs->x[2] = context->pc;
    regs->x[3] = context->pstate;
    regs->pc = handler->entry;
    regs->pstate = sdei_exception_pstate(regs, context->pstate);
    return event;
}

static int64_t sdei_context(SdeiPE *pe, uint32_t gpr)
{
    SdeiContext *context = sdei_current(pe);

    if (!context) {
        return SDEI_DENIED;
    }
    return gpr < SDEI_GPRS ? context->x[gpr] : SDEI_INVALID_PARAMETERS;
}

/*
 * Returns to the interrupted code or, with @resume, to an address at which the
 * client handles an exception that the interrupted code seems to have taken.
 */
static void sdei_complete(SdeiPE *pe, bool resume, SdeiRegs *regs)
{
    SdeiContext *context = sdei_current(pe);
    uint64_t address = regs->x[1];

    if (!context) {
        regs->x[0] = SDEI_DENIED;
        return;
    }
    context->running = false;
    memcpy(regs->x, context->x, sizeof(regs->x));
    if (resume) {
        regs->elr = context->pc;
        regs->spsr = context->pstate;
        regs->pc = address;
        regs->pstate = sdei_exception_pstate(regs, context->pstate);
    } else {
        regs->pc = context->pc;
        regs->pstate = context->pstate;
    }
}

static bool sdei_route_is_valid(const Sdei *s, int event, uint64_t flags,
                                uint64_t affinity)
{
    /* The PE of a private event is fixed, whatever @flags request */
    return !(flags & ~SDEI_ROUTE_TO_PE) &&
           (!flags || !s->event[event].shared || sdei_pe(s, affinity));
}

static int64_t sdei_register(Sdei *s, SdeiPE *pe, int event, uint64_t entry,
                             uint64_t argument, uint64_t flags,
                             uint64_t affinity)
{
    SdeiHandler *handler = sdei_handler(s, pe, event);

    if (!entry || entry % 4 ||
        !sdei_route_is_valid(s, event, flags, affinity)) {
        return SDEI_INVALID_PARAMETERS;
    }
    if (handler->registered || sdei_runs(s, pe, event)) {
        return SDEI_DENIED;
    }
    *handler = (SdeiHandler) {
        .registered = true,
        .to_pe = flags,
        .entry = entry,
        .argument = argument,
        .affinity = affinity,
    };
    return SDEI_SUCCESS;
}

/* A running handler continues, and its context stays until it completes */
static int64_t sdei_unregister(Sdei *s, SdeiPE *pe, int event)
{
    SdeiHandler *handler = sdei_handler(s, pe, event);
    bool was = handler->registered;

    *handler = (SdeiHandler) { 0 };
    if (sdei_runs(s, pe, event)) {
        return SDEI_PENDING;
    }
    return was ? SDEI_SUCCESS : SDEI_DENIED;
}

static int64_t sdei_unregister_all(Sdei *s, SdeiPE *pe, bool shared)
{
    int64_t result = SDEI_SUCCESS;

    for (int i = 0; i < s->events; i++) {
        if (s->event[i].shared == shared &&
            sdei_unregister(s, pe, i) == SDEI_PENDING) {
            result = SDEI_DENIED;
        }
    }
    return result;
}

static int64_t sdei_enable(Sdei *s, SdeiPE *pe, int event, bool enable)
{
    SdeiHandler *handler = sdei_handler(s, pe, event);

    if (!handler->registered) {
        return SDEI_DENIED;
    }
    handler->enabled = enable;
    return SDEI_SUCCESS;
}

static int64_t sdei_status(Sdei *s, SdeiPE *pe, int event)
{
    SdeiHandler *handler = sdei_handler(s, pe, event);

    return (handler->registered ? SDEI_STATUS_REGISTERED : 0) |
           (handler->enabled ? SDEI_STATUS_ENABLED : 0) |
           (sdei_runs(s, pe, event) ? SDEI_STATUS_RUNNING : 0);
}

static int64_t sdei_get_info(Sdei *s, int event, uint32_t info)
{
    SdeiHandler *handler = &s->shared[event];

    switch (info) {
    case SDEI_INFO_TYPE:
        return s->event[event].shared;
    case SDEI_INFO_SIGNALED:
        return !s->event[event].signalable;
    case SDEI_INFO_PRIORITY:
        return s->event[event].critical;
    case SDEI_INFO_ROUTING_MODE:
    case SDEI_INFO_ROUTING_AFFINITY:
        if (!s->event[event].shared) {
            return SDEI_INVALID_PARAMETERS;
        }
        if (!handler->registered) {
            return SDEI_DENIED;
        }
        if (info == SDEI_INFO_ROUTING_MODE) {
            return handler->to_pe;
        }
        return handler->to_pe ? handler->affinity : SDEI_INVALID_PARAMETERS;
    }
    return SDEI_INVALID_PARAMETERS;
}

static int64_t sdei_routing_set(Sdei *s, SdeiPE *pe, int event, uint64_t flags,
                                uint64_t affinity)
{
    SdeiHandler *handler = &s->shared[event];

    if (!s->event[event].shared ||
        !sdei_route_is_valid(s, event, flags, affinity)) {
        return SDEI_INVALID_PARAMETERS;
    }
    if (!handler->registered || handler->enabled || sdei_runs(s, pe, event)) {
        return SDEI_DENIED;
    }
    handler->to_pe = flags;
    handler->affinity = affinity;
    return SDEI_SUCCESS;
}

/* A PE ignores an event that it has not registered */
static int64_t sdei_signal(Sdei *s, int event, uint64_t affinity)
{
    SdeiPE *pe = sdei_pe(s, affinity);

    if (!s->event[event].signalable || !pe) {
        return SDEI_INVALID_PARAMETERS;
    }
    sdei_make_pending(s, pe, event);
    return SDEI_SUCCESS;
}

static int64_t sdei_mask(SdeiPE *pe, bool mask)
{
    bool newly = mask && !pe->masked;

    pe->masked = mask;
    return newly;
}

/* No interrupt can be bound: there are no slots, private or shared */
static int64_t sdei_features(uint32_t feature)
{
    return feature == SDEI_FEATURE_BIND_SLOTS ? 0 : SDEI_INVALID_PARAMETERS;
}

static int64_t sdei_bind(uint32_t interrupt)
{
    return interrupt >= INTERRUPT_FIRST && interrupt <= INTERRUPT_LAST ?
           SDEI_OUT_OF_RESOURCE : SDEI_INVALID_PARAMETERS;
}

/* Serves the calls that return to the caller; @arg: x1 to x5 */
static int64_t sdei_result(Sdei *s, SdeiPE *pe, uint32_t function,
                           const uint64_t *arg)
{
    int event;

    switch (function) {
    case SDEI_VERSION:
        return VERSION;
    case SDEI_EVENT_CONTEXT:
        return sdei_context(pe, arg[0]);
    case SDEI_PE_MASK:
    case SDEI_PE_UNMASK:
        return sdei_mask(pe, function == SDEI_PE_MASK);
    case SDEI_INTERRUPT_BIND:
        return sdei_bind(arg[0]);
    case SDEI_INTERRUPT_RELEASE:
        return SDEI_INVALID_PARAMETERS;
    case SDEI_FEATURES:
        return sdei_features(arg[0]);
    case SDEI_PRIVATE_RESET:
    case SDEI_SHARED_RESET:
        return sdei_unregister_all(s, pe, function == SDEI_SHARED_RESET);
    case SDEI_EVENT_REGISTER:
    case SDEI_EVENT_ENABLE:
    case SDEI_EVENT_DISABLE:
    case SDEI_EVENT_UNREGISTER:
    case SDEI_EVENT_STATUS:
    case SDEI_EVENT_GET_INFO:
    case SDEI_EVENT_ROUTING_SET:
    case SDEI_EVENT_SIGNAL:
        break;
    default:
        return SDEI_NOT_SUPPORTED;
    }

    event = sdei_find(s, arg[0]);
    if (event < 0) {
        return SDEI_INVALID_PARAMETERS;
    }
    switch (function) {
    case SDEI_EVENT_REGISTER:
        return sdei_register(s, pe, event, arg[1], arg[2], arg[3], arg[4]);
    case SDEI_EVENT_ENABLE:
    case SDEI_EVENT_DISABLE:
        return sdei_enable(s, pe, event, function == SDEI_EVENT_ENABLE);
    case SDEI_EVENT_UNREGISTER:
        return sdei_unregister(s, pe, event);
    case SDEI_EVENT_STATUS:
        return sdei_status(s, pe, event);
    case SDEI_EVENT_GET_INFO:
        return sdei_get_info(s, event, arg[1]);
    case SDEI_EVENT_ROUTING_SET:
        return sdei_routing_set(s, pe, event, arg[1], arg[2]);
    default:
        return sdei_signal(s, event, arg[1]);
    }
}

static bool sdei_is_shared(const Sdei *s, uint32_t number)
{
    int event = sdei_find(s, number);

    return event >= 0 && s->event[event].shared;
}

bool sdei_call(Sdei *s, SdeiPE *pe, uint32_t function, SdeiRegs *regs)
{
    SdeiContext *context = sdei_current(pe);

    switch (function) {
    case SDEI_EVENT_COMPLETE:
    case SDEI_EVENT_COMPLETE_AND_RESUME:
        sdei_complete(pe, function == SDEI_EVENT_COMPLETE_AND_RESUME, regs);
        return context && sdei_is_shared(s, context->event);
    default:
        regs->x[0] = sdei_result(s, pe, function, regs->x + 1);
        return function == SDEI_EVENT_SIGNAL ||
               (function == SDEI_EVENT_ENABLE && sdei_is_shared(s, regs->x[1]));
    }
}
