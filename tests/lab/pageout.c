/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Swap out a part of a process's memory.
 * usage: pageout PID ADDRESS SIZE
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/uio.h>

#define CHUNK   ((size_t)2 << 20)

int main(int argc, char **argv)
{
    int pidfd = pidfd_open(argc == 4 ? atoi(argv[1]) : 0, 0);
    char *address;
    size_t size;

    if (pidfd < 0) {
        perror("pageout PID ADDRESS SIZE");
        return 1;
    }
    address = (char *)strtoul(argv[2], NULL, 0);
    size = strtoul(argv[3], NULL, 0);
    /* It stops at what it cannot take, without an error. */
    for (size_t done = 0; done < size; done += CHUNK) {
        size_t left = size - done;
        struct iovec part = { address + done, left < CHUNK ? left : CHUNK };

        if (process_madvise(pidfd, &part, 1, MADV_PAGEOUT, 0) < 0) {
            perror("process_madvise");
            return 1;
        }
    }
    return 0;
}
