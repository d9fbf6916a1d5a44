/* SPDX-License-Identifier: GPL-2.0-or-later */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum fault_mode { MISSING, MINOR };
enum backing { ANONYMOUS, SHMEM, HUGETLB };

struct options {
    unsigned vcpus;
    size_t bytes_per_vcpu;
    enum fault_mode mode;
    enum backing backing;
    bool single_uffd;           /* of all memory; else each vCPU's memory has one */
    unsigned readers;           /* threads for each userfaultfd */
    bool shared;                /* all vCPUs touch the same memory */
    bool exits;
    bool bitmap;                /* with exits: a bitmap tells KVM which pages are missing */
    bool prefault;              /* with exits: let KVM map the page before the guest goes on */
    bool json;
};

struct options parse_options(int argc, char **argv);
const char *mode_name(enum fault_mode mode);
const char *backing_name(enum backing backing);

#endif
