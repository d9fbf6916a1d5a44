/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The only program of the Linux guest, as process 1. Threads write and check memory by a pattern, threads compute,
 * processes fork, and a thread uses a disk. At each interval, a virtio console gets a report of all counters, in one
 * line:
 *
 *     ms=1234 real=... writer0=17 writer1=... computer0=... forks0=... sweeps=... bad=0
 *
 * The parameters are numbers, which the kernel passes on from its command line as variables of the environment: see
 * parameters below.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/membarrier.h>
#include <linux/ptp_clock.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define LATE_US 10000
#define STRIDE 64                       /* one word is checked per cache line */
#define MAX_THREADS 64
#define WORK_REST_S 3

/* Not each thread needs its argument */
#pragma GCC diagnostic ignored "-Wunused-parameter"

static struct parameter {
    const char *name;
    unsigned long value;
} parameters[] = {
    { "guest_writers", 1 },             /* threads that write and check memory at random */
    { "guest_computers", 1 },           /* threads that compute */
    { "guest_forkers", 0 },             /* threads that fork processes */
    { "guest_copiers", 0 },             /* threads that let the kernel read user memory, and
                                           a thread that interrupts all processors */
    { "guest_mem", 32 },                /* MiB of memory, of all writers together */
    { "guest_interval", 250 },          /* ms between reports */
    { "guest_offline", 0 },             /* a thread takes the last processor off and on */
    { "guest_clocks", 0 },              /* threads, one per processor, that compare readings of all clocks */
    { "guest_ptp", 0 },                 /* phc2sys corrects the time of day by a PTP clock, which is
                                           this many seconds ahead: TAI - UTC */
    { "guest_disk", 0 },                /* MiB of /dev/vda that a thread writes and reads, in twice
                                           as much memory */
    { "guest_work", 0 },                /* MiB of "guest_mem" that a thread checks page by page, with rests */
    { "guest_kexec", 0 },               /* ms after "ready" at which the kernel of /dev/vda takes over,
                                           with the initial RAM disk of /dev/vdb */
};

enum { WRITERS, COMPUTERS, FORKERS, COPIERS, MEM, INTERVAL, OFFLINE, CLOCKS, PTP, DISK, WORK, KEXEC };

#define P(what) (parameters[what].value)

/* Each array is in one page: tests read them in the guest's memory */
static atomic_ulong writes[MAX_THREADS] __attribute__((aligned(sizeof(atomic_ulong) * MAX_THREADS)));
static atomic_ulong computed[MAX_THREADS] __attribute__((aligned(sizeof(atomic_ulong) * MAX_THREADS)));
static atomic_ulong worked[MAX_THREADS] __attribute__((aligned(sizeof(atomic_ulong) * MAX_THREADS)));
static atomic_ulong copies[MAX_THREADS], readings[MAX_THREADS];
static atomic_ulong transfers;
/* Arrays that child processes share, too */
static atomic_ulong *forks, *bad;
static atomic_ulong sweeps;
/*
 * Microseconds: the longest time without an answer of another processor since the last report; the number of answers,
 * and of those later than LATE_US
 */
static atomic_ulong answer_max, answers, answers_late;

/* A virtio console: a line costs one exit */
static int console;
static int cpus;

static void say(const char *format, ...)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char line[8192];
    va_list args;
    int length;

    pthread_mutex_lock(&lock);
    va_start(args, format);
    length = vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    if (write(console, line, length) != length) {
        abort();
    }
    pthread_mutex_unlock(&lock);
}

static uint64_t now_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint64_t now_us(clockid_t clock)
{
    return now_ns(clock) / 1000;
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static void complain(const char *what, unsigned long where, uint64_t is, uint64_t must)
{
    if (atomic_fetch_add(bad, 1) < 20) {
        say("bad %s at %#lx: %#lx, must be %#lx\n", what, where, is, must);
    }
}

/* Memory: a page's contents depend on its number and on how often it was written. */

static char *memory;
static uint32_t *generations;

static void fill(unsigned long page)
{
    uint64_t word = mix((uint64_t)page << 32 | generations[page]);

    for (unsigned i = 0; i < PAGE; i += STRIDE) {
        *(volatile uint64_t *)(memory + page * PAGE + i) = word + i;
    }
}

static void check_at(const char *data, const char *what, unsigned long page, uint32_t generation)
{
    uint64_t word = mix((uint64_t)page << 32 | generation);

    for (unsigned i = 0; i < PAGE; i += STRIDE) {
        uint64_t is = *(volatile uint64_t *)(data + i);

        if (is != word + i) {
            complain(what, page * PAGE + i, is, word + i);
        }
    }
}

static void check(unsigned long page)
{
    check_at(memory + page * PAGE, "memory", page, generations[page]);
}

static void *writer(void *opaque)
{
    unsigned long n = (unsigned long)opaque;
    unsigned long pages = P(MEM) * (1 << 20) / PAGE / P(WRITERS);
    unsigned long sweep = 0;
    uint64_t random = n + 1;

    /* Writers take turns in the memory, page by page, so that the background sends all at the same rate */
    for (;;) {
        unsigned long page = n + (random = mix(random + 1)) % pages * P(WRITERS);

        check(page);
        generations[page]++;
        fill(page);
        if (atomic_fetch_add(&writes[n], 1) % 8 == 0) {
            check(n + sweep * P(WRITERS));
            if (++sweep == pages) {
                sweep = 0;
                atomic_fetch_add(&sweeps, 1);
            }
        }
    }
    return NULL;
}

/* Checks each page once, in order, without writers, and rests before the first page again */
static void *worker(void *opaque)
{
    unsigned long pages = P(WORK) * (1 << 20) / PAGE;

    for (unsigned long n = 0;; n++) {
        if (n % pages == 0) {
            sleep(WORK_REST_S);
        }
        check(n % pages);
        atomic_store(&worked[0], n + 1);
    }
    return NULL;
}

static uint64_t block(void)
{
    uint64_t x = 1;

    for (unsigned i = 0; i < 20000; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        __asm__ volatile("" : "+r"(x));
    }
    return x;
}

static uint64_t block_result;

static void *computer(void *opaque)
{
    unsigned long n = (unsigned long)opaque;

    for (;;) {
        uint64_t is = block();

        if (is != block_result) {
            complain("result", n, is, block_result);
        }
        atomic_fetch_add(&computed[n], 1);
    }
    return NULL;
}

/* A process whose children write memory that they share with their parent. */
static void forker(unsigned long n)
{
    enum { PAGES = 64 };
    uint64_t *mine = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    for (;;) {
        unsigned long round = atomic_load(&forks[n]);
        pid_t pid;
        int status;

        for (unsigned i = 0; i < PAGES; i++) {
            mine[i * PAGE / 8] = round + i;
        }
        pid = fork();
        if (pid == 0) {
            for (unsigned i = 0; i < PAGES; i++) {
                if (mine[i * PAGE / 8] != round + i) {
                    _exit(1);
                }
                mine[i * PAGE / 8] = 0;
            }
            _exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status) {
            complain("child", n, pid < 0 ? errno : status, 0);
        }
        for (unsigned i = 0; i < PAGES; i++) {
            if (mine[i * PAGE / 8] != round + i) {
                complain("parent's memory", n, mine[i * PAGE / 8], round + i);
            }
        }
        atomic_fetch_add(&forks[n], 1);
        usleep(5000);
    }
}

/* Lets the kernel read missing pages: faults in kernel mode, with interrupts on. */
static void *copier(void *opaque)
{
    unsigned long n = (unsigned long)opaque;
    unsigned long pages = P(MEM) * (1 << 20) / PAGE;
    uint64_t random = n + 1000;
    char buffer[PAGE];
    int fds[2];

    if (pipe(fds)) {
        abort();
    }
    for (;;) {
        random = mix(random + 1);
        if (write(fds[1], memory + random % pages * PAGE, 64) != 64 ||
            read(fds[0], buffer, sizeof(buffer)) != 64) {
            abort();
        }
        atomic_fetch_add(&copies[n], 1);
    }
    return NULL;
}

/*
 * The device reads and writes pages that no processor has touched since the last time. Behind the writers' memory, each
 * block has a page that is written to the disk; behind those, each has a page that is read from the disk.
 */
static void *disk_user(void *opaque)
{
    unsigned long first = P(MEM) * (1 << 20) / PAGE, blocks = P(DISK) * (1 << 20) / PAGE;
    /* @stored: the generation on the disk; @loaded: the generation read last */
    uint32_t *stored = calloc(2 * blocks, sizeof(*stored)), *loaded = stored + blocks;
    char *out = memory + first * PAGE, *in = out + blocks * PAGE, *again = in + blocks * PAGE;
    int disk = open("/dev/vda", O_RDWR | O_DIRECT);

    for (unsigned long i = 0; i < blocks; i++) {
        if (pwrite(disk, out + i * PAGE, PAGE, i * PAGE) != PAGE ||
            pread(disk, in + i * PAGE, PAGE, i * PAGE) != PAGE) {
            complain("disk", i, errno, 0);
            return NULL;
        }
    }
    /* All blocks, but never two neighbours in a row */
    for (unsigned long n = 0;; n += 1009) {
        unsigned long o = n % blocks, i = (n + blocks / 2) % blocks, page = first + o;

        if (pwrite(disk, out + o * PAGE, PAGE, o * PAGE) != PAGE ||
            pread(disk, again, PAGE, o * PAGE) != PAGE) {
            complain("disk", o, errno, 0);
            return NULL;
        }
        stored[o] = generations[page];
        check_at(again, "block", page, stored[o]);
        generations[page]++;
        fill(page);
        if (i % 2) {
            check_at(in + i * PAGE, "memory of a block", first + i, loaded[i]);
        }
        if (pread(disk, in + i * PAGE, PAGE, i * PAGE) != PAGE) {
            complain("disk", i, errno, 0);
            return NULL;
        }
        loaded[i] = stored[i];
        check_at(in + i * PAGE, "block", first + i, loaded[i]);
        atomic_fetch_add(&transfers, 1);
    }
}

/* The initial RAM disk contains the modules of Debian's kernel. */
static void load_driver(const char *path)
{
    int fd = open(path, O_RDONLY);

    if (syscall(SYS_finit_module, fd, "", 0)) {
        say("bad module %s: %d\n", path, errno);
    }
    close(fd);
}

/* Checks that no processor's clock is behind an earlier reading on another one. */
static void *clock_reader(void *opaque)
{
    static atomic_ulong last;

    for (;;) {
        for (int i = 0; i < 100; i++) {
            unsigned long seen = atomic_load(&last), now = now_ns(CLOCK_MONOTONIC);

            if (now < seen) {
                complain("clock", (unsigned long)opaque, now, seen);
            }
            while (seen < now && !atomic_compare_exchange_weak(&last, &seen, now)) {
                continue;
            }
        }
        atomic_fetch_add(&readings[(unsigned long)opaque], 100);
        usleep(1000);
    }
    return NULL;
}

/* Interrupts other processors, and waits for their answers. */
static void *interrupter(void *opaque)
{
    syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
    for (;;) {
        uint64_t start = now_us(CLOCK_MONOTONIC), took;

        syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
        took = now_us(CLOCK_MONOTONIC) - start;
        if (took > atomic_load(&answer_max)) {
            atomic_store(&answer_max, took);
        }
        atomic_fetch_add(&answers_late, took > LATE_US);
        atomic_fetch_add(&answers, 1);
        usleep(1000);
    }
    return NULL;
}

static int ptp = -1;

static void start_ptp(void)
{
    char offset[24];

    load_driver("/ptp_vmclock.ko");
    ptp = open("/dev/ptp0", O_RDWR);
    if (ptp < 0) {
        say("bad PTP clock: %d\n", errno);
        return;
    }
    snprintf(offset, sizeof(offset), "-%lu", P(PTP));
    if (!fork()) {
        execl("/phc2sys", "phc2sys", "-s", "/dev/ptp0", "-c", "CLOCK_REALTIME", "-O", offset,
              "-R", "4", "--step_threshold", "0.01", "-q", NULL);
        _exit(1);
    }
}

/* How many ns the PTP clock, without TAI - UTC, is ahead of CLOCK_REALTIME. */
static long ptp_ahead_ns(void)
{
    struct ptp_sys_offset_precise now;

    if (ioctl(ptp, PTP_SYS_OFFSET_PRECISE, &now)) {
        return LONG_MAX;
    }
    return (now.device.sec - (long)P(PTP) - now.sys_realtime.sec) * 1000000000 +
           now.device.nsec - (long)now.sys_realtime.nsec;
}

static atomic_ulong offs;

static void *offliner(void *opaque)
{
    char path[64];
    int fd;

    snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/online", cpus - 1);
    fd = open(path, O_WRONLY);
    for (;;) {
        if (write(fd, "0", 1) != 1 || (usleep(20000), write(fd, "1", 1) != 1)) {
            complain("processor", cpus - 1, errno, 0);
            return NULL;
        }
        atomic_fetch_add(&offs, 1);
        usleep(100000);
    }
}

/* Returns a descriptor of the copy */
static int copied(const char *from, const char *to)
{
    static char part[1 << 16];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t n;

    while ((n = read(in, part, sizeof(part))) > 0) {
        if (write(out, part, n) != n) {
            complain("copy", 0, errno, 0);
        }
    }
    close(in);
    close(out);
    return open(to, O_RDONLY);
}

/* The other kernel gets the same parameters, without "guest_kexec" */
static void load_kernel(void)
{
    char line[4096];
    ssize_t n = read(open("/proc/cmdline", O_RDONLY), line, sizeof(line) / 2);

    if (n <= 0) {
        complain("command line", 0, errno, 0);
        return;
    }
    /* In place of the newline */
    strcpy(line + n - 1, " guest_kexec=0");
    if (syscall(SYS_kexec_file_load, copied("/dev/vda", "/kernel"), copied("/dev/vdb", "/initrd"),
                strlen(line) + 1, line, 0)) {
        complain("kexec", 0, errno, 0);
    }
}

static void *other_kernel(void *opaque)
{
    usleep(P(KEXEC) * 1000);
    reboot(RB_KEXEC);
    complain("kexec", 1, errno, 0);
    return NULL;
}

/* Threads on one processor each, from first_cpu on and again; if that is -1, on any */
static void start(void *(*run)(void *), unsigned long threads, int first_cpu, int priority)
{
    pthread_attr_t attr;
    pthread_t thread;

    pthread_attr_init(&attr);
    if (priority) {
        struct sched_param param = { .sched_priority = priority };

        pthread_attr_setinheritsched(&attr, PTHREAD_EXPLICIT_SCHED);
        pthread_attr_setschedpolicy(&attr, SCHED_FIFO);
        pthread_attr_setschedparam(&attr, &param);
    }
    for (unsigned long i = 0; i < threads; i++) {
        if (first_cpu >= 0) {
            cpu_set_t set;

            CPU_ZERO(&set);
            CPU_SET(first_cpu + i % (cpus - first_cpu), &set);
            pthread_attr_setaffinity_np(&attr, sizeof(set), &set);
        }
        if (pthread_create(&thread, &attr, run, (void *)i)) {
            say("bad thread\n");
        }
    }
}

static void read_parameters(void)
{
    for (unsigned i = 0; i < sizeof(parameters) / sizeof(*parameters); i++) {
        const char *value = getenv(parameters[i].name);

        if (value) {
            parameters[i].value = strtoul(value, NULL, 10);
        }
    }
}

static unsigned long physical(atomic_ulong *address)
{
    uint64_t entry = 0;
    int fd = open("/proc/self/pagemap", O_RDONLY);

    atomic_fetch_add(address, 0);       /* so that there is a page */
    if (pread(fd, &entry, sizeof(entry), (uintptr_t)address / PAGE * sizeof(entry)) != sizeof(entry)) {
        say("bad pagemap %d\n", errno);
    }
    close(fd);
    /* Bits 0 to 54: the number of the page frame */
    return (entry & ((1ul << 55) - 1)) * PAGE + (uintptr_t)address % PAGE;
}

static int counters(char *to, size_t size, const char *name, atomic_ulong *counts, unsigned long n)
{
    int length = 0;

    for (unsigned long i = 0; i < n; i++) {
        length += snprintf(to + length, size - length, " %s%lu=%lu", name, i, atomic_load(&counts[i]));
    }
    return length;
}

static void *reporter(void *opaque)
{
    uint64_t last = 0;

    for (;;) {
        char text[4096];
        int n = 0;
        uint64_t now = now_us(CLOCK_MONOTONIC);

        if (now < last) {
            complain("clock", 0, now, last);
        }
        last = now;
        n += counters(text + n, sizeof(text) - n, "writer", writes, P(WRITERS));
        n += counters(text + n, sizeof(text) - n, "computer", computed, P(COMPUTERS));
        n += counters(text + n, sizeof(text) - n, "forker", forks, P(FORKERS));
        n += counters(text + n, sizeof(text) - n, "copier", copies, P(COPIERS));
        n += counters(text + n, sizeof(text) - n, "clock", readings, P(CLOCKS));
        n += counters(text + n, sizeof(text) - n, "worker", worked, !!P(WORK));
        n += counters(text + n, sizeof(text) - n, "disk", &transfers, !!P(DISK));
        if (ptp >= 0) {
            n += snprintf(text + n, sizeof(text) - n, " ptp=%ld", ptp_ahead_ns());
        }
        say("ms=%lu real=%lu%.*s sweeps=%lu offs=%lu answers=%lu answers_late=%lu answer_max=%lu bad=%lu\n",
            now / 1000, now_us(CLOCK_REALTIME) / 1000, n, text, atomic_load(&sweeps), atomic_load(&offs),
            atomic_load(&answers), atomic_load(&answers_late), atomic_exchange(&answer_max, 0), atomic_load(bad));
        usleep(P(INTERVAL) * 1000);
    }
    return NULL;
}

int main(void)
{
    unsigned long pages;
    struct termios settings;

    cpus = sysconf(_SC_NPROCESSORS_ONLN);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    /* From here on, all kernel messages go to the console: 8 is SYSLOG_ACTION_CONSOLE_LEVEL */
    klogctl(8, NULL, 8);
    /* The device announces its ports in messages, which may arrive after init runs */
    for (int tries = 0; tries < 10000; tries++) {
        console = open("/dev/hvc0", O_WRONLY | O_NOCTTY);
        if (console >= 0 || (errno != ENODEV && errno != ENOENT)) {
            break;
        }
        usleep(1000);
    }
    if (console < 0) {
        perror("/dev/hvc0");
        return 1;
    }
    /* A line discipline would change the text */
    tcgetattr(console, &settings);
    cfmakeraw(&settings);
    tcsetattr(console, TCSANOW, &settings);
    read_parameters();
    block_result = block();

    forks = mmap(NULL, (MAX_THREADS + 1) * sizeof(*forks), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bad = &forks[MAX_THREADS];
    for (unsigned long i = 0; i < P(FORKERS); i++) {
        if (!fork()) {
            forker(i);
        }
    }

    pages = (P(MEM) + 2 * P(DISK)) * (1 << 20) / PAGE + !!P(DISK);
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    generations = mmap(NULL, pages * sizeof(*generations), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || generations == MAP_FAILED) {
        say("bad mmap\n");
    }
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    for (unsigned long i = 0; i < pages; i++) {
        fill(i);
    }

    if (P(PTP)) {
        start_ptp();
    }
    if (P(DISK) || P(KEXEC)) {
        load_driver("/virtio_blk.ko");
    }
    if (P(KEXEC)) {
        load_kernel();
    }
    say("at writer=%lu computer=%lu worker=%lu\n", physical(writes), physical(computed), physical(worked));
    start(reporter, 1, -1, 10);
    start(writer, P(WRITERS), P(OFFLINE) ? -1 : 0, 0);
    start(computer, P(COMPUTERS), P(OFFLINE) ? -1 : 0, 0);
    /* All but the first processor, which runs interrupter() */
    start(copier, P(COPIERS), cpus > 1, 0);
    start(clock_reader, P(CLOCKS), 0, 0);
    start(worker, !!P(WORK), -1, 0);
    start(disk_user, !!P(DISK), -1, 0);
    start(other_kernel, !!P(KEXEC), -1, 0);
    start(interrupter, !!P(COPIERS), 0, 5);
    start(offliner, !!P(OFFLINE), 0, 0);
    say("ready\n");
    for (;;) {
        pause();
    }
}
