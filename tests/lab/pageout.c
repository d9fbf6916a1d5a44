/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Swap out the largest anonymous mapping of a process, or a part of its memory.
 * usage: pageout PID [ADDRESS SIZE]
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/uio.h>

#define CHUNK   ((size_t)2 << 20)

int main(int argc, char **argv)
{
    char path[64], line[512];
    struct iovec most = { 0 };
    unsigned pid = argc == 2 || argc == 4 ? atoi(argv[1]) : 0;
    int pidfd = pidfd_open(pid, 0);
    FILE *maps;

    snprintf(path, sizeof(path), "/proc/%u/maps", pid);
    maps = fopen(path, "r");
    if (pidfd < 0 || !maps) {
        perror(path);
        return 1;
    }
    if (argc == 4) {
        most.iov_base = (void *)strtoul(argv[2], NULL, 0);
        most.iov_len = strtoul(argv[3], NULL, 0);
    }
    while (argc == 2 && fgets(line, sizeof(line), maps)) {
        uintptr_t start, end, inode;

        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " rw-p %*x %*s %" SCNuPTR,
                   &start, &end, &inode) == 3
            && !inode && end - start > most.iov_len) {
            most.iov_base = (void *)start;
            most.iov_len = end - start;
        }
    }
    /* It stops at what it cannot take, without an error. */
    for (size_t done = 0; done < most.iov_len; done += CHUNK) {
        size_t left = most.iov_len - done;
        struct iovec part = {
            (char *)most.iov_base + done, left < CHUNK ? left : CHUNK,
        };
        if (process_madvise(pidfd, &part, 1, MADV_PAGEOUT, 0) < 0) {
            perror("process_madvise");
            return 1;
        }
    }
    printf("%p %zu\n", most.iov_base, most.iov_len);
    return 0;
}
