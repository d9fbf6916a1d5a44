/*
 * SDEI 1.0: the events that a client has registered, and running handlers
 *
 * The Software Delegated Exception Interface (Arm DEN0054A) lets an operating
 * system, the client, register handlers for events, which interrupt it even
 * while it masks interrupts.  This code neither uses vCPUs nor calls KVM.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_SDEI_STATE_H
#define TARGET_ARM_KVM_SDEI_STATE_H

/* SMCCC calls, all of them 64-bit: SDEI_FN_BASE + SdeiFunction */
#define SDEI_FN_BASE    0xc4000020
#define SDEI_FUNCTIONS  0x20

typedef enum SdeiFunction {
    SDEI_VERSION = 0x00,
    SDEI_EVENT_REGISTER = 0x01,
    SDEI_EVENT_ENABLE = 0x02,
    SDEI_EVENT_DISABLE = 0x03,
    SDEI_EVENT_CONTEXT = 0x04,
    SDEI_EVENT_COMPLETE = 0x05,
    SDEI_EVENT_COMPLETE_AND_RESUME = 0x06,
    SDEI_EVENT_UNREGISTER = 0x07,
    SDEI_EVENT_STATUS = 0x08,
    SDEI_EVENT_GET_INFO = 0x09,
    SDEI_EVENT_ROUTING_SET = 0x0a,
    SDEI_PE_MASK = 0x0b,
    SDEI_PE_UNMASK = 0x0c,
    SDEI_INTERRUPT_BIND = 0x0d,
    SDEI_INTERRUPT_RELEASE = 0x0e,
    SDEI_EVENT_SIGNAL = 0x0f,
    SDEI_FEATURES = 0x10,
    SDEI_PRIVATE_RESET = 0x11,
    SDEI_SHARED_RESET = 0x12,
} SdeiFunction;

typedef enum SdeiResult {
    SDEI_SUCCESS = 0,
    SDEI_NOT_SUPPORTED = -1,
    SDEI_INVALID_PARAMETERS = -2,
    SDEI_DENIED = -3,
    SDEI_PENDING = -5,
    SDEI_OUT_OF_RESOURCE = -10,
} SdeiResult;

/* Parameters of SDEI_EVENT_GET_INFO, and one of the two results */
typedef enum SdeiInfo {
    SDEI_INFO_TYPE = 0,             /* 1: shared */
    SDEI_INFO_SIGNALED = 1,         /* 0: the client can signal it */
    SDEI_INFO_PRIORITY = 2,         /* 1: critical */
    SDEI_INFO_ROUTING_MODE = 3,     /* 1: to one PE */
    SDEI_INFO_ROUTING_AFFINITY = 4,
} SdeiInfo;

#define SDEI_FEATURE_BIND_SLOTS 0   /* parameter of SDEI_FEATURES */

/* Bits of the result of SDEI_EVENT_STATUS */
#define SDEI_STATUS_REGISTERED  1
#define SDEI_STATUS_ENABLED     2
#define SDEI_STATUS_RUNNING     4

#define SDEI_ROUTE_TO_PE        1   /* flag of REGISTER and ROUTING_SET */

#define SDEI_EVENTS             8   /* the most that a VM can have */
#define SDEI_GPRS               18  /* x0 to x17, which a handler may change */
#define SDEI_PRIORITIES         2   /* 0: normal, 1: critical */

/* An event that a client can register */
typedef struct SdeiEvent {
    uint32_t number;        /* 0: the software event; bit 30: not Arm's */
    bool shared;            /* one handler for all PEs, else one per PE */
    bool critical;          /* interrupts handlers of normal events */
    bool signalable;        /* the client may call SDEI_EVENT_SIGNAL */
} SdeiEvent;

/* The state that a client has set for an event */
typedef struct SdeiHandler {
    bool registered;
    bool enabled;
    bool pending;
    bool to_pe;             /* shared: only to the PE of @affinity */
    uint64_t entry;         /* guest virtual address */
    uint64_t argument;
    uint64_t affinity;
} SdeiHandler;

/* The code that a handler has interrupted */
typedef struct SdeiContext {
    bool running;           /* the handler has not completed */
    uint32_t event;         /* the event's number */
    uint64_t x[SDEI_GPRS];
    uint64_t pc;
    uint64_t pstate;
} SdeiContext;

typedef struct SdeiPE {
    uint64_t affinity;      /* the affinity fields of MPIDR_EL1 */
    bool masked;
    bool kicked;            /* its thread is to deliver pending events */
    SdeiHandler own[SDEI_EVENTS];           /* handlers of private events */
    SdeiContext context[SDEI_PRIORITIES];
} SdeiPE;

/* The state of a VM.  One lock of the caller protects it and its PEs. */
typedef struct Sdei {
    unsigned events;
    SdeiEvent event[SDEI_EVENTS];           /* constant while the VM runs */
    SdeiHandler shared[SDEI_EVENTS];        /* handlers of shared events */
    GPtrArray *pes;                         /* SdeiPEs, not owned */
} Sdei;

/* The registers of a PE that SDEI reads or changes */
typedef struct SdeiRegs {
    uint64_t x[SDEI_GPRS];
    uint64_t pc;
    uint64_t pstate;
    uint64_t elr;           /* ELR_EL1 */
    uint64_t spsr;          /* SPSR_EL1 */
    /* The bits of PSTATE that an exception to EL1 keeps, and sets; read only */
    uint64_t pstate_kept;
    uint64_t pstate_set;
} SdeiRegs;

/* Before the VM runs.  Copies @event; a VM has at most SDEI_EVENTS. */
void sdei_add_event(Sdei *s, const SdeiEvent *event);

/* @pe must live as long as @s; the caller calls sdei_reset_pe() next */
void sdei_add_pe(Sdei *s, SdeiPE *pe);

/* Masks @pe; unregisters its private events, also running and pending ones */
void sdei_reset_pe(SdeiPE *pe);

/* Unregisters the shared events */
void sdei_reset_shared(Sdei *s);

/* Returns the index of event @number, or -1 */
int sdei_find(const Sdei *s, uint32_t number);

/**
 * sdei_make_pending: make an event pending, for @pe if it is private
 * @event: its index
 *
 * Returns false, without effect, if @event is not registered.  Like an edge-
 * triggered interrupt, a pending event becomes pending only once.
 */
bool sdei_make_pending(Sdei *s, SdeiPE *pe, int event);

/* Whether @pe could take @event, an index, now if it were pending */
bool sdei_could_take(const Sdei *s, const SdeiPE *pe, int event);

/* Returns the index of the event that @pe should take now, or -1 */
int sdei_next(const Sdei *s, const SdeiPE *pe);

/**
 * sdei_deliver: let @pe enter the handler of the event from sdei_next()
 * @regs: of @pe, changed to those with which the handler begins
 *
 * Returns the event's index, or -1 if there is none.
 */
int sdei_deliver(Sdei *s, SdeiPE *pe, SdeiRegs *regs);

/**
 * sdei_call: @pe has called @function, with parameters in x1 to x5
 * @regs: of @pe, changed to those after the call
 *
 * Returns whether other PEs may be able to take an event that they could not
 * take before: see sdei_next().  @pe itself may be in any case.
 */
bool sdei_call(Sdei *s, SdeiPE *pe, uint32_t function, SdeiRegs *regs);

#endif
