/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Tells this machine's kernel of its clock what NTP or PTP tell it, or prints CLOCK_REALTIME in ns.
 * usage: host-clock [MAX_ERROR_US|unsynchronized TAI_OFFSET_S TICK_US]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timex.h>
#include <time.h>

static int set(struct timex t)
{
    if (adjtimex(&t) < 0) {
        perror("host-clock: adjtimex");
        exit(1);
    }
    return t.status;
}

int main(int argc, char **argv)
{
    int status = set((struct timex) { 0 });
    struct timespec now;

    if (argc == 1) {
        clock_gettime(CLOCK_REALTIME, &now);
        printf("%lld%09ld\n", (long long)now.tv_sec, now.tv_nsec);
        return 0;
    }
    if (argc != 4) {
        fprintf(stderr, "usage: host-clock [MAX_ERROR_US|unsynchronized TAI_OFFSET_S TICK_US]\n");
        return 2;
    }
    if (!strcmp(argv[1], "unsynchronized")) {
        set((struct timex) { .modes = ADJ_STATUS, .status = status | STA_UNSYNC });
    } else {
        set((struct timex) { .modes = ADJ_STATUS | ADJ_MAXERROR,
                             .status = status & ~STA_UNSYNC, .maxerror = atol(argv[1]) });
    }
    set((struct timex) { .modes = ADJ_TAI, .constant = atol(argv[2]) });
    set((struct timex) { .modes = ADJ_TICK, .tick = atol(argv[3]) });
    return 0;
}
