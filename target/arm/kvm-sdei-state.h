/*
 * SDEI 1.0: what a client has registered, and what runs on which PE
 *
 * The Software Delegated Exception Interface (Arm DEN0054A) lets an operating
 * system, the client, register handlers for events, which interrupt it
 * whatever it has masked.  Nothing here knows of vCPUs or asks KVM.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_SDEI_STATE_H
#define TARGET_ARM_KVM_SDEI_STATE_H

/* Calls of SMCCC, all of them of 64 bits: SDEI_FN_BASE + SdeiFunction */
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

/* What SDEI_EVENT_GET_INFO is asked for */
typedef enum SdeiInfo {
    SDEI_INFO_TYPE = 0,             /* 1: shared */
    SDEI_INFO_SIGNALED = 1,         /* 0: the client can signal it */
    SDEI_INFO_PRIORITY = 2,         /* 1: critical */
    SDEI_INFO_ROUTING_MODE = 3,     /* 1: to one PE */
    SDEI_INFO_ROUTING_AFFINITY = 4,
} SdeiInfo;

#define SDEI_FEATURE_BIND_SLOTS 0   /* what SDEI_FEATURES is asked for */

/* Bits of what SDEI_EVENT_STATUS returns */
#define SDEI_STATUS_REGISTERED  1
#define SDEI_STATUS_ENABLED     2
#define SDEI_STATUS_RUNNING     4

#define SDEI_ROUTE_TO_PE        1   /* flag of REGISTER and ROUTING_SET */

#define SDEI_EVENTS             8   /* that a VM can have */
#define SDEI_GPRS               18  /* x0 to x17, which a handler may change */
#define SDEI_PRIORITIES         2   /* 0: normal, 1: critical */

/* An event that a client can register */
typedef struct SdeiEvent {
    uint32_t number;        /* 0: the software event; bit 30: ours, not Arm's */
    bool shared;            /* one handler for all PEs, else each has its own */
    bool critical;          /* interrupts handlers of those that are not */
    bool signalable;        /* by the client, with SDEI_EVENT_SIGNAL */
} SdeiEvent;

/* What a client has asked for an event */
typedef struct SdeiHandler {
    bool registered;
    bool enabled;
    bool pending;
    bool to_pe;             /* shared: to the PE of @affinity alone */
    uint64_t entry;         /* guest virtual address */
    uint64_t argument;
    uint64_t affinity;
} SdeiHandler;

/* What a handler has interrupted */
typedef struct SdeiContext {
    bool running;           /* the handler has not completed */
    uint32_t event;         /* its number */
    uint64_t x[SDEI_GPRS];
    uint64_t pc;
    uint64_t pstate;
} SdeiContext;

typedef struct SdeiPE {
    uint64_t affinity;      /* as in MPIDR_EL1, affinity fields alone */
    bool masked;
    bool kicked;            /* its thread has been asked to take what it can */
    SdeiHandler own[SDEI_EVENTS];           /* of private events */
    SdeiContext context[SDEI_PRIORITIES];
} SdeiPE;

/* All of a VM.  The caller has one lock for it and its PEs. */
typedef struct Sdei {
    unsigned events;
    SdeiEvent event[SDEI_EVENTS];           /* constant while the VM runs */
    SdeiHandler shared[SDEI_EVENTS];        /* of shared events */
    GPtrArray *pes;                         /* of SdeiPE, not owned */
} Sdei;

/* The registers of a PE, as far as they matter here */
typedef struct SdeiRegs {
    uint64_t x[SDEI_GPRS];
    uint64_t pc;
    uint64_t pstate;
    uint64_t elr;           /* ELR_EL1 */
    uint64_t spsr;          /* SPSR_EL1 */
    /* What an exception to EL1 makes of PSTATE; not changed here */
    uint64_t pstate_kept;
    uint64_t pstate_set;
} SdeiRegs;

/* Before the VM runs.  @event is copied; at most SDEI_EVENTS can be added. */
void sdei_add_event(Sdei *s, const SdeiEvent *event);

/* @pe stays the caller's, and lives as long as @s; call sdei_reset_pe() next */
void sdei_add_pe(Sdei *s, SdeiPE *pe);

/* @pe is masked, and has nothing registered; nothing runs or is pending */
void sdei_reset_pe(SdeiPE *pe);

/* The same for shared events */
void sdei_reset_shared(Sdei *s);

/* The index of the event of a number, or -1 */
int sdei_find(const Sdei *s, uint32_t number);

/**
 * sdei_make_pending: an event has come, for @pe if it is a private one
 * @event: its index
 *
 * Returns false, and does nothing, if it is not registered.  An event that is
 * pending stays so, as an interrupt does that is triggered by an edge.
 */
bool sdei_make_pending(Sdei *s, SdeiPE *pe, int event);

/* Whether @pe could take @event, an index, now if it were pending */
bool sdei_could_take(const Sdei *s, const SdeiPE *pe, int event);

/* The index of the event that @pe can take now and should take first, or -1 */
int sdei_next(const Sdei *s, const SdeiPE *pe);

/**
 * sdei_deliver: let @pe enter the handler of sdei_next()
 * @regs: of @pe, changed to those with which the handler begins
 *
 * Returns that event's index, or -1 if there is none.
 */
int sdei_deliver(Sdei *s, SdeiPE *pe, SdeiRegs *regs);

/**
 * sdei_call: @pe has called @function, with parameters in x1 to x5
 * @regs: of @pe, changed to those with which it goes on
 *
 * Returns whether other PEs may have something to take that they could not
 * before: see sdei_next().  @pe itself may in any case.
 */
bool sdei_call(Sdei *s, SdeiPE *pe, uint32_t function, SdeiRegs *regs);

#endif
