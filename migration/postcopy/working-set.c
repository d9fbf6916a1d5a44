/*
 * Postcopy: a file that lists the pages that a guest touches first
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/bitmap.h"
#include "qemu/error-report.h"
#include "qemu/lockable.h"
#include "qemu/units.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "migration/migration.h"
#include "working-set.h"

#define FIRST_WORDS "QEMU working set "
#define VERSION_LINE FIRST_WORDS "1\n"

/* A line takes about 20 bytes */
#define FILE_MAX (64 * MiB)

/* To read so much more costs less than another read, at least of a disk */
#define GAP (128 * KiB)

typedef struct WorkingSetBlock {
    RAMBlock *rb;
    /* Target pages in the file; constant */
    unsigned long *had;
    /* @had, and pages that were missed since.  Under the lock. */
    unsigned long *has;
} WorkingSetBlock;

struct PostcopyWorkingSet {
    char *path;
    /* WorkingSetBlock; constant */
    GArray *blocks;
    /* The file contained a set; constant */
    bool read;
    QemuMutex lock;
    /* A page was added.  Under @lock. */
    bool changed;
};

static void block_clear(gpointer p)
{
    WorkingSetBlock *b = p;

    g_free(b->had);
    g_free(b->has);
}

static int block_add(RAMBlock *rb, void *opaque)
{
    PostcopyWorkingSet *set = opaque;
    size_t pages = rb->postcopy_length >> qemu_target_page_bits();
    WorkingSetBlock b = { rb, bitmap_new(pages), bitmap_new(pages) };

    g_array_append_val(set->blocks, b);
    return 0;
}

static WorkingSetBlock *block_find(PostcopyWorkingSet *set, const char *name)
{
    for (guint i = 0; i < set->blocks->len; i++) {
        WorkingSetBlock *b = &g_array_index(set->blocks, WorkingSetBlock, i);

        if (!strcmp(b->rb->idstr, name)) {
            return b;
        }
    }
    return NULL;
}

/* Pages that this guest does not have are ignored */
static void working_set_line(PostcopyWorkingSet *set, const char *line)
{
    uint64_t first, n, pages;
    char name[256];
    WorkingSetBlock *b;

    if (sscanf(line, "%" SCNx64 " %" SCNx64 " %255[^\n]", &first, &n,
               name) != 3) {
        return;
    }
    b = block_find(set, name);
    pages = b ? b->rb->postcopy_length >> qemu_target_page_bits() : 0;
    if (first < pages && n <= pages - first) {
        bitmap_set(b->had, first, n);
        bitmap_set(b->has, first, n);
    }
}

/* Returns false if the file is another one, which must not be overwritten */
static bool working_set_load(PostcopyWorkingSet *set)
{
    char line[512] = "";
    int fd = qemu_open_old(set->path, O_RDONLY | O_NONBLOCK);
    struct stat st = { };
    bool ours;
    FILE *f;

    if (fd < 0) {
        set->changed = errno == ENOENT;
        if (!set->changed) {
            warn_report("cannot read the working set %s: %s", set->path,
                        strerror(errno));
        }
        return set->changed;
    }
    f = fdopen(fd, "r");
    ours = !fstat(fd, &st) && S_ISREG(st.st_mode) &&
           (!st.st_size || (fgets(line, sizeof(line), f) &&
                            g_str_has_prefix(line, FIRST_WORDS)));
    if (!ours) {
        warn_report("%s is not a working set: it stays as it is, and the pages "
                    "that the guest misses are not recorded", set->path);
    } else if (strcmp(line, VERSION_LINE) || st.st_size > FILE_MAX) {
        if (st.st_size) {
            warn_report("%s is not a working set of this version: it will be "
                        "made anew", set->path);
        }
        set->changed = true;
    } else {
        set->read = true;
        while (fgets(line, sizeof(line), f)) {
            working_set_line(set, line);
        }
    }
    fclose(f);
    return ours;
}

void postcopy_working_set_free(PostcopyWorkingSet *set)
{
    if (set) {
        g_array_unref(set->blocks);
        qemu_mutex_destroy(&set->lock);
        g_free(set->path);
        g_free(set);
    }
}

PostcopyWorkingSet *postcopy_working_set_new(const char *path)
{
    PostcopyWorkingSet *set = g_new0(PostcopyWorkingSet, 1);

    set->path = g_strdup(path);
    qemu_mutex_init(&set->lock);
    set->blocks = g_array_new(false, false, sizeof(WorkingSetBlock));
    g_array_set_clear_func(set->blocks, block_clear);
    foreach_not_ignored_block(block_add, set);
    if (!working_set_load(set)) {
        postcopy_working_set_free(set);
        return NULL;
    }
    return set;
}

bool postcopy_working_set_read(const PostcopyWorkingSet *set)
{
    return set->read;
}

void postcopy_working_set_add(PostcopyWorkingSet *set, RAMBlock *rb,
                              ram_addr_t start, ram_addr_t size)
{
    WorkingSetBlock *b = block_find(set, rb->idstr);
    unsigned bits = qemu_target_page_bits();
    size_t end = b ? MIN(start + size, rb->postcopy_length) >> bits : 0;
    size_t first = start >> bits;

    QEMU_LOCK_GUARD(&set->lock);
    if (b && find_next_zero_bit(b->has, end, first) < end) {
        bitmap_set(b->has, first, end - first);
        set->changed = true;
    }
}

void postcopy_working_set_each(PostcopyWorkingSet *set, size_t most,
                               void (*func)(RAMBlock *rb, ram_addr_t start,
                                            ram_addr_t size, void *opaque),
                               void *opaque)
{
    unsigned bits = qemu_target_page_bits();

    for (guint i = 0; i < set->blocks->len; i++) {
        WorkingSetBlock *b = &g_array_index(set->blocks, WorkingSetBlock, i);
        size_t pages = b->rb->postcopy_length >> bits;
        size_t first = find_first_bit(b->had, pages);

        while (first < pages) {
            size_t end = find_next_zero_bit(b->had, pages, first), next;

            while ((next = find_next_bit(b->had, pages, end)) < pages &&
                   next - end <= GAP >> bits) {
                end = find_next_zero_bit(b->had, pages, next);
            }
            for (ram_addr_t at = (ram_addr_t)first << bits,
                 last = (ram_addr_t)end << bits; at < last; at += most) {
                func(b->rb, at, MIN(most, last - at), opaque);
            }
            first = next;
        }
    }
}

void postcopy_working_set_write(PostcopyWorkingSet *set)
{
    Error *err = NULL;
    bool failed;
    FILE *f;
    int fd;

    QEMU_LOCK_GUARD(&set->lock);
    if (!set->changed) {
        return;
    }
    set->changed = false;
    fd = qemu_create(set->path, O_WRONLY | O_TRUNC, 0600, &err);
    if (fd < 0) {
        warn_report_err(err);
        return;
    }
    f = fdopen(fd, "w");
    fputs(VERSION_LINE, f);
    for (guint i = 0; i < set->blocks->len; i++) {
        WorkingSetBlock *b = &g_array_index(set->blocks, WorkingSetBlock, i);
        size_t n = b->rb->postcopy_length >> qemu_target_page_bits(), end;

        for (size_t first = find_first_bit(b->has, n); first < n;
             first = find_next_bit(b->has, n, end)) {
            end = find_next_zero_bit(b->has, n, first);
            fprintf(f, "%zx %zx %s\n", first, end - first, b->rb->idstr);
        }
    }
    failed = ferror(f);
    if (fclose(f) || failed) {
        warn_report("cannot write all of the working set %s", set->path);
    }
}
