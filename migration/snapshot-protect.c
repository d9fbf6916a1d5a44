/*
 * Background snapshot: protection of memory, and its release
 *
 * One thread writes the snapshot and serves the faults of those who write to
 * memory that is not saved yet.  Pages are released after they were saved, in
 * runs of up to 2 MiB, so that huge pages are not split and few system calls
 * are made; a page that was asked for is copied and released at once.
 *
 * No wake-up is lost, and none is made for nothing: releasing a range wakes
 * who waits for it, and the kernel does not let a thread wait for a page that
 * is not protected.  So a fault that was read is served if its page was not
 * released since it was read.
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
#include "migration/misc.h"
#include "options.h"
#include "ram.h"
#include "snapshot-holes.h"
#include "snapshot-protect.h"
#include "trace.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* A run ends at a multiple of this in the host's address space. */
#define RUN_ALIGN       (2 * MiB)
#define FAULTS_AT_ONCE  64
/* Holes between looks for faults: together they take as long as one page */
#define LOOK_EVERY      16

static struct {
    /*
     * Written by the snapshot's thread before anything is protected, with the
     * lock, for query-migrate
     */
    bool exists;
    BackgroundSnapshotSetup anonymous;
    BackgroundSnapshotSetup file;

    /* The snapshot's thread only */
    SnapshotHoles *holes;
    struct uffd_msg faults[FAULTS_AT_ONCE];
    unsigned next_fault;
    unsigned nr_faults;
    bool serving;               /* a fault, until the page is released */
    unsigned holes_in_a_row;
    RAMBlock *run_block;        /* saved, and not yet released; or none */
    ram_addr_t run_start;
    ram_addr_t run_end;

    /*
     * Held for each ioctl, so that none comes after the main thread has
     * given up, and that it does not give up with a descriptor that is closed
     */
    QemuMutex lock;
    int uffd;                   /* atomic; -1: nothing is protected */

    /* Written by the snapshot's thread, read by query-migrate */
    Stat64 nr_holes;
    Stat64 nr_served;
    Stat64 nr_stale;
    Stat64 nr_reads;
    Stat64 nr_releases;
} snapshot = { .uffd = -1 };

static void __attribute__((constructor)) snapshot_init(void)
{
    qemu_mutex_init(&snapshot.lock);
}

/* How to see to it that writes to empty page table entries are noticed */
static BackgroundSnapshotSetup snapshot_populate_how(void)
{
    /* No length: just the question */
    return qemu_madvise(NULL, 0, MADV_POPULATE_READ)
           ? BACKGROUND_SNAPSHOT_SETUP_READ
           : BACKGROUND_SNAPSHOT_SETUP_POPULATE_READ;
}

void snapshot_prepare(void)
{
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
    /* What is backed by files is protected by marks in empty entries. */
    file = features & UFFD_FEATURE_WP_HUGETLBFS_SHMEM
             ? BACKGROUND_SNAPSHOT_SETUP_PROTECT_EMPTY
             : snapshot_populate_how();
    trace_snapshot_prepare(BackgroundSnapshotSetup_str(anonymous),
                           BackgroundSnapshotSetup_str(file), features);

    QEMU_LOCK_GUARD(&snapshot.lock);
    snapshot.exists = true;
    snapshot.anonymous = anonymous;
    snapshot.file = file;
    snapshot.holes = holes;
    snapshot.next_fault = snapshot.nr_faults = 0;
    snapshot.serving = false;
    snapshot.holes_in_a_row = 0;
    snapshot.run_block = NULL;
    stat64_init(&snapshot.nr_holes, 0);
    stat64_init(&snapshot.nr_served, 0);
    stat64_init(&snapshot.nr_stale, 0);
    stat64_init(&snapshot.nr_reads, 0);
    stat64_init(&snapshot.nr_releases, 0);
}

/*
 * Memory that the caller of QEMU's functions allocated may be anything: what
 * suits anonymous memory suits all, files being protected in any case.
 */
static BackgroundSnapshotSetup snapshot_setup_of(RAMBlock *rb)
{
    return rb->fd >= 0 ? snapshot.file : snapshot.anonymous;
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
    return snapshot.anonymous == BACKGROUND_SNAPSHOT_SETUP_PROTECT_EMPTY
           ? UFFD_FEATURE_WP_UNPOPULATED : 0;
}

int snapshot_start(int uffd)
{
    RAMBlock *rb;

    RAMBLOCK_FOREACH_NOT_IGNORED(rb) {
        int ret = rb->flags & RAM_UF_WRITEPROTECT
                  ? snapshot_holes_scan(snapshot.holes, rb) : 0;

        if (ret) {
            return ret;
        }
    }
    QEMU_LOCK_GUARD(&snapshot.lock);
    qatomic_set(&snapshot.uffd, uffd);
    return 0;
}

/* Holes are passed faster than the question is asked. */
static int snapshot_read_faults(void)
{
    /* This thread closes it. */
    int uffd = qatomic_read(&snapshot.uffd);

    if (uffd < 0 || snapshot.holes_in_a_row % LOOK_EVERY) {
        return 0;
    }
    return uffd_read_events(uffd, snapshot.faults, FAULTS_AT_ONCE);
}

int snapshot_next_fault(struct uffd_msg *msg)
{
    while (true) {
        if (snapshot.next_fault == snapshot.nr_faults) {
            int n = snapshot_read_faults();

            if (n <= 0) {
                return n;
            }
            stat64_add(&snapshot.nr_reads, 1);
            snapshot.next_fault = 0;
            snapshot.nr_faults = n;
        }
        *msg = snapshot.faults[snapshot.next_fault++];
        if (msg->event == UFFD_EVENT_PAGEFAULT) {
            snapshot.serving = true;
            stat64_add(&snapshot.nr_served, 1);
            return 1;
        }
    }
}

bool snapshot_copies(RAMBlock *rb)
{
    /* Huge pages do not fit in the buffer: they are written, then released. */
    return snapshot.serving && rb->page_size == qemu_real_host_page_size();
}

bool snapshot_is_hole(RAMBlock *rb, ram_addr_t offset)
{
    if (!(rb->flags & RAM_UF_WRITEPROTECT)) {
        return false;
    }
    if (!snapshot_holes_test(snapshot.holes, rb, offset,
                             qemu_target_page_size())) {
        snapshot.holes_in_a_row = 0;
        return false;
    }
    snapshot.holes_in_a_row++;
    stat64_add(&snapshot.nr_holes, 1);
    return true;
}

/* The faults in @host, @size that were read need not be served any more. */
static void snapshot_forget_faults(char *host, size_t size)
{
    for (unsigned i = snapshot.next_fault; i < snapshot.nr_faults; i++) {
        struct uffd_msg *msg = &snapshot.faults[i];
        char *address = (char *)(uintptr_t)msg->arg.pagefault.address;

        if (msg->event == UFFD_EVENT_PAGEFAULT &&
            address >= host && address < host + size) {
            msg->event = 0;
            stat64_add(&snapshot.nr_stale, 1);
        }
    }
}

static int snapshot_release(RAMBlock *rb, ram_addr_t start, ram_addr_t end)
{
    char *host = (char *)rb->host + start;
    int ret = 0;

    trace_snapshot_release(rb->idstr, start, end, snapshot.serving);
    stat64_add(&snapshot.nr_releases, 1);
    WITH_QEMU_LOCK_GUARD(&snapshot.lock) {
        if (snapshot.uffd >= 0) {
            ret = uffd_change_protection(snapshot.uffd, host, end - start,
                                         false, false);
        }
    }
    snapshot_forget_faults(host, end - start);
    return ret;
}

int snapshot_release_saved(QEMUFile *f)
{
    RAMBlock *rb = snapshot.run_block;

    if (!rb) {
        return 0;
    }
    /* The buffers of @f refer to the pages. */
    qemu_fflush(f);
    snapshot.run_block = NULL;
    return snapshot_release(rb, snapshot.run_start, snapshot.run_end);
}

/* A page that was asked for has been saved, now or before. */
static int snapshot_served(QEMUFile *f, RAMBlock *rb, ram_addr_t start)
{
    ram_addr_t end;
    int ret = 0;

    start = ROUND_DOWN(start, rb->page_size);
    end = MIN(start + rb->page_size, rb->used_length);
    if (snapshot.run_block == rb && start < snapshot.run_end &&
        end > snapshot.run_start) {
        ret = snapshot_release_saved(f);
    } else {
        if (!snapshot_copies(rb)) {
            qemu_fflush(f);
        }
        ret = snapshot_release(rb, start, end);
    }
    snapshot.serving = false;
    return ret;
}

int snapshot_saved(QEMUFile *f, RAMBlock *rb, ram_addr_t start, ram_addr_t end)
{
    int ret = 0;

    if (!(rb->flags & RAM_UF_WRITEPROTECT)) {
        return 0;
    }
    if (snapshot.serving) {
        return snapshot_served(f, rb, start);
    }
    if (snapshot.run_block != rb || snapshot.run_end != start) {
        ret = snapshot_release_saved(f);
        snapshot.run_block = rb;
        snapshot.run_start = start;
    }
    snapshot.run_end = end;
    if (!ret &&
        ((uintptr_t)rb->host + snapshot.run_start) / RUN_ALIGN !=
        ((uintptr_t)rb->host + end) / RUN_ALIGN) {
        ret = snapshot_release_saved(f);
    }
    return ret;
}

void snapshot_stop(void)
{
    WITH_QEMU_LOCK_GUARD(&snapshot.lock) {
        qatomic_set(&snapshot.uffd, -1);
    }
    snapshot_holes_free(snapshot.holes);
    snapshot.holes = NULL;
    /* Other migrations save pages too. */
    snapshot.serving = false;
    snapshot.run_block = NULL;
}

void snapshot_give_up(void)
{
    RAMBlock *rb;

    QEMU_LOCK_GUARD(&snapshot.lock);
    if (snapshot.uffd < 0) {
        return;
    }
    trace_snapshot_give_up();
    RCU_READ_LOCK_GUARD();
    RAMBLOCK_FOREACH_NOT_IGNORED(rb) {
        if (rb->flags & RAM_UF_WRITEPROTECT) {
            uffd_unregister_memory(snapshot.uffd, rb->host, rb->max_length);
            /* The kernel wakes who waits for missing pages only. */
            uffd_wakeup(snapshot.uffd, rb->host, rb->max_length);
        }
    }
    qatomic_set(&snapshot.uffd, -1);
}

void snapshot_fill_info(MigrationInfo *info)
{
    BackgroundSnapshotInfo *s;

    QEMU_LOCK_GUARD(&snapshot.lock);
    if (!snapshot.exists || !migrate_background_snapshot()) {
        return;
    }
    info->background_snapshot = s = g_new0(BackgroundSnapshotInfo, 1);
    s->setup_anonymous = snapshot.anonymous;
    s->setup_file = snapshot.file;
    s->holes = stat64_get(&snapshot.nr_holes);
    s->faults = stat64_get(&snapshot.nr_served);
    s->faults_together = stat64_get(&snapshot.nr_stale);
    s->fault_reads = stat64_get(&snapshot.nr_reads);
    s->releases = stat64_get(&snapshot.nr_releases);
}
