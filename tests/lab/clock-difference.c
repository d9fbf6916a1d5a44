/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * By how much the clocks of two machines differ that share a page of memory.
 * usage: clock-difference answer FILE       on one machine, until it is killed
 *        clock-difference ask FILE          on the other one: prints, in its view of
 *                                           the first one, the difference of
 *                                           CLOCK_REALTIME in ns, that of the TSC, and
 *                                           the time in ns that the exchange took
 *        clock-difference set FILE          as ask, and then set CLOCK_REALTIME right
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <x86intrin.h>

#define ROUNDS  5000

struct page {
    _Atomic uint32_t question, answer;
    int64_t ns;
    uint64_t tsc;
};

static int64_t realtime(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void answer(struct page *p)
{
    uint32_t last = 0;

    p->question = 0;
    p->answer = 0;

    for (;;) {
        uint32_t question = p->question;

        if (question != last) {
            p->tsc = __rdtsc();
            p->ns = realtime();
            p->answer = last = question;
        }
    }
}

/* The exchange that took least time tells most. */
static void ask(struct page *p, int set)
{
    int64_t least = INT64_MAX, difference = 0;
    uint64_t tsc = 0;

    for (uint32_t n = 1; n <= ROUNDS; n++) {
        uint64_t tsc_before = __rdtsc(), tsc_after;
        int64_t before = realtime(), after;

        do {
            p->question = n;    /* again, for who begins to answer just now */
            _mm_pause();
        } while (p->answer != n);
        after = realtime();
        tsc_after = __rdtsc();
        if (after - before < least) {
            least = after - before;
            difference = p->ns - (before + least / 2);
            tsc = p->tsc - (tsc_before + (tsc_after - tsc_before) / 2);
        }
    }
    p->question = 0;
    if (set) {
        int64_t now = realtime() + difference;
        struct timespec t = { now / 1000000000, now % 1000000000 };

        if (clock_settime(CLOCK_REALTIME, &t) < 0) {
            err(1, "clock_settime");
        }
    }
    printf("%" PRId64 " %" PRId64 " %" PRId64 "\n", difference, (int64_t)tsc, least);
}

int main(int argc, char **argv)
{
    int fd = argc == 3 ? open(argv[2], O_RDWR) : -1;
    struct page *p = mmap(NULL, sizeof(*p), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED) {
        err(1, "clock-difference: cannot map a file");
    }
    if (!strcmp(argv[1], "answer")) {
        answer(p);
    } else {
        ask(p, !strcmp(argv[1], "set"));
    }
    return 0;
}
