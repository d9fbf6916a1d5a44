/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A guest that takes async page faults, and counts the tokens. It writes `mem`
 * MiB from 16 MiB on until it has moved. Then TASKS tasks in ring 3 touch each
 * page once; a task that misses a page sleeps until it is placed, and if all
 * sleep, another task counts. `async` (async.h) chooses other ways to miss
 * pages. A second processor, if there is one, interrupts the first all the
 * time, and measures how long it takes to answer.
 */
#include "async.h"
#include "touch.h"

#define MEMORY          0x1000000ull
#define TASKS           8
#define ANEW_AT         4               /* this many waiting tasks */
#define HPET            0xfed00000
#define PROTECTION      13
#define PAGE_FAULT      14
#define DONE_VECTOR     0x41
#define ANSWER_VECTOR   0x42
#define PERIOD_MS       200             /* between reports of answers */
#define USER_DATA       (24 | 3)
#define USER_CODE       (32 | 3)
#define TSS             40
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
static uint64_t n, khz;
static uint32_t done;

/* The segments of boot.S, and those of ring 3 */
static uint64_t gdt[7] = {
    0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cff3000000ffff,
    0x00affb000000ffff,
};
static struct {
    uint32_t reserved;
    uint64_t rsp0;
    uint32_t others[22], io_map;
} __attribute__((packed)) tss;
static uint8_t kernel_stack[4096] __attribute__((aligned(16)));

static volatile uint64_t *page(uint64_t i)
{
    return (volatile uint64_t *)(MEMORY + (i << PAGE_SHIFT));
}

_Static_assert(PROTECTION == 13 && PAGE_FAULT == 14 && ASYNC_VECTOR == 0x40 && DONE_VECTOR == 0x41 &&
               ANSWER_VECTOR == 0x42, "as the entries push them");
extern const char protection_entry[], fault_entry[], ready_entry[], done_entry[], answer_entry[];
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
    "               jmp 1f\n"
    "answer_entry:  push $0\n"
    "               push $0x42\n"
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
    (void)task;
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
    print("{\"event\": \"async\", \"announced\": %u, \"come\": %u, "
          "\"woken_all\": %u, \"unknown\": %u, \"forgotten\": %u, "
          "\"refused\": %u, \"counter\": %u}\n", counts.announced, counts.come,
          counts.woken_all, counts.unknown, counts.forgotten, counts.refused,
          counter);
    print("{\"event\": \"end\", \"checked_pages\": %u, \"bad_pages\": %u, "
          "\"bad_regions\": 0}\n", n, bad);
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

static volatile uint32_t answers;

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
    case ANSWER_VECTOR:
        answers++;
        end_of_interrupt();
        break;
    }
}

/* Ring 3 for tasks: segments, a stack for interrupts, access to all memory */
static void set_up_tasks(void)
{
    struct { uint16_t limit; uint64_t base; } __attribute__((packed)) ptr = {
        sizeof(gdt) - 1, (uintptr_t)gdt,
    };
    uint64_t base = (uintptr_t)&tss, *level4, *level3;

    gdt[TSS >> 3] = (sizeof(tss) - 1) | (base & 0xffffff) << 16 |
                    0x89ull << 40 | (base >> 24 & 0xff) << 56;
    gdt[(TSS >> 3) + 1] = base >> 32;
    tss.rsp0 = (uintptr_t)kernel_stack + sizeof(kernel_stack);
    tss.io_map = sizeof(tss) << 16;
    asm volatile("lgdt %0; ltr %w1" : : "m"(ptr), "r"(TSS) : "memory");

    asm volatile("mov %%cr3, %0" : "=r"(level4));
    level4[0] |= 4;
    level3 = (uint64_t *)(uintptr_t)(level4[0] & ~0xfffull);
    for (int i = 0; i < 4; i++) {
        uint64_t *level2 = (uint64_t *)(uintptr_t)(level3[i] & ~0xfffull);

        level3[i] |= 4;
        for (int k = 0; k < 512; k++) {
            level2[k] |= 4;
        }
    }
    asm volatile("mov %0, %%cr3" : : "r"(level4) : "memory");

    for (int i = 0; i <= TASKS; i++) {
        struct task *t = tasks + i;

        t->frame = (struct frame) {
            .rip = (uintptr_t)(i < TASKS ? faulter : count), .cs = USER_CODE,
            .rdi = i, .rflags = RFLAGS_IF | 2, .ss = USER_DATA,
            .rsp = (uintptr_t)t->stack + sizeof(t->stack) - 8,
        };
    }
}

/* The first processor answers until all pages have been touched */
static void ask(void)
{
    uint64_t asked = 0, most = 0, period = ticks();

    while (!__atomic_load_n(&done, __ATOMIC_SEQ_CST)) {
        uint32_t before = answers;
        uint64_t start = ticks(), took;

        interrupt_others(ANSWER_VECTOR);
        while (answers == before &&
               !__atomic_load_n(&done, __ATOMIC_SEQ_CST)) {
            pause();
        }
        took = ticks() - start;
        asked++;
        most = took > most ? took : most;
        if (start + took - period > PERIOD_MS * khz) {
            print("{\"event\": \"answers\", \"count\": %u, "
                  "\"longest_us\": %u}\n", asked, most * 1000 / khz);
            asked = most = 0;
            period = ticks();
        }
        while (ticks() - start < khz) {
            pause();
        }
    }
}

_Noreturn void cpu_main(uint32_t cpu)
{
    uint64_t start;

    set_up_interrupts();
    if (cpu == 0) {
        khz = measure_khz();
        read_parameters();
        n = (uint64_t)par.mem_mb << (20 - PAGE_SHIFT);
        set_handler(PROTECTION, protection_entry, false);
        set_handler(PAGE_FAULT, fault_entry, false);
        set_handler(ASYNC_VECTOR, ready_entry, false);
        set_handler(DONE_VECTOR, done_entry, true);
        set_handler(ANSWER_VECTOR, answer_entry, false);
        set_up_tasks();
        data = &blocks[0].data;
        async_enable(data);
        start = ticks();
        while (!counts.woken_all && ticks() - start < 100 * khz) {
            asm volatile("sti; nop; cli" : : : "memory");
        }
        start_cpus();
        for (uint64_t i = 0; i < n; i++) {
            page(i)[0] = i + 1;
        }
        page(n)[0] = 0;
        print("{\"event\": \"ready\"}\n");
    }
    barrier();
    for (uint64_t i = 0; side() == SIDE_SOURCE; i++) {
        if (cpu == 0) {
            page(i % (n + 1))[1] = 0;
            data->reserved[0]++;        /* so that the block is missing, too */
        }
    }
    barrier();
    if (cpu) {
        ask();
        barrier();
        halt();
    }
    print("{\"event\": \"timing\"}\n");
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
    __atomic_store_n(&done, 1, __ATOMIC_SEQ_CST);
    barrier();
    finish();
}
