/*
 * Postcopy: a guest that runs while its memory is in a file
 *
 * The file is one more source of pages (source.h).  A thread that misses a page
 * reads and places it by itself if the host's page cache has it: this takes no
 * longer than to notify another thread, and wakes no thread.  Other threads
 * read pages that must be waited for, as a vCPU must stay interruptible, and
 * the fault thread serves all that wait in userfaultfd.
 *
 * The file does not change, so a page is read first and claimed after that: two
 * threads that read the same page do not wait for each other.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/ioctl.h>
#include <linux/userfaultfd.h>
#include "qapi/error.h"
#include "qapi/qapi-types-migration.h"
#include "qemu/bitmap.h"
#include "qemu/coroutine.h"
#include "qemu/error-report.h"
#include "qemu/host-utils.h"
#include "qemu/lockable.h"
#include "qemu/madvise.h"
#include "qemu/main-loop.h"
#include "qemu/mmap-alloc.h"
#include "qemu/queue.h"
#include "qemu/rcu.h"
#include "qemu/stats64.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "qemu/userfaultfd.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "exec/target_page.h"
#include "io/channel-file.h"
#include "migration/inject.h"
#include "migration/misc.h"
#include "migration/options.h"
#include "migration/postcopy-ram.h"
#include "migration/qemu-file.h"
#include "migration/ram.h"
#include "migration/yank_functions.h"
#include "fault.h"
#include "file.h"
#include "incoming.h"
#include "receive.h"
#include "working-set.h"
#include "trace.h"

/*
 * RUN_SIZE is read at once of pages that no thread has missed: a disk takes
 * some time for each read, and the kernel has huge pages of this size.  Of
 * these, PLACE_SIZE is placed at once unless they become a huge page, as a vCPU
 * that misses one of them waits.
 */
#define RUN_SIZE (2 * MiB)
#define PLACE_SIZE (256 * KiB)

/*
 * Bytes that are read with a missed page, aligned.  Each small page takes some
 * microseconds to place, for which the vCPU waits; a fault takes ten or more.
 */
#define AROUND_SIZE (16 * KiB)

/*
 * Bytes that the page cache reads, aligned, when a missed page has to be waited
 * for: a disk hardly takes longer for them
 */
#define READ_AHEAD_SIZE (256 * KiB)

/* For how long, in ns, missed pages belong to the working set */
#define WORKING_SET_NS (3 * NANOSECONDS_PER_SECOND)

/*
 * Holes of this size are given to the kernel, so that the guest has zeros there
 * without a fault that QEMU serves, and huge pages.  There may be more smaller
 * ones than a process may have mappings.
 */
#define HOLE_SIZE (2 * MiB)
#define HOLES_MAX 1024

/* Threads that read uncached pages: a slow disk serves several */
#define READERS 4

/*
 * For how long, in ns from the first page on, the guest waits for its working
 * set: the readers place pages faster than vCPUs that miss each page
 */
#define AHEAD_NS (100 * SCALE_MS)

/* How long to wait, in ms, for pages that other threads have claimed */
#define END_MS 100

/* How often to poll, in us, whether the rest is to be read by now */
#define LOOK_US 20000

typedef struct PostcopyFileBlock {
    RAMBlock *rb;
    uint64_t bitmap_offset;
    uint64_t pages_offset;
    /* Target pages that the file contains.  Constant. */
    unsigned long *bitmap;
} PostcopyFileBlock;

typedef struct FileTask {
    RAMBlock *rb;
    /* In bytes */
    ram_addr_t start;
    /* 0: the page at @start was missed.  Else the size of a run. */
    size_t size;
    QTAILQ_ENTRY(FileTask) next;
} FileTask;

/*
 * PostcopyIncoming.file.  Made and freed with the BQL; threads that miss pages
 * use it between postcopy_requests_enter() and postcopy_requests_leave(), and
 * its own threads exit before it is freed.
 */
struct PostcopyFile {
    /* PostcopyFileBlock; constant once memory may be missing */
    GArray *blocks;
    /*
     * Constant.  postcopy_file_recover() replaces the open file behind it, as
     * dup2() does, which threads that read do not notice.
     */
    int fd;
    /* The file system may support RWF_NOWAIT.  Atomic. */
    bool nowait;
    /* The file system has no disk below it.  Atomic. */
    bool memory;
    /*
     * No more is read until a recovery, or at all.  Atomic; the thread that
     * sets it changes the status to POSTCOPY_PAUSED.  Cleared before
     * outstanding pages are listed.
     */
    bool paused;
    /* Posted by the thread that has cleared @paused */
    QemuSemaphore recovered;
    /*
     * Pages to wait for, missed ones first.  @tasks_lock protects @tasks and
     * @quit.
     */
    QTAILQ_HEAD(, FileTask) tasks;
    QemuMutex tasks_lock;
    QemuCond tasks_changed;
    /* Readers start no more tasks, and exit */
    bool quit;
    QemuThread readers[READERS];
    /* The kernel has UFFDIO_MOVE.  Constant once memory may be missing. */
    bool can_move;
    /* Memory may be missing.  With the BQL. */
    bool reading;
    /* Atomic: number of tasks of the working set */
    unsigned ahead;
    /* Missed pages that had to be waited for */
    Stat64 uncached;
    /* The last page that was missed, as a ram_addr_t */
    Stat64 missed;
    /*
     * The last of @missed that postcopy_file_run()'s thread, its only user, saw
     */
    uint64_t followed;
    /* The working set, or NULL.  Constant once memory may be missing. */
    PostcopyWorkingSet *set;
    /* Atomic: missed pages are added to @set */
    bool recording;
    int64_t recording_since;
};

bool postcopy_file_check(Error **errp)
{
    const char *what = migrate_postcopy_preempt() ? "postcopy-preempt" :
                       migrate_multifd() ? "multifd" :
                       migrate_postcopy_fetch_channels() > 0 ?
                       "postcopy-fetch-channels" : NULL;

    if (!migrate_mapped_ram() || !migrate_postcopy_ram() || !what) {
        return true;
    }
    error_setg(errp, "A guest that runs while its memory is in a file (mapped-"
               "ram with postcopy-ram) has no use for %s: switch it off", what);
    return false;
}

void postcopy_file_unlock(QEMUFile *f)
{
    QIOChannel *ioc = qemu_file_get_ioc(f);

    if (object_dynamic_cast(OBJECT(ioc), TYPE_QIO_CHANNEL_FILE)) {
        qemu_unlock_fd(QIO_CHANNEL_FILE(ioc)->fd, 0, 0);
    }
}

bool postcopy_file_lock(int fd, Error **errp)
{
    int ret = qemu_lock_fd(fd, 0, 0, true);

    /* Not all file systems have locks */
    if (ret == -EAGAIN || ret == -EACCES) {
        error_setg(errp, "A guest runs from this file, which would be lost: "
                   "save to another one");
        return false;
    }
    return true;
}

/* Name for messages; the caller frees it */
static char *file_name(struct PostcopyFile *file)
{
    g_autofree char *link = g_strdup_printf("/proc/self/fd/%d", file->fd);

    return g_file_read_link(link, NULL) ?: g_strdup("the file");
}

static PostcopyFileBlock *file_block_at(struct PostcopyFile *file, guint i)
{
    return &g_array_index(file->blocks, PostcopyFileBlock, i);
}

static PostcopyFileBlock *file_block(struct PostcopyFile *file, RAMBlock *rb)
{
    for (guint i = 0; i < file->blocks->len; i++) {
        PostcopyFileBlock *b = file_block_at(file, i);

        if (b->rb == rb) {
            return b;
        }
    }
    return NULL;
}

static void file_block_clear(gpointer p)
{
    PostcopyFileBlock *b = p;

    g_free(b->bitmap);
}

static void file_free(MigrationIncomingState *mis)
{
    struct PostcopyFile *file = mis->postcopy->file;
    FileTask *task;

    if (!file) {
        return;
    }
    mis->postcopy->file = NULL;
    /* Others may have the descriptor, of an fdset */
    qemu_unlock_fd(file->fd, 0, 0);
    close(file->fd);
    g_array_unref(file->blocks);
    while ((task = QTAILQ_FIRST(&file->tasks))) {
        QTAILQ_REMOVE(&file->tasks, task, next);
        g_free(task);
    }
    qemu_mutex_destroy(&file->tasks_lock);
    qemu_cond_destroy(&file->tasks_changed);
    postcopy_working_set_free(file->set);
    qemu_sem_destroy(&file->recovered);
    g_free(file);
}

/* Returns a new descriptor of @f's open file, or -1 */
static int file_dup(QEMUFile *f, Error **errp)
{
    QIOChannel *ioc = qemu_file_get_ioc(f);
    int fd = -1, ret;

    if (!object_dynamic_cast(OBJECT(ioc), TYPE_QIO_CHANNEL_FILE)) {
        error_setg(errp, "mapped-ram with postcopy-ram needs a file: URI");
        return -1;
    }
    fd = qemu_dup(QIO_CHANNEL_FILE(ioc)->fd);
    if (fd < 0) {
        error_setg_errno(errp, errno, "cannot keep the file open");
        return -1;
    }
    /* A save to the same file would truncate it */
    ret = qemu_lock_fd(fd, 0, 0, false);
    if (ret == -EAGAIN || ret == -EACCES) {
        error_setg(errp, "the file is being written by another QEMU");
        close(fd);
        return -1;
    }
    return fd;
}

/* How @file->fd, which was opened or replaced, can be read */
static void file_look(struct PostcopyFile *file)
{
    qatomic_set(&file->memory,
                qemu_fd_getfs(file->fd) == QEMU_FS_TYPE_TMPFS);
    qatomic_set(&file->nowait, true);
}

static struct PostcopyFile *file_new(QEMUFile *f, Error **errp)
{
    int fd = file_dup(f, errp);
    struct PostcopyFile *file;

    if (fd < 0) {
        return NULL;
    }
    file = g_new0(struct PostcopyFile, 1);
    file->fd = fd;
    file_look(file);
    file->blocks = g_array_new(false, false, sizeof(PostcopyFileBlock));
    g_array_set_clear_func(file->blocks, file_block_clear);
    QTAILQ_INIT(&file->tasks);
    qemu_mutex_init(&file->tasks_lock);
    qemu_cond_init(&file->tasks_changed);
    qemu_sem_init(&file->recovered, 0);
    return file;
}

bool postcopy_file_active(MigrationIncomingState *mis)
{
    return mis->postcopy->file;
}

bool postcopy_file_add(QEMUFile *f, RAMBlock *rb, uint64_t bitmap_offset,
                       uint64_t pages_offset, unsigned long *bitmap,
                       Error **errp)
{
    MigrationIncomingState *mis = migration_incoming_get_current();
    size_t pages = rb->used_length >> qemu_target_page_bits();
    PostcopyFileBlock block = { rb, bitmap_offset, pages_offset, bitmap };
    struct stat st;

    if (!mis->postcopy->file) {
        mis->postcopy->file = file_new(f, errp);
    }
    if (!mis->postcopy->file) {
        g_free(bitmap);
        return false;
    }
    if (file_block(mis->postcopy->file, rb)) {
        error_setg(errp, "block %s is in the file twice", rb->idstr);
        g_free(bitmap);
        return false;
    }
    g_array_append_val(mis->postcopy->file->blocks, block);

    if (rb->flags & RAM_PMEM) {
        error_setg(errp, "block %s is an NVDIMM, which postcopy cannot have",
                   rb->idstr);
        return false;
    }
    if (fstat(mis->postcopy->file->fd, &st)) {
        error_setg_errno(errp, errno, "cannot look at the file");
        return false;
    }
    /* Up to the last page that is in the file */
    while (pages && !test_bit(pages - 1, bitmap)) {
        pages--;
    }
    if (pages_offset > INT64_MAX - rb->used_length ||
        (pages &&
         st.st_size < pages_offset + pages * qemu_target_page_size())) {
        error_setg(errp, "the file ends at %" PRId64 ", before the last page "
                   "of block %s: it has been truncated", (int64_t)st.st_size,
                   rb->idstr);
        return false;
    }
    return true;
}

/* Whether there are data where the file has @b's pages */
static bool file_has_data(struct PostcopyFile *file, PostcopyFileBlock *b)
{
    /* The devices are read from this position */
    off_t was = lseek(file->fd, 0, SEEK_CUR);
    off_t at = lseek(file->fd, b->pages_offset, SEEK_DATA);

    lseek(file->fd, was, SEEK_SET);
    return at >= 0 && at < b->pages_offset + b->rb->used_length;
}

/*
 * QEMU 10.0 does not write the bitmaps of a background snapshot.  All of the
 * guest's memory seems to be empty in such a file.
 */
static bool file_has_pages(struct PostcopyFile *file, Error **errp)
{
    bool data = false;

    for (guint i = 0; i < file->blocks->len; i++) {
        PostcopyFileBlock *b = file_block_at(file, i);
        size_t pages = b->rb->used_length >> qemu_target_page_bits();

        if (find_first_bit(b->bitmap, pages) < pages) {
            return true;
        }
        data |= file_has_data(file, b);
    }
    if (data) {
        error_setg(errp, "the file has pages, and its bitmaps name none: a "
                   "background snapshot of a QEMU that does not write them. "
                   "It has to be taken anew");
    }
    return !data;
}

/* Whether the file has no page from @start to @end, in bytes */
static bool file_has_none(PostcopyFileBlock *b, ram_addr_t start,
                          ram_addr_t end)
{
    unsigned bits = qemu_target_page_bits();

    return find_next_bit(b->bitmap, end >> bits, start >> bits) >= end >> bits;
}

/* Whether a host page is a hole.  @start: its offset in the block */
static bool file_is_hole(PostcopyFileBlock *b, ram_addr_t start)
{
    return file_has_none(b, start, start + qemu_ram_pagesize(b->rb));
}

static int file_hole_unregister(MigrationIncomingState *mis, RAMBlock *rb,
                                ram_addr_t start, ram_addr_t size)
{
    struct uffdio_range range = {
        .start = (uintptr_t)rb->host + start, .len = size
    };
    int ret = ioctl(mis->userfault_fd, UFFDIO_UNREGISTER, &range) ? -errno : 0;

    trace_postcopy_file_hole(rb->idstr, start, size, ret);
    if (ret) {
        error_report("postcopy: cannot give a hole of %s to the kernel: %s",
                     rb->idstr, strerror(-ret));
    }
    return ret;
}

/*
 * Large holes of @b are received; once memory is registered, @unregister them.
 * Host pages may be larger than the target's.
 */
static int file_block_holes(MigrationIncomingState *mis, PostcopyFileBlock *b,
                            bool unregister)
{
    ram_addr_t length = b->rb->postcopy_length;
    size_t page = qemu_ram_pagesize(b->rb);
    unsigned bits = qemu_target_page_bits();
    size_t pages = length >> bits;
    ram_addr_t least = MAX(HOLE_SIZE, length / HOLES_MAX);
    int ret = 0;

    /* A backend's userfaultfd misses a hole that no page of its file fills */
    if (qemu_ram_is_shared(b->rb) && mis->postcopy_remote_fds->len) {
        return 0;
    }
    for (size_t bit = 0; bit < pages && !ret; ) {
        size_t zero = find_next_zero_bit(b->bitmap, pages, bit);
        size_t end = find_next_bit(b->bitmap, pages, zero);
        ram_addr_t first = ROUND_UP((ram_addr_t)zero << bits, page);
        ram_addr_t last = end == pages ? length :
                          ROUND_DOWN((ram_addr_t)end << bits, page);

        bit = end;
        if (first >= last || last - first < least) {
            continue;
        }
        if (unregister) {
            ret = file_hole_unregister(mis, b->rb, first, last - first);
        } else {
            ramblock_recv_bitmap_set_range(b->rb, b->rb->host + first,
                                           (last - first) >> bits);
        }
    }
    return ret;
}

static int file_holes(MigrationIncomingState *mis, bool unregister)
{
    struct PostcopyFile *file = mis->postcopy->file;
    int ret = 0;

    for (guint i = 0; i < file->blocks->len && !ret; i++) {
        ret = file_block_holes(mis, file_block_at(file, i), unregister);
    }
    return ret;
}

static int file_empty(struct PostcopyFile *file)
{
    int ret = 0;

    for (guint i = 0; i < file->blocks->len && !ret; i++) {
        RAMBlock *rb = file_block_at(file, i)->rb;

        rb->postcopy_length = rb->used_length;
        /* ROMs and tables that this QEMU has made are in the file, too */
        ret = ram_discard_range(rb->idstr, 0, rb->used_length);
    }
    return ret;
}

static int file_not_missing(RAMBlock *rb, void *opaque)
{
    rb->postcopy_length = 0;
    return 0;
}

static void file_push(struct PostcopyFile *file, RAMBlock *rb,
                      ram_addr_t start, size_t size)
{
    FileTask *task = g_new(FileTask, 1);

    *task = (FileTask) { .rb = rb, .start = start, .size = size };
    QEMU_LOCK_GUARD(&file->tasks_lock);
    if (size) {
        qatomic_inc(&file->ahead);
        QTAILQ_INSERT_TAIL(&file->tasks, task, next);
    } else {
        QTAILQ_INSERT_HEAD(&file->tasks, task, next);
    }
    qemu_cond_signal(&file->tasks_changed);
}

/* The caller frees the task; NULL: exit */
static FileTask *file_pop(struct PostcopyFile *file)
{
    FileTask *task;

    QEMU_LOCK_GUARD(&file->tasks_lock);
    while (QTAILQ_EMPTY(&file->tasks) && !file->quit) {
        qemu_cond_wait(&file->tasks_changed, &file->tasks_lock);
    }
    if (file->quit) {
        return NULL;
    }
    task = QTAILQ_FIRST(&file->tasks);
    QTAILQ_REMOVE(&file->tasks, task, next);
    return task;
}

static void file_push_run(RAMBlock *rb, ram_addr_t start, ram_addr_t size,
                          void *opaque)
{
    file_push(opaque, rb, start, size);
}

static void *file_reader_thread(void *opaque);

static int file_begin(MigrationIncomingState *mis, Error **errp)
{
    struct PostcopyFile *file = mis->postcopy->file;
    uint64_t features;

    if (!file_has_pages(file, errp) ||
        !postcopy_ram_supported_by_host(mis, errp) ||
        !postcopy_fault_exits_check(errp) ||
        postcopy_notify(POSTCOPY_NOTIFY_INBOUND_ADVISE, errp)) {
        return -EINVAL;
    }
    postcopy_state_set(POSTCOPY_INCOMING_ADVISE);
    foreach_not_ignored_block(file_not_missing, NULL);
    if (file_empty(file)) {
        error_setg(errp, "cannot empty the guest's memory");
        return -EINVAL;
    }
    file->can_move = !uffd_query_features(&features) &&
                     features & UFFD_FEATURE_MOVE;
    postcopy_ram_prepare_discard(mis);
    /* Before memslots are flagged: that checks which pages are missing */
    file_holes(mis, false);
    for (unsigned i = 0; i < READERS; i++) {
        g_autofree char *name = g_strdup_printf("mig/dst/file%u", i);

        qemu_thread_create(&file->readers[i], name, file_reader_thread, mis,
                           QEMU_THREAD_JOINABLE);
    }
    file->reading = true;
    postcopy_state_set(POSTCOPY_INCOMING_LISTENING);
    if (postcopy_ram_incoming_setup(mis) ||
        file_holes(mis, true)) {
        error_setg(errp, "cannot set up userfaultfd");
        return -EINVAL;
    }
    if (postcopy_notify(POSTCOPY_NOTIFY_INBOUND_LISTEN, errp)) {
        return -EINVAL;
    }
    if (migrate_restore_working_set() && *migrate_restore_working_set()) {
        file->set = postcopy_working_set_new(migrate_restore_working_set());
    }
    if (file->set) {
        file->recording_since = get_clock();
        qatomic_set(&file->recording, true);
        postcopy_working_set_each(file->set, RUN_SIZE, file_push_run, file);
    }
    return 0;
}

int postcopy_file_begin(MigrationIncomingState *mis)
{
    Error *err = NULL;

    if (!mis->postcopy->file || mis->postcopy->file->reading) {
        return 0;
    }
    if (file_begin(mis, &err)) {
        error_reportf_err(err, "The guest cannot run while its memory is in "
                          "the file: ");
        return -EINVAL;
    }
    trace_postcopy_file_begin(mis->postcopy->file->blocks->len);
    return 0;
}

/* Reading */

/* Only the first error is reported, until the status changes */
static void file_failed(MigrationIncomingState *mis, Error *err)
{
    struct PostcopyFile *file = mis->postcopy->file;
    MigrationStatus status;

    if (postcopy_state_cmpxchg(POSTCOPY_INCOMING_LISTENING,
                               POSTCOPY_INCOMING_END)) {
        /* postcopy_file_loaded() checks this: the guest does not run */
        error_report_err(err);
        return;
    }
    if (postcopy_state_get() != POSTCOPY_INCOMING_RUNNING ||
        qatomic_xchg(&file->paused, true)) {
        error_free(err);
        return;
    }
    error_prepend(&err, "postcopy is paused, and continues after "
                  "migrate-recover file: ");
    migrate_set_error(migrate_get_current(), err);
    /* The main thread may be about to change it, before the guest runs */
    do {
        status = qatomic_read(&mis->state);
    } while (!migrate_set_state(&mis->state, status,
                                MIGRATION_STATUS_POSTCOPY_PAUSED));
    error_report_err(err);
}

/*
 * Returns 0, -EAGAIN if it would have to wait and must not, or negative errno
 * after it has reported the error
 */
static int file_read(MigrationIncomingState *mis, RAMBlock *rb, void *to,
                     ram_addr_t start, size_t size, bool wait)
{
    struct PostcopyFile *file = mis->postcopy->file;
    uint64_t at = file_block(file, rb)->pages_offset + start;
    g_autofree char *name = NULL;
    Error *err = NULL;
    size_t done = 0;
    ssize_t ret = 0;

    if (!wait && !qatomic_read(&file->nowait) && !qatomic_read(&file->memory)) {
        return -EAGAIN;
    }
    while (done < size) {
        struct iovec iov = { to + done, size - done };
        bool now = !wait && qatomic_read(&file->nowait);

        ret = preadv2(file->fd, &iov, 1, at + done, now ? RWF_NOWAIT : 0);
        if (ret < 0 && errno == EOPNOTSUPP && now) {
            qatomic_set(&file->nowait, false);
            if (!qatomic_read(&file->memory)) {
                return -EAGAIN;
            }
            continue;
        }
        if (ret < 0 && errno == EINTR) {
            continue;
        }
        if (now && (ret < 0 ? errno == EAGAIN : done + ret < size)) {
            return -EAGAIN;
        }
        if (ret <= 0 || migration_inject_fail("postcopy-file-read")) {
            ret = ret < 0 ? -errno : -EIO;
            break;
        }
        done += ret;
    }
    if (done == size) {
        return 0;
    }
    name = file_name(file);
    error_setg(&err, "cannot read %s at %" PRIu64 " (0x" RAM_ADDR_FMT " of %s)"
               ": %s", name, at + done, start + done, rb->idstr,
               ret == -EIO ? "the file ends, or its disk fails" :
               strerror(-ret));
    file_failed(mis, err);
    return ret;
}

/*
 * Read, of the pages from @start to @end, in bytes, from the first one that the
 * file contains to the last one.  The content of holes in between is invalid.
 * Returns as file_read().
 */
static int file_read_pages(MigrationIncomingState *mis, PostcopyFileBlock *b,
                           ram_addr_t start, ram_addr_t end, void *to,
                           bool wait)
{
    unsigned bits = qemu_target_page_bits();
    size_t first = find_next_bit(b->bitmap, end >> bits, start >> bits);
    size_t last = find_last_bit(b->bitmap, end >> bits);
    ram_addr_t from = (ram_addr_t)first << bits;

    if (first == end >> bits) {
        return 0;
    }
    return file_read(mis, b->rb, to + (from - start), from,
                     ((ram_addr_t)(last + 1) << bits) - from, wait);
}

/* Clear the holes in @data, which was read */
static void file_clear_holes(PostcopyFileBlock *b, ram_addr_t start,
                             ram_addr_t end, void *data)
{
    unsigned bits = qemu_target_page_bits();

    for (ram_addr_t at = start; at < end; at += 1 << bits) {
        if (!test_bit(at >> bits, b->bitmap)) {
            memset(data + (at - start), 0, 1 << bits);
        }
    }
}

static int file_place_huge(MigrationIncomingState *mis,
                           const PostcopyPage *page, bool wait)
{
    PostcopyFileBlock *b = file_block(mis->postcopy->file, page->rb);
    g_autofree void *buffer = g_try_malloc(page->size);
    int ret = buffer ? file_read_pages(mis, b, page->start,
                                       page->start + page->size, buffer, wait)
                     : -ENOMEM;

    if (ret) {
        return ret;
    }
    file_clear_holes(b, page->start, page->start + page->size, buffer);
    return postcopy_receive_page(mis, page, buffer);
}

/*
 * The first target page from @bit on that was received, or was not; @end if
 * there is none.  Takes no lock: pages that are received meanwhile are dropped
 * when they are claimed.
 */
static size_t file_next(RAMBlock *rb, size_t end, size_t bit, bool received)
{
    while (bit < end) {
        unsigned long word = qatomic_read(&rb->receivedmap[BIT_WORD(bit)]);

        word = (received ? word : ~word) & BITMAP_FIRST_WORD_MASK(bit);
        if (word) {
            return MIN(BIT_WORD(bit) * BITS_PER_LONG + ctzl(word), end);
        }
        bit = (BIT_WORD(bit) + 1) * BITS_PER_LONG;
    }
    return end;
}

/*
 * How many small pages from @page on were not received, and are all in the file
 * or all holes, unless the holes were @cleared.  They end at @end, in bytes;
 * other pages follow later.
 */
static unsigned file_run(PostcopyFileBlock *b, const PostcopyPage *page,
                         ram_addr_t end, bool cleared)
{
    unsigned bits = qemu_target_page_bits();
    size_t first = page->start >> bits;
    size_t most = MIN(end, b->rb->postcopy_length) >> bits;

    most = file_next(b->rb, most, first, true);
    if (cleared) {
        return most - first;
    }
    return (test_bit(first, b->bitmap) ?
            find_next_zero_bit(b->bitmap, most, first) :
            find_next_bit(b->bitmap, most, first)) - first;
}

/*
 * Place small pages from @start to @end, in bytes, of which some may have been
 * received.  @data: their content in the file, and zeros for holes if these
 * were @cleared
 */
static int file_place_parts(MigrationIncomingState *mis, PostcopyFileBlock *b,
                            ram_addr_t start, ram_addr_t end, void *data,
                            bool cleared)
{
    ram_addr_t at = start;
    int ret = 0;

    while (at < end && !ret) {
        PostcopyPage page = postcopy_page(b->rb, at);
        unsigned n = file_run(b, &page, MIN(at + PLACE_SIZE, end), cleared);

        if (n) {
            ret = postcopy_receive_pages(mis, &page, n,
                                         !cleared && file_is_hole(b, at) ?
                                         NULL : data + (at - start), false);
        }
        at += MAX(n, 1) * page.size;
    }
    return ret;
}

/* First page that is placed with @page; only itself if it is a huge page */
static ram_addr_t file_around(const PostcopyPage *page)
{
    return ROUND_DOWN(page->start, AROUND_SIZE);
}

static ram_addr_t file_around_end(const PostcopyPage *page)
{
    return MIN(file_around(page) + MAX(AROUND_SIZE, page->size),
               page->rb->postcopy_length);
}

/*
 * Read a host page, and place it, with small ones around it.  Returns as
 * file_read().  The caller is inside (postcopy_requests_enter()), or exits
 * before postcopy_requests_stop().
 */
static int file_place(MigrationIncomingState *mis, const PostcopyPage *page,
                      bool wait)
{
    PostcopyFileBlock *b = file_block(mis->postcopy->file, page->rb);
    ram_addr_t start = file_around(page), end = file_around_end(page);
    g_autofree void *buffer = NULL;
    bool hole;
    int ret;

    if (!b || ramblock_page_is_discarded(b->rb, page->start)) {
        return postcopy_receive_page(mis, page, NULL);
    }
    if (page->size > qemu_target_page_size()) {
        return file_is_hole(b, page->start) ?
               postcopy_receive_page(mis, page, NULL) :
               file_place_huge(mis, page, wait);
    }
    buffer = g_malloc(end - start);
    ret = file_read_pages(mis, b, start, end, buffer, wait);
    if (ret == -EAGAIN && file_is_hole(b, page->start)) {
        /* A hole need not wait for others; copied zeros cause no exit */
        return postcopy_receive_page(mis, page, mis->postcopy_tmp_zero_page);
    }
    if (ret) {
        return ret;
    }
    /* One system call for all, even if some of them are holes */
    hole = file_has_none(b, start, end);
    if (!hole) {
        file_clear_holes(b, start, end, buffer);
    }
    return file_place_parts(mis, b, start, end, buffer, !hole);
}

/* If a read has failed, its error was reported first */
static void file_place_failed(MigrationIncomingState *mis,
                              const PostcopyPage *page, int ret)
{
    Error *err = NULL;

    error_setg(&err, "cannot place the page at 0x" RAM_ADDR_FMT " of %s: %s",
               page->start, page->rb->idstr, strerror(-ret));
    file_failed(mis, err);
}

/*
 * Place a page that is requested.  If a page of the devices cannot be read, it
 * becomes zeros, so that the load ends, with an error.
 */
static int file_place_requested(MigrationIncomingState *mis,
                                const PostcopyPage *page, bool wait)
{
    int ret = -EIO;

    if (postcopy_state_get() != POSTCOPY_INCOMING_END) {
        ret = file_place(mis, page, wait);
        if (!ret || ret == -EAGAIN) {
            return ret;
        }
        file_place_failed(mis, page, ret);
    }
    return postcopy_state_get() == POSTCOPY_INCOMING_END ?
           postcopy_receive_page(mis, page, NULL) : ret;
}

static void file_record(struct PostcopyFile *file, const PostcopyPage *page)
{
    stat64_set(&file->missed, page->rb->offset + page->start);
    if (qatomic_read(&file->recording)) {
        /* With the pages that are read along, which are not missed then */
        postcopy_working_set_add(file->set, page->rb, file_around(page),
                                 MAX(page->size, AROUND_SIZE));
    }
}

/* Any thread that misses a page: place it, or let a reader do so */
static int file_request(MigrationIncomingState *mis, const PostcopyPage *page,
                        bool flush_later)
{
    PostcopyRequests *r = mis->postcopy->requests;
    struct PostcopyFile *file;
    int ret = -EIO;

    if (!postcopy_requests_enter(r)) {
        return 0;
    }
    file = mis->postcopy->file;
    file_record(file, page);
    if (!qatomic_read(&file->paused)) {
        ret = file_place_requested(mis, page, false);
    }
    if (ret == -EAGAIN) {
        trace_postcopy_file_missed(page->rb->idstr, page->start);
        stat64_add(&file->uncached, 1);
        file_push(file, page->rb, page->start, 0);
    }
    postcopy_requests_leave(r);
    return ret == -EAGAIN ? 0 : ret;
}

/*
 * Not for pages that were received: the vCPU exits for such a page as it is not
 * writable, like the kernel's zero page.  So zeros are copied; if all small
 * pages around are holes, only those of this one.
 */
static bool file_serve_inside(MigrationIncomingState *mis,
                              const PostcopyPage *page)
{
    PostcopyFileBlock *b = file_block(mis->postcopy->file, page->rb);
    size_t at = page->start >> qemu_target_page_bits();

    if (!b || qatomic_read(&mis->postcopy->file->paused) ||
        file_next(b->rb, at + 1, at, true) == at ||
        ramblock_page_is_discarded(b->rb, page->start)) {
        return false;
    }
    return file_has_none(b, file_around(page), file_around_end(page)) ?
           !postcopy_receive_page(mis, page, mis->postcopy_tmp_zero_page) :
           !file_place_requested(mis, page, false);
}

static bool file_serve(MigrationIncomingState *mis, const PostcopyPage *page,
                       int cpu_index)
{
    PostcopyRequests *r = mis->postcopy->requests;
    int64_t since = get_clock();
    bool placed;

    if (!postcopy_requests_enter(r)) {
        return false;
    }
    placed = file_serve_inside(mis, page) &&
             postcopy_requests_served(r, page, cpu_index,
                                      get_clock() - since);
    if (placed) {
        file_record(mis->postcopy->file, page);
    }
    postcopy_requests_leave(r);
    return placed;
}

static void file_flush(MigrationIncomingState *mis)
{
}

const PostcopySource postcopy_file = {
    .request = file_request,
    .flush = file_flush,
    .serve = file_serve,
};

/*
 * Whether the small pages from @start to @end can be one huge page: none of
 * them was received, and at most half of them are holes
 */
static bool file_is_huge(struct PostcopyFile *file, PostcopyFileBlock *b,
                         ram_addr_t start, ram_addr_t end)
{
    unsigned bits = qemu_target_page_bits();
    size_t first = start >> bits, pages = (end - start) >> bits;

    return file->can_move && end - start == RUN_SIZE &&
           b->rb->fd < 0 && !qemu_ram_is_shared(b->rb) &&
           QEMU_PTR_IS_ALIGNED(b->rb->host + start, RUN_SIZE) &&
           file_next(b->rb, first + pages, first, true) == first + pages &&
           bitmap_count_one_with_offset(b->bitmap, first, pages) >= pages / 2;
}

/* RUN_SIZE bytes, a huge page if the kernel has one; or NULL */
static void *file_new_buffer(void)
{
    void *buffer = qemu_anon_ram_alloc(RUN_SIZE, NULL, false, false);

    if (buffer) {
        qemu_madvise(buffer, RUN_SIZE, QEMU_MADV_HUGEPAGE);
    }
    return buffer;
}

/*
 * The buffer was moved.  Where the kernel had to move small pages, their page
 * table is left, so that the buffer would never be a huge page again.
 */
static void file_renew_buffer(void **buffer)
{
    void *fresh = file_new_buffer();

    if (fresh) {
        qemu_anon_ram_free(*buffer, RUN_SIZE);
        *buffer = fresh;
    }
}

/*
 * Returns how many bytes of @b were placed from @page on, at most up to the
 * next multiple of RUN_SIZE or one page, or negative errno
 */
static int64_t file_place_run(MigrationIncomingState *mis, PostcopyFileBlock *b,
                              const PostcopyPage *page, size_t size,
                              void **buffer)
{
    ram_addr_t to_next = RUN_SIZE - ((uintptr_t)page->host & (RUN_SIZE - 1));
    ram_addr_t end = MIN(page->start + MIN(size, to_next),
                         b->rb->postcopy_length);
    int ret;

    if (page->size > qemu_target_page_size()) {
        return file_place(mis, page, true) ?: (int64_t)page->size;
    }
    if (!*buffer) {
        return -ENOMEM;
    }
    ret = file_read_pages(mis, b, page->start, end, *buffer, true);
    if (!ret && file_is_huge(mis->postcopy->file, b, page->start, end)) {
        file_clear_holes(b, page->start, end, *buffer);
        ret = postcopy_receive_pages(mis, page, RUN_SIZE / page->size, *buffer,
                                     true);
        file_renew_buffer(buffer);
    } else if (!ret) {
        ret = file_place_parts(mis, b, page->start, end, *buffer, false);
    }
    return ret ?: (int64_t)(end - page->start);
}

/* Begin to read the pages around @start */
static void file_read_ahead(struct PostcopyFile *file, PostcopyFileBlock *b,
                            ram_addr_t start)
{
    ram_addr_t first = ROUND_DOWN(start, READ_AHEAD_SIZE);
    ram_addr_t end = MIN(first + READ_AHEAD_SIZE, b->rb->postcopy_length);

    posix_fadvise(file->fd, b->pages_offset + first, end - first,
                  POSIX_FADV_WILLNEED);
}

/* While it is paused, and after an error, a recovery requests pages again */
static void file_do_task(MigrationIncomingState *mis, const FileTask *task,
                         void **buffer)
{
    PostcopyFileBlock *b = file_block(mis->postcopy->file, task->rb);
    PostcopyPage page = postcopy_page(task->rb, task->start);
    ram_addr_t end = task->start + task->size;

    if (!task->size) {
        if (b) {
            file_read_ahead(mis->postcopy->file, b, task->start);
        }
        file_place_requested(mis, &page, true);
    } else if (b) {
        int64_t done = 0;

        /* Each huge page is placed by itself */
        while (done >= 0 && page.start < end) {
            done = file_place_run(mis, b, &page, end - page.start, buffer);
            page = postcopy_page(task->rb, page.start + MAX(done, 0));
        }
        if (done < 0 && *buffer) {
            /* Threads that missed these pages meanwhile wait for this one */
            file_place_failed(mis, &page, done);
        }
    }
}

static void *file_reader_thread(void *opaque)
{
    MigrationIncomingState *mis = opaque;
    struct PostcopyFile *file = mis->postcopy->file;
    void *buffer = file_new_buffer();
    FileTask *task;

    rcu_register_thread();
    while ((task = file_pop(file))) {
        if (!qatomic_read(&file->paused)) {
            file_do_task(mis, task, &buffer);
        }
        if (task->size) {
            qatomic_dec(&file->ahead);
        }
        g_free(task);
    }
    qemu_anon_ram_free(buffer, RUN_SIZE);
    rcu_unregister_thread();
    return NULL;
}

static void file_readers_stop(struct PostcopyFile *file)
{
    WITH_QEMU_LOCK_GUARD(&file->tasks_lock) {
        file->quit = true;
        qemu_cond_broadcast(&file->tasks_changed);
    }
    for (unsigned i = 0; i < READERS; i++) {
        qemu_thread_join(&file->readers[i]);
    }
}

/* Pages that no thread has missed */

/* Sleep, if @size bytes were read faster than allowed */
static void file_limit(MigrationIncomingState *mis, size_t size)
{
    uint64_t rate = migrate_max_postcopy_bandwidth();

    if (rate) {
        g_usleep(MIN(size * G_USEC_PER_SEC / rate, G_USEC_PER_SEC));
    }
}

/* End it if its time is over, or @now */
static void file_end_recording(struct PostcopyFile *file, bool now)
{
    if (file->recording &&
        (now || get_clock() - file->recording_since >= WORKING_SET_NS)) {
        qatomic_set(&file->recording, false);
        postcopy_working_set_write(file->set);
    }
}

/*
 * More pages are likely to be missed behind a missed page: the rest continues
 * there.  Sets @i and @bit, if there is a new one.
 */
static void file_follow(struct PostcopyFile *file, guint *i, size_t *bit)
{
    uint64_t at = stat64_get(&file->missed);

    if (at == file->followed) {
        return;
    }
    file->followed = at;
    for (guint n = 0; n < file->blocks->len; n++) {
        RAMBlock *rb = file_block_at(file, n)->rb;

        if (at - rb->offset < rb->postcopy_length) {
            *i = n;
            *bit = (at - rb->offset) >> qemu_target_page_bits();
        }
    }
}

/*
 * Returns 0 if in a whole round over the blocks no page was missing, -EIO if it
 * is paused, or negative errno
 */
static int file_place_rest(MigrationIncomingState *mis, void **buffer)
{
    struct PostcopyFile *file = mis->postcopy->file;
    unsigned bits = qemu_target_page_bits();
    size_t bit = 0;

    /* A round may begin inside of the first block, which is also the last */
    for (guint i = 0, whole = 0; whole <= file->blocks->len; ) {
        PostcopyFileBlock *b;
        PostcopyPage page;
        int64_t placed;
        size_t pages;

        file_end_recording(file, false);
        if (qatomic_load_acquire(&file->paused)) {
            return -EIO;
        }
        if (!migrate_restore_background() ||
            (file->recording && !postcopy_working_set_read(file->set))) {
            g_usleep(LOOK_US);
            continue;
        }
        file_follow(file, &i, &bit);
        b = file_block_at(file, i);
        pages = b->rb->postcopy_length >> bits;
        bit = file_next(b->rb, pages, bit, false);
        if (bit >= pages) {
            i = (i + 1) % file->blocks->len;
            bit = 0;
            whole++;
            continue;
        }
        page = postcopy_page(b->rb, (ram_addr_t)bit << bits);
        if (ramblock_page_is_discarded(b->rb, page.start)) {
            bit = (page.start + page.size) >> bits;
            continue;
        }
        migration_inject_hold("postcopy-file-rest");
        placed = file_place_run(mis, b, &page, RUN_SIZE, buffer);
        if (placed < 0) {
            return placed;
        }
        file_limit(mis, placed);
        bit = (page.start + placed) >> bits;
        whole = 0;
    }
    return 0;
}

/* Returns whether all pages were placed; if not, it is paused */
static bool file_place_all(MigrationIncomingState *mis, void **buffer)
{
    /* The next pass places pages that another thread has claimed in vain */
    do {
        int ret = file_place_rest(mis, buffer);

        if (ret) {
            Error *err = NULL;

            error_setg(&err, "cannot place the rest of the guest's memory: %s",
                       strerror(-ret));
            file_failed(mis, err);
            return false;
        }
    } while (!postcopy_requests_wait_empty(mis->postcopy->requests, END_MS));
    return true;
}

static void *file_thread(void *opaque)
{
    MigrationIncomingState *mis = opaque;
    struct PostcopyFile *file = mis->postcopy->file;
    void *buffer = file_new_buffer();

    rcu_register_thread();
    /* In the end this sets @paused, so that nothing pauses what is over */
    while (!file_place_all(mis, &buffer) || qatomic_xchg(&file->paused, true)) {
        qemu_sem_wait(&file->recovered);
    }
    qemu_anon_ram_free(buffer, RUN_SIZE);
    file_end_recording(file, true);
    file_readers_stop(file);
    postcopy_ram_incoming_cleanup(mis);

    /* A client that sees it completed must find nothing of it left */
    bql_lock();
    migrate_set_state(&mis->state, MIGRATION_STATUS_POSTCOPY_ACTIVE,
                      MIGRATION_STATUS_COMPLETED);
    file_free(mis);
    migration_incoming_state_destroy();
    postcopy_state_set(POSTCOPY_INCOMING_END);
    object_unref(OBJECT(migrate_get_current()));
    bql_unlock();
    rcu_unregister_thread();
    return NULL;
}

int coroutine_fn postcopy_file_loaded(MigrationIncomingState *mis, int ret)
{
    struct PostcopyFile *file = mis->postcopy->file;

    while (!ret && qatomic_read(&file->ahead) &&
           get_clock() - file->recording_since < AHEAD_NS) {
        qemu_co_sleep_ns(QEMU_CLOCK_REALTIME, SCALE_MS);
    }
    if (!ret && !postcopy_state_cmpxchg(POSTCOPY_INCOMING_LISTENING,
                                        POSTCOPY_INCOMING_RUNNING)) {
        error_report("The guest cannot run: its devices have been loaded with "
                     "pages that cannot be read");
        ret = -EIO;
    }
    if (ret) {
        if (file->reading) {
            file_readers_stop(file);
        }
        postcopy_ram_incoming_cleanup(mis);
        file_free(mis);
        return ret;
    }
    /* The next file is that of a recovery */
    migration_ioc_unregister_yank_from_file(mis->from_src_file);
    WITH_QEMU_LOCK_GUARD(&mis->from_src_file_mutex) {
        qemu_fclose(mis->from_src_file);
        mis->from_src_file = NULL;
    }
    migrate_set_state(&mis->state, MIGRATION_STATUS_ACTIVE,
                      MIGRATION_STATUS_POSTCOPY_ACTIVE);
    return 0;
}

void postcopy_file_run(MigrationIncomingState *mis)
{
    QemuThread thread;

    /* The thread reads parameters, also while QEMU quits */
    object_ref(OBJECT(migrate_get_current()));
    qemu_thread_create(&thread, "mig/dst/file", file_thread, mis,
                       QEMU_THREAD_DETACHED);
}

void postcopy_file_pause(MigrationIncomingState *mis)
{
    Error *err = NULL;

    if (postcopy_requests_enter(mis->postcopy->requests)) {
        error_setg(&err, "migrate-pause");
        file_failed(mis, err);
        postcopy_requests_leave(mis->postcopy->requests);
    }
}

/* Whether @fd has the bitmaps of the file from which the guest was started */
static bool file_is_same(struct PostcopyFile *file, int fd, Error **errp)
{
    for (guint i = 0; i < file->blocks->len; i++) {
        PostcopyFileBlock *b = file_block_at(file, i);
        size_t pages = b->rb->postcopy_length >> qemu_target_page_bits();
        size_t size = BITS_TO_LONGS(pages) * sizeof(unsigned long);
        g_autofree void *bitmap = g_malloc(size);

        if (pread(fd, bitmap, size, b->bitmap_offset) != size ||
            memcmp(bitmap, b->bitmap, size)) {
            error_setg(errp, "this is not the file from which the guest was "
                       "started: other pages of %s are in it", b->rb->idstr);
            return false;
        }
    }
    return true;
}

void postcopy_file_recover(MigrationIncomingState *mis, QEMUFile *f)
{
    struct PostcopyFile *file = mis->postcopy->file;
    MigrationState *s = migrate_get_current();
    Error *err = NULL;
    int fd = file_dup(f, &err);

    migration_ioc_unregister_yank_from_file(f);
    qemu_fclose(f);
    if (fd >= 0 && file_is_same(file, fd, &err) &&
        dup3(fd, file->fd, O_CLOEXEC) < 0) {
        error_setg_errno(&err, errno, "cannot take the file");
    }
    if (fd >= 0) {
        close(fd);
    }
    if (err) {
        error_reportf_err(err, "postcopy stays paused: ");
        return;
    }
    file_look(file);
    WITH_QEMU_LOCK_GUARD(&s->error_mutex) {
        error_free(s->error);
        s->error = NULL;
    }
    migrate_set_state(&mis->state, MIGRATION_STATUS_POSTCOPY_PAUSED,
                      MIGRATION_STATUS_POSTCOPY_ACTIVE);
    /* Without @paused, file_thread() may end, but not before all have left */
    if (postcopy_requests_enter(mis->postcopy->requests)) {
        qatomic_store_release(&file->paused, false);
        /* file_thread() may not exist yet, or may hang in a read */
        postcopy_fault_ask_again(mis);
        qemu_sem_post(&file->recovered);
        postcopy_requests_leave(mis->postcopy->requests);
    }
}

void postcopy_file_fill_info(MigrationIncomingState *mis, MigrationInfo *info)
{
    struct PostcopyFile *file = mis->postcopy->file;
    unsigned bits = qemu_target_page_bits();
    PostcopyFileInfo *to;

    if (!file || !file->reading) {
        return;
    }
    to = info->postcopy_file = g_new0(PostcopyFileInfo, 1);
    to->filename = file_name(file);
    to->uncached = stat64_get(&file->uncached);
    for (guint i = 0; i < file->blocks->len; i++) {
        PostcopyFileBlock *b = file_block_at(file, i);
        size_t pages = b->rb->postcopy_length >> bits;
        size_t bit = 0;

        to->total += bitmap_count_one(b->bitmap, pages) << bits;
        for (; bit < pages; bit += BITS_PER_LONG) {
            unsigned long there = b->bitmap[bit / BITS_PER_LONG];
            unsigned long received =
                qatomic_read(&b->rb->receivedmap[bit / BITS_PER_LONG]);

            to->remaining += (uint64_t)ctpopl(there & ~received) << bits;
        }
    }
}
