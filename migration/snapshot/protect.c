/*
 * Background snapshot: protection of memory, and its release
 *
 * One thread writes the snapshot and serves the faults of threads that write to
 * memory that is not saved yet.  Pages are released after they were saved, in
 * runs of up to 2 MiB, so that huge pages are not split and few system calls
 * are made; a page with a fault is copied and released at once.
 *
 * No wakeup is lost, and none is superfluous: the release of a range wakes the
 * threads that wait for it, and the kernel lets no thread wait for an
 * unprotected page.  So a fault that was read has to be served only if its page
 * was not released since it was read.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <linux/userfaultfd.h>
#include "qemu/lockable.h"
#include "qemu/madvise.h"
#include "qemu/rcu.h"
#include "qemu/stats64.h"
#include "qemu/thread.h"
#include "qemu/units.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "exec/target_page.h"
#include "migration/migration.h"
#include "migration/misc.h"
#include "migration/options.h"
#include "migration/ram.h"
#include "qapi/qapi-events-background-snapshot.h"
#include "holes.h"
#include "protect.h"
#include "trace.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* A run ends at a multiple of this in the host's address space. */
#define RUN_ALIGN       (2 * MiB)
#define FAULTS_AT_ONCE  64
/* Holes between checks for faults: together they take as long as one page */
#define LOOK_EVERY      16

/* MigrationState.snapshot */
struct BackgroundSnapshot {
    /*
     * The snapshot's thread writes @exists, @anonymous and @file, before
     * anything is protected, with @lock, for query-migrate
     */
    bool exists;
    BackgroundSnapshotSetup anonymous;
    BackgroundSnapshotSetup file;

    /* Only the snapshot's thread uses @holes to @run_end */
    SnapshotHoles *holes;
    struct uffd_msg faults[FAULTS_AT_ONCE];
    unsigned next_fault;
    unsigned nr_faults;
    bool serving;               /* a fault, until its page is released */
    unsigned holes_in_a_row;
    RAMBlock *run_block;        /* saved, and not yet released; or NULL */
    ram_addr_t run_start;
    ram_addr_t run_end;

    /*
     * Held for each ioctl, so that none follows when the main thread has given
     * up, and the main thread does not use a closed descriptor
     */
    QemuMutex lock;
    int uffd;                   /* atomic; -1: nothing is protected */

    /* Written by the snapshot's thread, read by query-migrate */
    Stat64 nr_holes;
    Stat64 nr_served;
    Stat64 nr_stale;
    Stat64 nr_reads;
    Stat64 nr_releases;
};

void snapshot_init(MigrationState *s)
{
    s->snapshot = g_new0(BackgroundSnapshot, 1);
    s->snapshot->uffd = -1;
    qemu_mutex_init(&s->snapshot->lock);
}

void snapshot_destroy(MigrationState *s)
{
    qemu_mutex_destroy(&s->snapshot->lock);
    g_free(s->snapshot);
}

static BackgroundSnapshot *snapshot_current(void)
{
    return migrate_get_current()->snapshot;
}

/* How to make sure that writes to empty page table entries are noticed */
static BackgroundSnapshotSetup snapshot_populate_how(void)
{
    /* Length 0 only probes */
    return qemu_madvise(NULL, 0, MADV_POPULATE_READ)
           ? BACKGROUND_SNAPSHOT_SETUP_READ
           : BACKGROUND_SNAPSHOT_SETUP_POPULATE_READ;
}

void snapshot_prepare(void)
{
    BackgroundSnapshot *b = snapshot_current();
    SnapshotHoles *holes = snapshot_holes_new();
    BackgroundSnapshotSetup anonymous, file;
    uint64_t features = 0;

    uffd_query_features(&features);

    if (snapshot_holes_can_scan(holes)) {
        anonymous = BACKGROUND_SNAPSHOT_SETUP_SKIP_EMPTY;
    } else if (features & UFFD_FEATURE_WP_UNPOPULATED) {
        anonymous = BACKGROUND_SNAPSHOT_SETUP_PROTECT_EMPTY;
    } else {
        anonymous = snapshot_populate_how();
    }
    /* Memory of files is protected by marks in empty entries. */
    file = features & UFFD_FEATURE_WP_HUGETLBFS_SHMEM
             ? BACKGROUND_SNAPSHOT_SETUP_PROTECT_EMPTY
             : snapshot_populate_how();
    trace_snapshot_prepare(BackgroundSnapshotSetup_str(anonymous),
                           BackgroundSnapshotSetup_str(file), features);

    QEMU_LOCK_GUARD(&b->lock);
    b->exists = true;
    b->anonymous = anonymous;
    b->file = file;
    b->holes = holes;
    b->next_fault = b->nr_faults = 0;
    b->holes_in_a_row = 0;
    stat64_init(&b->nr_holes, 0);
    stat64_init(&b->nr_served, 0);
    stat64_init(&b->nr_stale, 0);
    stat64_init(&b->nr_reads, 0);
    stat64_init(&b->nr_releases, 0);
}

/*
 * Memory that the caller of QEMU's functions allocated may be anything: the
 * setup of anonymous memory suits all, as files are protected in any case.
 */
static BackgroundSnapshotSetup snapshot_setup_of(RAMBlock *rb)
{
    BackgroundSnapshot *b = snapshot_current();

    return rb->fd >= 0 ? b->file : b->anonymous;
}

bool snapshot_must_populate(RAMBlock *rb)
{
    return snapshot_setup_of(rb) == BACKGROUND_SNAPSHOT_SETUP_POPULATE_READ ||
           snapshot_setup_of(rb) == BACKGROUND_SNAPSHOT_SETUP_READ;
}

bool snapshot_populate(RAMBlock *rb, ram_addr_t offset, ram_addr_t size)
{
    if (snapshot_setup_of(rb) == BACKGROUND_SNAPSHOT_SETUP_READ) {
        return false;
    }
    while (qemu_madvise(rb->host + offset, size, MADV_POPULATE_READ)) {
        if (errno != EINTR && errno != EAGAIN) {
            trace_snapshot_populate_failed(rb->idstr, offset, size, errno);
            return false;
        }
    }
    return true;
}

uint64_t snapshot_uffd_features(void)
{
    BackgroundSnapshot *b = snapshot_current();

    return b->anonymous == BACKGROUND_SNAPSHOT_SETUP_PROTECT_EMPTY
           ? UFFD_FEATURE_WP_UNPOPULATED : 0;
}

int snapshot_start(int uffd)
{
    BackgroundSnapshot *b = snapshot_current();
    RAMBlock *rb;

    RAMBLOCK_FOREACH_NOT_IGNORED(rb) {
        int ret = rb->flags & RAM_UF_WRITEPROTECT
                  ? snapshot_holes_scan(b->holes, rb) : 0;

        if (ret) {
            return ret;
        }
    }
    WITH_QEMU_LOCK_GUARD(&b->lock) {
        qatomic_set(&b->uffd, uffd);
    }
    /* Nothing after this can fail before the guest may resume */
    qapi_event_send_background_snapshot_protected();
    return 0;
}

/* To skip a hole takes less time than to read faults. */
static int snapshot_read_faults(BackgroundSnapshot *b)
{
    /* Only this thread closes it. */
    int uffd = qatomic_read(&b->uffd);

    if (uffd < 0 || b->holes_in_a_row % LOOK_EVERY) {
        return 0;
    }
    return uffd_read_events(uffd, b->faults, FAULTS_AT_ONCE);
}

int snapshot_next_fault(struct uffd_msg *msg)
{
    BackgroundSnapshot *b = snapshot_current();

    while (true) {
        if (b->next_fault == b->nr_faults) {
            int n = snapshot_read_faults(b);

            if (n <= 0) {
                return n;
            }
            stat64_add(&b->nr_reads, 1);
            b->next_fault = 0;
            b->nr_faults = n;
        }
        *msg = b->faults[b->next_fault++];
        if (msg->event == UFFD_EVENT_PAGEFAULT) {
            b->serving = true;
            stat64_add(&b->nr_served, 1);
            return 1;
        }
    }
}

bool snapshot_copies(RAMBlock *rb)
{
    BackgroundSnapshot *b = snapshot_current();

    /* Huge pages do not fit in the buffer: they are written, then released. */
    return b->serving && rb->page_size == qemu_real_host_page_size();
}

bool snapshot_is_hole(RAMBlock *rb, ram_addr_t offset)
{
    BackgroundSnapshot *b = snapshot_current();

    if (!(rb->flags & RAM_UF_WRITEPROTECT)) {
        return false;
    }
    if (!snapshot_holes_test(b->holes, rb, offset,
                             qemu_target_page_size())) {
        b->holes_in_a_row = 0;
        return false;
    }
    b->holes_in_a_row++;
    stat64_add(&b->nr_holes, 1);
    return true;
}

/* The faults in @host, @size that were read need not be served any more. */
static void snapshot_forget_faults(BackgroundSnapshot *b, char *host,
                                   size_t size)
{
    for (unsigned i = b->next_fault; i < b->nr_faults; i++) {
        struct uffd_msg *msg = &b->faults[i];
        char *address = (char *)(uintptr_t)msg->arg.pagefault.address;

        if (msg->event == UFFD_EVENT_PAGEFAULT &&
            address >= host && address < host + size) {
            msg->event = 0;
            stat64_add(&b->nr_stale, 1);
        }
    }
}

static int snapshot_release(BackgroundSnapshot *b, RAMBlock *rb,
                            ram_addr_t start, ram_addr_t end)
{
    char *host = (char *)rb->host + start;
    int ret = 0;

    stat64_add(&b->nr_releases, 1);
    WITH_QEMU_LOCK_GUARD(&b->lock) {
        if (b->uffd >= 0) {
            ret = uffd_change_protection(b->uffd, host, end - start,
                                         false, false);
        }
    }
    snapshot_forget_faults(b, host, end - start);
    return ret;
}

int snapshot_release_saved(QEMUFile *f)
{
    BackgroundSnapshot *b = snapshot_current();
    RAMBlock *rb = b->run_block;

    if (!rb) {
        return 0;
    }
    /* The buffers of @f refer to the pages. */
    qemu_fflush(f);
    b->run_block = NULL;
    return snapshot_release(b, rb, b->run_start, b->run_end);
}

/* A page with a fault was saved, now or before. */
static int snapshot_served(BackgroundSnapshot *b, QEMUFile *f, RAMBlock *rb,
                           ram_addr_t start)
{
    ram_addr_t end;
    int ret = 0;

    start = ROUND_DOWN(start, rb->page_size);
    end = MIN(start + rb->page_size, rb->used_length);
    if (b->run_block == rb && start < b->run_end && end > b->run_start) {
        ret = snapshot_release_saved(f);
    } else {
        if (!snapshot_copies(rb)) {
            qemu_fflush(f);
        }
        ret = snapshot_release(b, rb, start, end);
    }
    b->serving = false;
    return ret;
}

int snapshot_saved(QEMUFile *f, RAMBlock *rb, ram_addr_t start, ram_addr_t end)
{
    BackgroundSnapshot *b = snapshot_current();
    int ret = 0;

    if (b->serving) {
        return snapshot_served(b, f, rb, start);
    }
    if (b->run_block != rb || b->run_end != start) {
        ret = snapshot_release_saved(f);
        b->run_block = rb;
        b->run_start = start;
    }
    b->run_end = end;
    if (!ret &&
        ((uintptr_t)rb->host + b->run_start) / RUN_ALIGN !=
        ((uintptr_t)rb->host + end) / RUN_ALIGN) {
        ret = snapshot_release_saved(f);
    }
    return ret;
}

void snapshot_stop(void)
{
    BackgroundSnapshot *b = snapshot_current();

    WITH_QEMU_LOCK_GUARD(&b->lock) {
        qatomic_set(&b->uffd, -1);
    }
    snapshot_holes_free(b->holes);
    b->holes = NULL;
    /* Other migrations save pages, too. */
    b->serving = false;
    b->run_block = NULL;
}

void snapshot_give_up(void)
{
    BackgroundSnapshot *b = snapshot_current();
    RAMBlock *rb;

    QEMU_LOCK_GUARD(&b->lock);
    if (b->uffd < 0) {
        return;
    }
    trace_snapshot_give_up();
    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH_NOT_IGNORED(rb) {
        if (rb->flags & RAM_UF_WRITEPROTECT) {
            uffd_unregister_memory(b->uffd, rb->host, rb->max_length);
            /* The kernel wakes only threads that wait for missing pages. */
            uffd_wakeup(b->uffd, rb->host, rb->max_length);
        }
    }
    qatomic_set(&b->uffd, -1);
}

void snapshot_fill_info(MigrationInfo *info)
{
    BackgroundSnapshot *b = snapshot_current();
    BackgroundSnapshotInfo *s;

    QEMU_LOCK_GUARD(&b->lock);
    if (!b->exists || !migrate_background_snapshot()) {
        return;
    }
    info->background_snapshot = s = g_new0(BackgroundSnapshotInfo, 1);
    s->setup_anonymous = b->anonymous;
    s->setup_file = b->file;
    s->holes = stat64_get(&b->nr_holes);
    s->faults = stat64_get(&b->nr_served);
    s->faults_together = stat64_get(&b->nr_stale);
    s->fault_reads = stat64_get(&b->nr_reads);
    s->releases = stat64_get(&b->nr_releases);
}
