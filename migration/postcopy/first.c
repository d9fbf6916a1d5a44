/*
 * Postcopy: pages that a guest must touch first when it runs again
 *
 * A vCPU cannot run an instruction, nor serve an interrupt, without its code,
 * its stack, the tables that the processor reads by itself, and the page tables
 * that lead to each.  A device's state cannot be loaded without the rings of
 * its queues.  Such pages are missed one after the other, a round trip each,
 * most with interrupts off.  They are few, and the source knows them as soon as
 * the guest has stopped: the background begins with them.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bitops.h"
#include "qemu/units.h"
#include "qapi/qapi-types-migration.h"
#include "exec/address-spaces.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "hw/core/cpu.h"
#include "hw/core/sysemu-cpu-ops.h"
#include "migration/options.h"
#include "first.h"
#include "outgoing.h"
#include "trace.h"

/*
 * Maximum number of pages, not yet sent, of a vCPU, of those that all vCPUs
 * share, and of all devices.  64 take 2 ms at 1 Gbit/s, while the devices are
 * loaded.
 */
#define FIRST_PAGES 64
#define FIRST_SHARED_PAGES 256
#define FIRST_DEVICE_PAGES 512

/* A larger host page takes as long as all others together */
#define FIRST_MAX_SIZE (64 * KiB)

typedef struct FirstPage {
    RAMBlock *rb;
    /* Start of a host page, in bytes */
    ram_addr_t start;
} FirstPage;

struct PostcopyFirstPages {
    /* FirstPage, some more than once */
    GArray *pages;
    /* How many were checked, and how many of these are in the list */
    guint next, taken;
};

static GSList *device_kinds, *shared_kinds;

void postcopy_first_devices(void (*add)(PostcopyFirstPages *to))
{
    device_kinds = g_slist_append(device_kinds, add);
}

void postcopy_first_shared(void (*add)(PostcopyFirstPages *to))
{
    shared_kinds = g_slist_append(shared_kinds, add);
}

static void first_find(PostcopyFirstPages *to, GSList *kinds)
{
    for (; kinds; kinds = kinds->next) {
        void (*add)(PostcopyFirstPages *to) = kinds->data;

        add(to);
    }
}

void postcopy_first_add(PostcopyFirstPages *to, AddressSpace *as,
                        hwaddr address, hwaddr length)
{
    hwaddr end = address + length;

    RCU_READ_LOCK_GUARD();
    while (address < end) {
        hwaddr offset, there = end - address;
        MemoryRegion *mr = address_space_translate(as, address, &offset, &there,
                                                   false,
                                                   MEMTXATTRS_UNSPECIFIED);
        FirstPage page = { .rb = mr->ram_block };
        size_t size;

        if (!memory_region_is_ram(mr) || !page.rb) {
            return;
        }
        size = qemu_ram_pagesize(page.rb);
        if (size > FIRST_MAX_SIZE) {
            return;
        }
        page.start = ROUND_DOWN(offset, size);
        g_array_append_val(to->pages, page);
        address += MIN(there, page.start + size - offset);
    }
}

/* Reads only RAM, not devices */
static bool first_read_ram(hwaddr address, void *buf, size_t length)
{
    return address_space_read(&address_space_memory, address,
                              (MemTxAttrs) { .memory = 1 }, buf,
                              length) == MEMTX_OK;
}

static uint64_t first_read_entry(void *opaque, hwaddr address, unsigned size)
{
    uint8_t entry[8] = { };

    return first_read_ram(address, entry, size) ? ldq_le_p(entry) : 0;
}

bool postcopy_first_read(const PageTables *tables, vaddr address, void *buf,
                         size_t length)
{
    while (length) {
        hwaddr path[PAGE_TABLES_LEVELS + 1];
        unsigned n = page_tables_walk(tables, address, first_read_entry, NULL,
                                      path);
        size_t there = MIN(length, -(address | TARGET_PAGE_MASK));

        if (!n || !first_read_ram(path[n - 1], buf, there)) {
            return false;
        }
        address += there;
        buf += there;
        length -= there;
    }
    return true;
}

void postcopy_first_add_virtual(PostcopyFirstPages *to,
                                const PageTables *tables, vaddr address)
{
    hwaddr path[PAGE_TABLES_LEVELS + 1];
    unsigned n = page_tables_walk(tables, address, first_read_entry, NULL,
                                  path);

    for (unsigned i = 0; i < n; i++) {
        postcopy_first_add(to, &address_space_memory, path[i], 1);
    }
}

/* Append the next page of @from that is new and to be sent, if there is one */
static bool first_take(PostcopyFirst *first, GHashTable *seen,
                       PostcopyFirstPages *from, guint max)
{
    while (from->next < from->pages->len && from->taken < max) {
        FirstPage *page = &g_array_index(from->pages, FirstPage, from->next++);

        /* postcopy_first_choose() skips a page that a request takes now */
        if (page->rb->bmap &&
            test_bit(page->start / qemu_target_page_size(), page->rb->bmap) &&
            g_hash_table_add(seen, page->rb->host + page->start)) {
            g_array_append_val(first->list, *page);
            from->taken++;
            return true;
        }
    }
    return false;
}

void postcopy_first_begin(MigrationState *s)
{
    PostcopyFirst *first = &s->postcopy->first;
    g_autoptr(GHashTable) seen = g_hash_table_new(NULL, NULL);
    g_autoptr(GPtrArray) cpus = g_ptr_array_new();
    g_autoptr(GArray) of_devices = g_array_new(false, false, sizeof(FirstPage));
    g_autoptr(GArray) of_all = g_array_new(false, false, sizeof(FirstPage));
    PostcopyFirstPages devices = { of_devices }, shared = { of_all };
    bool more = true;
    CPUState *cpu;

    if (!s->postcopy_first || !migrate_postcopy_ram()) {
        return;
    }
    first->list = g_array_new(false, false, sizeof(FirstPage));
    first->next = 0;

    /* Devices are loaded before any vCPU runs */
    first_find(&devices, device_kinds);
    while (first_take(first, seen, &devices, FIRST_DEVICE_PAGES)) {
        continue;
    }

    CPU_FOREACH(cpu) {
        if (cpu->cc->sysemu_ops->first_pages) {
            PostcopyFirstPages *pages = g_new0(PostcopyFirstPages, 1);

            pages->pages = g_array_new(false, false, sizeof(FirstPage));
            cpu->cc->sysemu_ops->first_pages(cpu, pages);
            g_ptr_array_add(cpus, pages);
        }
    }
    if (qemu_ram_pagesize_largest() <= FIRST_MAX_SIZE) {
        first_find(&shared, shared_kinds);
    }
    /* In turn, so that no vCPU waits for all pages of another one */
    while (more) {
        more = false;
        for (guint i = 0; i < cpus->len; i++) {
            more |= first_take(first, seen, g_ptr_array_index(cpus, i),
                               FIRST_PAGES);
            more |= first_take(first, seen, &shared, FIRST_SHARED_PAGES);
        }
    }
    trace_postcopy_first(cpus->len, devices.taken, shared.taken,
                         first->list->len);

    for (guint i = 0; i < cpus->len; i++) {
        PostcopyFirstPages *pages = g_ptr_array_index(cpus, i);

        g_array_unref(pages->pages);
        g_free(pages);
    }
}

void postcopy_first_reset(PostcopyFirst *first)
{
    g_clear_pointer(&first->list, g_array_unref);
}

void postcopy_first_choose(PostcopyFirst *first, RAMBlock **rb,
                           unsigned long *page)
{
    while (first->list && first->next < first->list->len) {
        FirstPage *p = &g_array_index(first->list, FirstPage, first->next);
        unsigned long target_page = p->start / qemu_target_page_size();

        /* Not sent yet by any thread, and in a block that migrates */
        if (p->rb->bmap && test_bit(target_page, p->rb->bmap)) {
            *rb = p->rb;
            *page = target_page;
            return;
        }
        first->next++;
    }
}

bool postcopy_first_is(const PostcopyFirst *first, RAMBlock *rb,
                       unsigned long page)
{
    const FirstPage *p;

    if (!first->list || first->next == first->list->len) {
        return false;
    }
    p = &g_array_index(first->list, FirstPage, first->next);
    return p->rb == rb && p->start / qemu_target_page_size() == page;
}
