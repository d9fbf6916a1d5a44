/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "options.h"

#define MAX_VCPUS 2048          /* each has a byte of every page */

static const char *const modes[] = { "missing", "minor" };
static const char *const backings[] = { "anonymous", "shmem", "hugetlb" };

static const char help[] =
"usage: demand-paging [OPTION]...\n"
"\n"
"vCPUs of a raw KVM virtual machine touch each page of memory that is not there; userfaultfd's\n"
"reader threads, or with -w the vCPU threads themselves, make the pages. Prints how fast.\n"
"\n"
"  -v, --vcpus N          vCPUs (1)\n"
"  -b, --bytes MIB        memory of each vCPU, in MiB (64)\n"
"  -u, --uffd MODE        how userfaultfd is told: missing (default), or minor: the page is in the\n"
"                         page cache, and is mapped by UFFDIO_CONTINUE; not with anonymous memory\n"
"  -s, --source KIND      of memory: anonymous (default), shmem, or hugetlb, of the default size\n"
"  -a, --single-uffd      one userfaultfd for all memory; otherwise one for that of each vCPU\n"
"  -r, --readers N        reader threads for each userfaultfd (1)\n"
"  -o, --overlap          all vCPUs touch the same memory of MIB, in the same order (has -a in it)\n"
"  -w, --exits            with KVM_MEM_EXIT_ON_MISSING: vCPUs exit for pages that are not there;\n"
"                         the readers stay, for what does not\n"
"  -t, --bitmap           with -w: KVM_MEM_USERFAULT in place of that; a bitmap tells KVM what is missing\n"
"  -p, --prefault         with -w: KVM_PRE_FAULT_MEMORY maps the page before the vCPU goes on, which\n"
"                         otherwise leaves the guest once more for that\n"
"  -j, --json             figures as JSON\n"
"  -h, --help             this text\n"
"\n"
"Latencies are the guest's: of each touch, by its TSC or virtual counter. A fault is an exit or a\n"
"message of userfaultfd. At the end all pages are compared with what they must be; the exit status\n"
"is 1 if one is wrong or something fails, and 2 if this kernel does not have what -w or -t ask for.\n";

static unsigned number(const char *text, unsigned most)
{
    char *end;
    unsigned long n = strtoul(text, &end, 10);

    if (*end || end == text || n < 1 || n > most) {
        fail("'%s' is not a number from 1 to %u", text, most);
    }
    return n;
}

static unsigned one_of(const char *text, const char *const *names, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        if (!strcmp(text, names[i])) {
            return i;
        }
    }
    fail("unknown word '%s': see --help", text);
}

struct options parse_options(int argc, char **argv)
{
    static const struct option names[] = {
        { "vcpus", required_argument, NULL, 'v' },
        { "bytes", required_argument, NULL, 'b' },
        { "uffd", required_argument, NULL, 'u' },
        { "source", required_argument, NULL, 's' },
        { "single-uffd", no_argument, NULL, 'a' },
        { "readers", required_argument, NULL, 'r' },
        { "overlap", no_argument, NULL, 'o' },
        { "exits", no_argument, NULL, 'w' },
        { "bitmap", no_argument, NULL, 't' },
        { "prefault", no_argument, NULL, 'p' },
        { "json", no_argument, NULL, 'j' },
        { "help", no_argument, NULL, 'h' },
        { },
    };
    struct options o = { .vcpus = 1, .bytes_per_vcpu = 64ul << 20, .readers = 1 };
    int letter;

    while ((letter = getopt_long(argc, argv, "v:b:u:s:ar:owtpjh", names, NULL)) != -1) {
        switch (letter) {
        case 'v':
            o.vcpus = number(optarg, MAX_VCPUS);
            break;
        case 'b':
            o.bytes_per_vcpu = (size_t)number(optarg, 1u << 20) << 20;
            break;
        case 'u':
            o.mode = one_of(optarg, modes, 2);
            break;
        case 's':
            o.backing = one_of(optarg, backings, 3);
            break;
        case 'a':
            o.single_uffd = true;
            break;
        case 'r':
            o.readers = number(optarg, 1024);
            break;
        case 'o':
            o.shared = o.single_uffd = true;
            break;
        case 'w':
            o.exits = true;
            break;
        case 't':
            o.bitmap = true;
            break;
        case 'p':
            o.prefault = true;
            break;
        case 'j':
            o.json = true;
            break;
        case 'h':
            fputs(help, stdout);
            exit(0);
        default:
            exit(1);
        }
    }
    if (optind < argc) {
        fail("unknown word '%s': see --help", argv[optind]);
    }
    if (o.mode == MINOR && o.backing == ANONYMOUS) {
        fail("anonymous memory has no minor faults: choose another kind with -s");
    }
    if ((o.bitmap || o.prefault) && !o.exits) {
        fail("-t and -p make no sense without -w");
    }
    return o;
}

const char *mode_name(enum fault_mode mode)
{
    return modes[mode];
}

const char *backing_name(enum backing backing)
{
    return backings[backing];
}
