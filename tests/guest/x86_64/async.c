/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that takes async page faults on its only processor, and counts the
 * tokens. It writes `mem` MiB from 16 MiB on until it has moved. Then TASKS
 * tasks in ring 3 touch each page once; a task that misses a page sleeps until
 * it is placed, and if all sleep, another task counts. `async` (async.h)
 * chooses other ways to miss pages.
 */
#define PAGES           0x1000000ull
#include "async.h"
#include "pages.h"

#define TASKS           8
#define ANEW_AT         4               /* this many waiting tasks */
#define HPET            0xfed00000
#define PROTECTION      13
#define PAGE_FAULT      14
#define DONE_VECTOR     0x41
/* Segments of boot.S */
#define USER_DATA       (0x20 | 3)
#define USER_CODE       (0x28 | 3)
#define TSS             0x30
#define RFLAGS_IF       0x200

struct frame {
    uint64_t r15, r14, r13, r12, r11, r10, r9, r8, rbp, rdi, rsi, rdx, rcx, rbx, rax;
    uint64_t vector, error, rip, cs, rflags, rsp, ss;
};

static struct task {
    enum { READY, WAITING, DONE } state;
    uint32_t token;
    struct frame frame;
    uint8_t stack[1024] __attribute__((aligned(16)));
} tasks[TASKS + 1], *current;           /* the last task counts */

static struct { struct async_data data; } __attribute__((aligned(4096))) blocks[2];
static struct async_data *data;
static struct {
    uint64_t announced, come, woken_all, unknown, forgotten, refused;
} counts;
static volatile uint64_t counter;
static uint64_t n;
static uint32_t done;

extern uint64_t gdt[];
static struct {
    uint32_t reserved;
    uint64_t rsp0;
    uint32_t others[22], io_map;
} __attribute__((packed)) tss;
static uint8_t kernel_stack[4096] __attribute__((aligned(16)));

_Static_assert(PROTECTION == 13 && PAGE_FAULT == 14 && ASYNC_VECTOR == 0x40 &&
               DONE_VECTOR == 0x41, "as the entries push them");
extern const char protection_entry[], fault_entry[], ready_entry[],
    done_entry[];
_Noreturn void resume(struct frame *frame);
asm("protection_entry: push $13\n"
    "               jmp 1f\n"
    "fault_entry:   push $14\n"
    "               jmp 1f\n"
    "ready_entry:   push $0\n"
    "               push $0x40\n"
    "               jmp 1f\n"
    "done_entry:    push $0\n"
    "               push $0x41\n"
    "1:  push %rax; push %rbx; push %rcx; push %rdx; push %rsi; push %rdi\n"
    "    push %rbp; push %r8; push %r9; push %r10; push %r11; push %r12\n"
    "    push %r13; push %r14; push %r15\n"
    "    mov %rsp, %rdi\n"
    "    cld\n"
    "    call trap\n"
    "2:  pop %r15; pop %r14; pop %r13; pop %r12; pop %r11; pop %r10; pop %r9\n"
    "    pop %r8; pop %rbp; pop %rdi; pop %rsi; pop %rdx; pop %rcx; pop %rbx\n"
    "    pop %rax\n"
    "    add $16, %rsp\n"
    "    iretq\n"
    "resume: mov %rdi, %rsp\n"
    "    jmp 2b\n");

/* Runs in ring 3 */
static void faulter(uint64_t task)
{
    for (uint64_t i = task; i < n; i += TASKS) {
        page(i)[1]++;
    }
    asm volatile("int %0" : : "i"(DONE_VECTOR) : "memory");
}

static void count(uint64_t task)
{
    for (;;) {
        counter++;
    }
}

static _Noreturn void finish(void)
{
    uint64_t bad = 0;

    for (uint64_t i = 0; i < n; i++) {
        bad += page(i)[0] != i + 1 || page(i)[1] != 1;
    }
    if (par.async & ASYNC_SMM) {
        bad += page(n)[0] != 1;
    }
    report("'async', 'announced': %u, 'come': %u, 'woken_all': %u, "
           "'unknown': %u, 'forgotten': %u, 'refused': %u, 'counter': %u",
           counts.announced, counts.come, counts.woken_all, counts.unknown,
           counts.forgotten, counts.refused, counter);
    report("'end', 'checked_pages': %u, 'bad_pages': %u, 'bad_regions': 0",
           n, bad);
    halt();
}

/* Another task runs when @f returns */
static void schedule(struct frame *f)
{
    struct task *next = tasks;

    while (next->state != READY) {
        next++;
    }
    current = next;
    *f = next->frame;
}

static uint32_t wake(uint32_t token)
{
    uint32_t woken = 0;

    for (struct task *t = tasks; t < tasks + TASKS; t++) {
        if (t->state == WAITING && (token == WAKE_ALL || t->token == token)) {
            t->state = READY;
            woken++;
        }
    }
    return woken;
}

static void missing(struct frame *f, uint32_t token)
{
    uint32_t waiting = 0;

    if (!data->flags || f->error) {
        die("a page fault that is none of the hypervisor's");
    }
    data->flags = 0;
    counts.announced++;
    if (!(f->cs & 3)) {
        die("a token was delivered in ring 0");
    }
    current->frame = *f;
    current->state = WAITING;
    current->token = token;
    for (int i = 0; i < TASKS; i++) {
        waiting += tasks[i].state == WAITING;
    }
    if (par.async & (ASYNC_ANEW | ASYNC_REFUSED) && waiting == ANEW_AT &&
        !counts.forgotten) {
        if (par.async & ASYNC_REFUSED) {
            wrmsr(MSR_ASYNC_PF_EN, HPET | EN_ENABLED | EN_BY_INTERRUPT);
        } else {
            /* As when one kernel starts another */
            wrmsr(MSR_ASYNC_PF_EN, 0);
            data = &blocks[1].data;
            async_enable(data);
        }
        counts.forgotten = wake(WAKE_ALL);
    }
    schedule(f);
}

static void come(void)
{
    uint32_t token = data->token, woken = wake(token);

    if (token == WAKE_ALL) {
        counts.woken_all++;
    } else if (woken == 1) {
        counts.come++;
    } else {
        counts.unknown++;
    }
    data->token = 0;
    wrmsr(MSR_ASYNC_PF_ACK, 1);
}

void trap(struct frame *f)
{
    uint64_t cr2;

    switch (f->vector) {
    case PROTECTION:
        if (!(par.async & ASYNC_REFUSED)) {
            die("a general protection fault");
        }
        counts.refused++;
        f->rip += 2;            /* WRMSR */
        break;
    case PAGE_FAULT:
        asm volatile("mov %%cr2, %0" : "=r"(cr2));
        missing(f, cr2);
        break;
    case ASYNC_VECTOR:
        come();
        end_of_interrupt();
        if (current == tasks + TASKS) {
            current->frame = *f;
            schedule(f);
        }
        break;
    case DONE_VECTOR:
        current->state = DONE;
        if (++done == TASKS) {
            finish();
        }
        schedule(f);
        break;
    }
}

/* Ring 3 for tasks: a stack for interrupts, and first contents of registers */
static void set_up_tasks(void)
{
    uint64_t base = (uintptr_t)&tss;

    gdt[TSS >> 3] = (sizeof(tss) - 1) | (base & 0xffffff) << 16 |
                    0x89ull << 40 | (base >> 24 & 0xff) << 56;
    gdt[(TSS >> 3) + 1] = base >> 32;
    tss.rsp0 = (uintptr_t)kernel_stack + sizeof(kernel_stack);
    tss.io_map = sizeof(tss) << 16;
    asm volatile("ltr %w0" : : "r"(TSS) : "memory");

    for (int i = 0; i <= TASKS; i++) {
        struct task *t = tasks + i;

        t->frame = (struct frame) {
            .rip = (uintptr_t)(i < TASKS ? faulter : count), .cs = USER_CODE,
            .rdi = i, .rflags = RFLAGS_IF | 2, .ss = USER_DATA,
            .rsp = (uintptr_t)t->stack + sizeof(t->stack) - 8,
        };
    }
}

void run_payload(uint32_t cpu)
{
    uint64_t start;

    n = number_of_pages();
    set_handler(PROTECTION, protection_entry, false);
    set_handler(PAGE_FAULT, fault_entry, false);
    set_handler(ASYNC_VECTOR, ready_entry, false);
    set_handler(DONE_VECTOR, done_entry, true);
    set_up_tasks();
    data = &blocks[0].data;
    async_enable(data);
    start = ticks();
    while (!counts.woken_all && ticks() - start < 100 * khz) {
        asm volatile("sti; nop; cli" : : : "memory");
    }
    for (uint64_t i = 0; i < n; i++) {
        page(i)[0] = i + 1;
    }
    page(n)[0] = 0;
    report("'ready'");
    for (uint64_t i = 0; side() == SIDE_SOURCE; i++) {
        page(i % (n + 1))[1] = 0;
        data->reserved[0]++;        /* so that the block is missing, too */
    }
    report("'timing'");
    if (par.async & ASYNC_SMM) {
        smi_increment(page(n));
    }
    if (!(par.async & ASYNC_KERNEL)) {
        current = tasks;
        resume(&tasks[0].frame);
    }
    asm volatile("sti");
    for (uint64_t i = 0; i < n; i++) {
        page(i)[1]++;
    }
    asm volatile("cli");
    finish();
}
