/*
 * Fuzzing migration: a destination and a source whose peer sends wrong data,
 * and files
 *
 * Each input has a process of its own, forked from one that has a machine but
 * no migration yet: neither side can repeat all of a migration.  There, a
 * thread is the peer, on sockets, and runs the input's records; the main thread
 * is QEMU's.  After the records the peer closes the connections, and within
 * HANG_S the migration must reach a status that waits for the user at most.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/ioctl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sanitizer/common_interface_defs.h>
#include "block/aio.h"
#include "exec/address-spaces.h"
#include "exec/memory.h"
#include "exec/ramblock.h"
#include "io/channel-buffer.h"
#include "migration/migration.h"
#include "migration/postcopy/fetch-dst.h"
#include "migration/postcopy/incoming.h"
#include "migration/postcopy-ram.h"
#include "migration/qemu-file.h"
#include "migration/savevm.h"
#include "migration/vmstate.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-migration.h"
#include "qapi/util.h"
#include "qemu/bswap.h"
#include "qemu/error-report.h"
#include "qemu/main-loop.h"
#include "qemu/memfd.h"
#include "qemu/rcu.h"
#include "qemu/sockets.h"
#include "qemu/thread.h"
#include "qemu/units.h"
#include "target/i386/kvm/guest-time.h"
#include "fuzz.h"
#include "migration_fuzz.h"

#define HANG_S      10
/* A source that begins postcopy looks at its rate every 100 ms */
#define WAIT_MS     300
/* Enough for all records and the report of a hang */
#define CHILD_S     90
/* So many that they are not all sent before the source looks at its rate */
#define DATA_PAGES  64

FuzzSide fuzz_side;

static char fuzz_dir[] = "/tmp/migration-fuzz-XXXXXX";
static char *fuzz_uri;
/* Of the socket, or the file */
static char *fuzz_path;
static int fuzz_log;

/* The input of a child */
static const uint8_t *fuzz_data;
static size_t fuzz_size;
/* The peer's end of each channel, or -1 */
static int fuzz_channel[FUZZ_CHANNELS];
static int fuzz_listening;
static int fuzz_file;
/* Atomic; the peer sets @fuzz_hung_up before it closes its channels for good */
static bool fuzz_hung_up;
static bool fuzz_done;
/* Shared with the parent: the child's threads run */
static bool *fuzz_started;

/* A device with guest time, in place of the kvmclock, which needs KVM */
static struct FuzzClock {
    GuestTime guest_time;
} fuzz_clock;

static bool fuzz_guest_time_needed(void *opaque)
{
    return fuzz_clock.guest_time.state.valid;
}

static const VMStateDescription fuzz_vmstate_guest_time = {
    .name = "kvmclock/guest_time",
    .version_id = 1,
    .minimum_version_id = 1,
    .needed = fuzz_guest_time_needed,
    .fields = (const VMStateField[]) {
        VMSTATE_STRUCT(guest_time, struct FuzzClock, 1, vmstate_guest_time,
                       GuestTime),
        VMSTATE_END_OF_LIST()
    }
};

static const VMStateDescription fuzz_vmstate_clock = {
    .name = "kvmclock",
    .version_id = 1,
    .minimum_version_id = 1,
    .fields = (const VMStateField[]) {
        VMSTATE_END_OF_LIST()
    },
    .subsections = (const VMStateDescription * const []) {
        &fuzz_vmstate_guest_time,
        NULL
    }
};

/* The input */

bool fuzz_next_record(const uint8_t **data, size_t *size, FuzzRecord *record)
{
    if (*size < FUZZ_HEAD) {
        return false;
    }
    record->op = (*data)[0];
    record->arg = (*data)[1];
    record->data = *data + FUZZ_HEAD;
    record->length = MIN(ldl_le_p(*data + 2), *size - FUZZ_HEAD);
    *data += FUZZ_HEAD + record->length;
    *size -= FUZZ_HEAD + record->length;
    return true;
}

static const MigrationCapability fuzz_capabilities[] = {
    MIGRATION_CAPABILITY_RETURN_PATH,
    MIGRATION_CAPABILITY_POSTCOPY_RAM,
    MIGRATION_CAPABILITY_POSTCOPY_PREEMPT,
    MIGRATION_CAPABILITY_POSTCOPY_BLOCKTIME,
    MIGRATION_CAPABILITY_XBZRLE,
    MIGRATION_CAPABILITY_SWITCHOVER_ACK,
    MIGRATION_CAPABILITY_MULTIFD,
    MIGRATION_CAPABILITY_X_IGNORE_SHARED,
    /* Not an option: what the target for files needs */
    MIGRATION_CAPABILITY_MAPPED_RAM,
};

/*
 * All three of POSTCOPY_RAM, POSTCOPY_PREEMPT and POSTCOPY_BLOCKTIME stand for
 * fetch channels, which replace the preempt channel.
 */
#define FUZZ_FETCH          0x0e
#define FUZZ_FETCH_CHANNELS 2

static void fuzz_set_options(const uint8_t *options)
{
    MigrationParameters *p = &migrate_get_current()->parameters;
    MigrationCapabilityStatusList *list = NULL;

    for (int i = 0; i < ARRAY_SIZE(fuzz_capabilities); i++) {
        MigrationCapabilityStatus *c = g_new(MigrationCapabilityStatus, 1);

        c->capability = fuzz_capabilities[i];
        c->state = c->capability == MIGRATION_CAPABILITY_MAPPED_RAM ?
                   fuzz_side == FUZZ_FILE : options[0] & 1 << i;
        QAPI_LIST_PREPEND(list, c);
    }
    p->postcopy_fetch_channels->type = QTYPE_QNUM;
    p->postcopy_fetch_channels->u.number =
        (options[0] & FUZZ_FETCH) == FUZZ_FETCH ? FUZZ_FETCH_CHANNELS : 0;
    /* QEMU refuses capabilities that do not fit together */
    qmp_migrate_set_capabilities(list, NULL);
    qapi_free_MigrationCapabilityStatusList(list);

    /* 32 KiB/s to 512 MiB/s, or no limit */
    p->max_bandwidth = options[1] & 15 ? 16 * KiB << (options[1] & 15) : 0;
    /* Without a limit, so that all of a file is read in time */
    p->max_postcopy_bandwidth = options[1] >> 4 && fuzz_side != FUZZ_FILE ?
                                16 * KiB << (options[1] >> 4) : 0;
    p->downtime_limit = 1;
}

/* The user of this side, in the main thread */

static void fuzz_start(bool again)
{
    Error *err = NULL;

    if (fuzz_side == FUZZ_SOURCE) {
        qmp_migrate(fuzz_uri, false, NULL, false, false, true, again, &err);
    } else if (again) {
        qmp_migrate_recover(fuzz_uri, &err);
    } else {
        qmp_migrate_incoming(fuzz_uri, false, NULL, true, false, &err);
    }
    if (err) {
        error_report_err(err);
    }
}

static void fuzz_act(void *opaque)
{
    switch ((FuzzAction)(uintptr_t)opaque) {
    case FUZZ_START_POSTCOPY:
        qmp_migrate_start_postcopy(NULL);
        break;
    case FUZZ_PAUSE:
        qmp_migrate_pause(NULL);
        break;
    case FUZZ_RECOVER:
        fuzz_start(true);
        break;
    case FUZZ_CANCEL:
        qmp_migrate_cancel(true, true, NULL);
        break;
    case FUZZ_QUERY:
        qapi_free_MigrationInfo(qmp_query_migrate(NULL));
        break;
    default:
        break;
    }
}

static void fuzz_finish(void *opaque)
{
    fuzz_act((void *)FUZZ_QUERY);
    qatomic_set(&fuzz_done, true);
}

static void fuzz_in_main_thread(QEMUBHFunc *fn, uintptr_t arg)
{
    aio_bh_schedule_oneshot(qemu_get_aio_context(), fn, (void *)arg);
}

/* The peer */

static MigrationStatus fuzz_status(void)
{
    return fuzz_side == FUZZ_SOURCE ?
           qatomic_read(&migrate_get_current()->state) :
           qatomic_read(&migration_incoming_get_current()->state);
}

static void *fuzz_drain(void *opaque)
{
    int fd = (uintptr_t)opaque;
    char buffer[16384];

    while (read(fd, buffer, sizeof(buffer)) > 0) {
        /* No caller wants the error */
    }
    return NULL;
}

/* A thread that may still run when the process ends */
static void fuzz_thread(void *(*fn)(void *), uintptr_t arg)
{
    QemuThread thread;

    qemu_thread_create(&thread, "peer", fn, (void *)arg, QEMU_THREAD_DETACHED);
}

static void fuzz_opened(int i, int fd)
{
    struct timeval tv = { .tv_usec = WAIT_MS * 1000 };

    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
    fuzz_thread(fuzz_drain, fd);
    qatomic_set(&fuzz_channel[i], fd);
    /* Either this thread sees @fuzz_hung_up, or the peer sees this channel */
    smp_mb();
    if (qatomic_read(&fuzz_hung_up)) {
        shutdown(fd, SHUT_RDWR);
    }
}

static void fuzz_close(int i)
{
    int fd = qatomic_xchg(&fuzz_channel[i], -1);

    /* fuzz_drain() uses @fd, and closes it */
    if (fd >= 0) {
        shutdown(fd, SHUT_RDWR);
    }
}

static void *fuzz_accept(void *opaque)
{
    int fd, i;

    while ((fd = accept(fuzz_listening, NULL, NULL)) >= 0) {
        i = 0;
        while (i < FUZZ_CHANNELS && qatomic_read(&fuzz_channel[i]) >= 0) {
            i++;
        }
        if (i < FUZZ_CHANNELS) {
            fuzz_opened(i, fd);
        } else {
            close(fd);
        }
    }
    return NULL;
}

static void fuzz_open(int i)
{
    int fd;

    if (fuzz_side == FUZZ_SOURCE) {
        for (int ms = 0; ms < WAIT_MS && qatomic_read(&fuzz_channel[i]) < 0;
             ms++) {
            g_usleep(1000);
        }
    }
    if (fuzz_side != FUZZ_DESTINATION) {
        return;
    }
    fuzz_close(i);
    fd = unix_connect(fuzz_path, NULL);
    if (fd >= 0) {
        fuzz_opened(i, fd);
    }
}

/* Puts the token of this migration into a fetch channel's hello */
static void fuzz_set_token(uint8_t *data, size_t size)
{
    PostcopyHello *hello = (void *)data;

    if (size >= sizeof(*hello) &&
        ldl_be_p(&hello->magic) == POSTCOPY_HELLO_MAGIC) {
        memcpy(hello->token,
               migration_incoming_get_current()->postcopy->fetch->token,
               sizeof(hello->token));
    }
}

static void fuzz_write_file(const uint8_t *data, size_t size)
{
    uint32_t at = size < FUZZ_OFFSET ? 0 : ldl_le_p(data) % FUZZ_FILE_SIZE;

    if (size > FUZZ_OFFSET) {
        g_assert_no_errno(pwrite(fuzz_file, data + FUZZ_OFFSET,
                                 size - FUZZ_OFFSET, at));
    }
}

static bool fuzz_all_read(void)
{
    for (int i = 0; i < FUZZ_CHANNELS; i++) {
        int fd = qatomic_read(&fuzz_channel[i]), unread = 0;

        if (fd >= 0 && !ioctl(fd, SIOCOUTQ, &unread) && unread) {
            return false;
        }
    }
    return true;
}

/* Whether a real destination would run its guest */
static bool fuzz_is_running(void)
{
    return postcopy_state_get() == POSTCOPY_INCOMING_RUNNING;
}

/* Whether only the user or another connection can change the status */
static bool fuzz_is_settled(void)
{
    switch (fuzz_status()) {
    case MIGRATION_STATUS_NONE:
    case MIGRATION_STATUS_CANCELLED:
    case MIGRATION_STATUS_FAILED:
    case MIGRATION_STATUS_POSTCOPY_PAUSED:
        return true;
    case MIGRATION_STATUS_COMPLETED:
        return !qatomic_read(&migration_incoming_get_current()->
                             have_listen_thread);
    case MIGRATION_STATUS_SETUP:
        return fuzz_side == FUZZ_DESTINATION;
    default:
        return false;
    }
}

static void fuzz_wait(int status)
{
    for (int ms = 0; ms < WAIT_MS; ms++) {
        if (status == FUZZ_READ ? fuzz_all_read() :
            status == FUZZ_RUNNING ? fuzz_is_running() :
            fuzz_status() == status) {
            return;
        }
        if (status != FUZZ_READ && fuzz_is_settled() &&
            fuzz_status() != MIGRATION_STATUS_POSTCOPY_PAUSED) {
            break;
        }
        g_usleep(1000);
    }
    fprintf(stderr, "not within %d ms: %d; status %s\n", WAIT_MS, status,
            MigrationStatus_str(fuzz_status()));
}

static void *fuzz_touch(void *opaque)
{
    RAMBlock *block = qemu_ram_block_by_name("pc.ram");
    uint8_t *page = block->host + (uintptr_t)opaque * FUZZ_PAGE;

    qatomic_read(page);
    return NULL;
}

/* Reads all memory as a vCPU would, in the order of the RAMBlocks */
static void *fuzz_touch_all(void *opaque)
{
    const char *names[] = { "pc.ram", "shared" };

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        RAMBlock *block = qemu_ram_block_by_name(names[i]);

        for (ram_addr_t at = 0; at < block->used_length; at += FUZZ_PAGE) {
            qatomic_read(block->host + at);
        }
    }
    return NULL;
}

static void fuzz_run(const FuzzRecord *r)
{
    int i = r->arg % FUZZ_CHANNELS, fd;

    switch (r->op % FUZZ_OP__MAX) {
    case FUZZ_OPEN:
        fuzz_open(i);
        break;
    case FUZZ_SEND:
        fd = qatomic_read(&fuzz_channel[i]);
        if (fuzz_side == FUZZ_FILE) {
            fuzz_write_file(r->data, r->length);
        } else if (fd >= 0) {
            g_autofree uint8_t *data = g_memdup2(r->data, r->length);

            fuzz_set_token(data, r->length);
            /* QEMU may have closed the connection, or not read for WAIT_MS */
            (void)!qemu_write_full(fd, data, r->length);
        }
        break;
    case FUZZ_CLOSE:
        if (fuzz_side == FUZZ_FILE) {
            g_assert_no_errno(ftruncate(fuzz_file, r->arg * FUZZ_FILE_UNIT));
        }
        fuzz_close(i);
        break;
    case FUZZ_WAIT:
        fuzz_wait(r->arg);
        break;
    case FUZZ_DO:
        if (r->arg % FUZZ_ACTION__MAX != FUZZ_TOUCH) {
            fuzz_in_main_thread(fuzz_act, r->arg % FUZZ_ACTION__MAX);
        } else if (r->length && fuzz_is_running()) {
            fuzz_thread(fuzz_touch, r->data[0]);
        }
        break;
    }
}

static bool fuzz_printed;

static void fuzz_print_stack(int signal)
{
    char name[16] = "?";

    pthread_getname_np(pthread_self(), name, sizeof(name));
    fprintf(stderr, "Thread %s:\n", name);
    __sanitizer_print_stack_trace();
    qatomic_set(&fuzz_printed, true);
}

static void G_NORETURN fuzz_hangs(const char *what)
{
    struct sigaction action = { .sa_handler = fuzz_print_stack };
    const char *name;
    GDir *tasks = g_dir_open("/proc/self/task", 0, NULL);

    fprintf(stderr, "==%d==ERROR: hangs: %s, status %s\n", getpid(), what,
            MigrationStatus_str(fuzz_status()));
    /* QEMU's threads do not block this signal */
    sigaction(SIGFPE, &action, NULL);
    while (tasks && (name = g_dir_read_name(tasks))) {
        fuzz_printed = false;
        syscall(SYS_tgkill, getpid(), atoi(name), SIGFPE);
        for (int ms = 0; ms < 5000 && !qatomic_read(&fuzz_printed); ms++) {
            g_usleep(1000);
        }
    }
    abort();
}

static void fuzz_until(bool (*fn)(void), const char *what)
{
    int64_t end = g_get_monotonic_time() + HANG_S * G_USEC_PER_SEC;

    while (!fn()) {
        if (g_get_monotonic_time() > end) {
            fuzz_hangs(what);
        }
        g_usleep(500);
    }
}

static bool fuzz_is_done(void)
{
    return qatomic_read(&fuzz_done);
}

/* The first records make the file that is opened; the peer writes them again */
static void fuzz_make_file(void)
{
    const uint8_t *data = fuzz_data + FUZZ_OPTIONS;
    size_t size = fuzz_size - FUZZ_OPTIONS;
    FuzzRecord record;

    fuzz_file = open(fuzz_path, O_CREAT | O_TRUNC | O_RDWR, 0600);
    g_assert_cmpint(fuzz_file, >=, 0);
    while (fuzz_next_record(&data, &size, &record) &&
           (record.op % FUZZ_OP__MAX == FUZZ_SEND ||
            record.op % FUZZ_OP__MAX == FUZZ_CLOSE)) {
        fuzz_run(&record);
    }
}

static void *fuzz_peer(void *opaque)
{
    const uint8_t *data = fuzz_data + FUZZ_OPTIONS;
    size_t size = fuzz_size - FUZZ_OPTIONS;
    FuzzRecord record;

    qatomic_set(fuzz_started, true);
    for (int n = 0; n < FUZZ_RECORDS &&
         fuzz_next_record(&data, &size, &record); n++) {
        fuzz_run(&record);
    }
    fuzz_wait(FUZZ_READ);
    if (fuzz_listening >= 0) {
        shutdown(fuzz_listening, SHUT_RDWR);
    }
    qatomic_set(&fuzz_hung_up, true);
    /* Pairs with smp_mb() of fuzz_opened() */
    smp_mb();
    for (int i = 0; i < FUZZ_CHANNELS; i++) {
        fuzz_close(i);
    }
    fuzz_until(fuzz_is_settled, "the peer has hung up");
    fprintf(stderr, "status %s\n", MigrationStatus_str(fuzz_status()));
    fuzz_in_main_thread(fuzz_finish, 0);
    fuzz_until(fuzz_is_done, "the main thread does not answer");
    return NULL;
}

/* An unrecoverable error makes QEMU exit by exit() */
static void fuzz_exit(void)
{
    _exit(EXIT_SUCCESS);
}

static void G_NORETURN fuzz_child(const uint8_t *data, size_t size)
{
    /* Output is only for failing inputs, or on request */
    if (!getenv("MIGRATION_FUZZ_VERBOSE")) {
        dup2(fuzz_log, STDERR_FILENO);
    }
    atexit(fuzz_exit);
    fuzz_data = data;
    fuzz_size = size;
    fuzz_listening = -1;
    memset(fuzz_channel, -1, sizeof(fuzz_channel));
    fuzz_set_options(data);

    if (fuzz_side == FUZZ_SOURCE) {
        fuzz_listening = unix_listen(fuzz_path, &error_abort);
        g_assert_no_errno(listen(fuzz_listening, FUZZ_CHANNELS));
        fuzz_thread(fuzz_accept, 0);
    } else if (fuzz_side == FUZZ_FILE) {
        fuzz_make_file();
    }
    fuzz_start(false);
    fuzz_thread(fuzz_peer, 0);
    while (!fuzz_is_done()) {
        main_loop_wait(false);
    }
    _exit(EXIT_SUCCESS);
}

static void fuzz_remove_dir(void)
{
    unlink(fuzz_path);
    rmdir(fuzz_dir);
}

static bool fuzz_wait_child(int fd, int seconds)
{
    struct pollfd poll_fd = { .fd = fd, .events = POLLIN };

    return RETRY_ON_EINTR(poll(&poll_fd, 1, seconds * 1000)) > 0;
}

/*
 * Returns the exit status of the child, or -1 to start it anew: older
 * sanitizers fork without taking their allocator's locks, so that a thread of
 * the parent may hold one.
 */
static int fuzz_fork(const uint8_t *data, size_t size)
{
    bool stuck;
    int status, fd;
    pid_t pid;

    unlink(fuzz_path);
    *fuzz_started = false;
    g_assert_no_errno(ftruncate(fuzz_log, 0));
    g_assert_no_errno(lseek(fuzz_log, 0, SEEK_SET));
    g_assert_no_errno(pid = fork());
    if (pid == 0) {
        fuzz_child(data, size);
    }
    g_assert_no_errno(fd = syscall(SYS_pidfd_open, pid, 0));
    stuck = !fuzz_wait_child(fd, HANG_S) && !qatomic_read(fuzz_started);
    if (stuck) {
        kill(pid, SIGKILL);
    } else if (!fuzz_wait_child(fd, CHILD_S)) {
        kill(pid, SIGABRT);
    }
    close(fd);
    g_assert_no_errno(waitpid(pid, &status, 0));
    return stuck ? -1 : status;
}

static void fuzz_one(QTestState *s, const unsigned char *data, size_t size)
{
    char buffer[4096];
    ssize_t n;
    int status;

    if (size < FUZZ_OPTIONS) {
        return;
    }
    do {
        status = fuzz_fork(data, size);
    } while (status == -1);
    if (WIFEXITED(status) && !WEXITSTATUS(status)) {
        return;
    }
    lseek(fuzz_log, 0, SEEK_SET);
    while ((n = read(fuzz_log, buffer, sizeof(buffer))) > 0) {
        fwrite(buffer, n, 1, stderr);
    }
    fuzz_remove_dir();
    abort();
}

/* Preparation, before the first input */

/*
 * Shares the coverage counters, so that the parent sees those of its children.
 * The first and the last counters share pages with other data and stay private.
 */
static void fuzz_share_counters(void)
{
    size_t page = qemu_real_host_page_size();
    uint8_t *start = (void *)ROUND_UP((uintptr_t)__start___sancov_cntrs, page);
    uint8_t *end = (void *)ROUND_DOWN((uintptr_t)__stop___sancov_cntrs, page);

    if (start < end &&
        mmap(start, end - start, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        perror("mmap");
        abort();
    }
}

static void fuzz_fill_memory(void)
{
    static uint8_t page[FUZZ_PAGE];

    for (int i = 0; i < DATA_PAGES; i++) {
        memset(page, i + 1, sizeof(page));
        address_space_write(&address_space_memory, i * 5 * sizeof(page),
                            MEMTXATTRS_UNSPECIFIED, page, sizeof(page));
    }
}

static void fuzz_make_guest_time(void)
{
    const uint32_t id = 99;
    g_autoptr(QIOChannelBuffer) buffer = qio_channel_buffer_new(FUZZ_PAGE);
    QEMUFile *f = qemu_file_new_output(QIO_CHANNEL(buffer));

    fuzz_clock.guest_time.state.valid = true;
    fuzz_clock.guest_time.vcpus = 1;
    fuzz_clock.guest_time.vcpu = g_new0(GuestTimeVcpu, 1);

    qemu_put_byte(f, QEMU_VM_SECTION_FULL);
    qemu_put_be32(f, id);
    qemu_put_counted_string(f, fuzz_vmstate_clock.name);
    qemu_put_be32(f, 0);
    qemu_put_be32(f, fuzz_vmstate_clock.version_id);
    vmstate_save_state(f, &fuzz_vmstate_clock, &fuzz_clock, NULL);
    qemu_put_byte(f, QEMU_VM_SECTION_FOOTER);
    qemu_put_be32(f, id);
    qemu_fflush(f);
    migration_fuzz_set_guest_time(buffer->data, buffer->usage);
    qemu_fclose(f);
}

static void fuzz_before(QTestState *s)
{
    bool touched = false;

    fuzz_make_guest_time();
    vmstate_register(NULL, 0, &fuzz_vmstate_clock, &fuzz_clock);
    if (fuzz_side == FUZZ_SOURCE) {
        fuzz_fill_memory();
    } else {
        guest_time_forget(&fuzz_clock.guest_time);
        fuzz_clock.guest_time.state.incoming = true;
    }
    /* Without fuzzing: tests/fuzz/seeds.py records what both sides send */
    while (getenv("MIGRATION_FUZZ_PLAIN")) {
        main_loop_wait(false);
        if (!touched && fuzz_is_running()) {
            touched = true;
            fuzz_thread(fuzz_touch_all, 0);
        }
    }
    fuzz_log = qemu_memfd_create("log", 0, false, 0, 0, &error_abort);
    if (!mkdtemp(fuzz_dir)) {
        perror(fuzz_dir);
        abort();
    }
    fuzz_path = g_strdup_printf("%s/m", fuzz_dir);
    fuzz_uri = g_strdup_printf("%s:%s", fuzz_side == FUZZ_FILE ? "file" :
                               "unix", fuzz_path);
    atexit(fuzz_remove_dir);
    fuzz_started = mmap(NULL, sizeof(*fuzz_started), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fuzz_started == MAP_FAILED) {
        perror("mmap");
        abort();
    }
    fuzz_share_counters();
}

static GString *fuzz_command_line(FuzzTarget *target)
{
    const char *plain = getenv("MIGRATION_FUZZ_PLAIN");
    GString *line = g_string_new(NULL);
    /* A BIOS of the usual size, of zeros, which keep streams short */
    int bios = qemu_memfd_create("bios", 64 * KiB, false, 0, 0, &error_abort);

    fuzz_side = (uintptr_t)target->opaque;
    g_string_printf(line, "qemu-fuzz"
        " -machine pc,suppress-vmdesc=on -accel qtest -S -display none -nodefaults"
        " -m 2M,slots=4,maxmem=1G -bios /proc/self/fd/%d"
        " -object memory-backend-memfd,id=shared,size=2M,share=on"
        " -device pc-dimm,memdev=shared"
        " -object memory-backend-ram,id=plugged,size=4M"
        " -device virtio-mem-pci,memdev=plugged,requested-size=2M"
        " -blockdev null-co,node-name=disk,size=1048576"
        " -device virtio-blk-pci,drive=disk -device virtio-net-pci,romfile="
        " -device virtio-balloon-pci -device virtio-rng-pci %s %s",
        bios, fuzz_side == FUZZ_SOURCE ? "" : "-incoming defer", plain ?: "");
    return line;
}

static void fuzz_add(FuzzSide side, const char *name, const char *description)
{
    fuzz_add_target(&(FuzzTarget) {
        .name = name,
        .description = description,
        .get_init_cmdline = fuzz_command_line,
        .pre_fuzz = fuzz_before,
        .fuzz = fuzz_one,
        .crossover = migration_fuzz_crossover,
        .opaque = (void *)(uintptr_t)side,
    });
}

static void fuzz_register(void)
{
    fuzz_add(FUZZ_SOURCE, "migration-source",
             "Fuzz the source of a migration by its return path");
    fuzz_add(FUZZ_DESTINATION, "migration-destination",
             "Fuzz the destination of a migration by its stream");
    fuzz_add(FUZZ_FILE, "migration-file",
             "Fuzz the resume of a guest from a file");
}

fuzz_target_init(fuzz_register);
