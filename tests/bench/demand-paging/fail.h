/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef FAIL_H
#define FAIL_H

#include <stdio.h>
#include <stdlib.h>

/* One line that tells why, and the end; %m is errno's text. */
#define fail(...) fail_with(1, __VA_ARGS__)
#define fail_with(status, ...) do {             \
    fprintf(stderr, "demand-paging: error: ");  \
    fprintf(stderr, __VA_ARGS__);               \
    fputc('\n', stderr);                        \
    exit(status);                               \
} while (0)

#endif
