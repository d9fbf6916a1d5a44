/*
 * QTest testcases for the parameter postcopy-fault-exits, and for faults of
 * threads other than vCPUs
 *
 * Runs on any host: no guest code is executed.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <glib/gstdio.h>
#include "libqtest.h"
#include "qobject/qdict.h"
#include "qemu/units.h"

/* The memory under test, as offsets from the start of the machine's RAM */
#define TEST_START (1 * MiB)
#define TEST_END (16 * MiB)
#define STEP (4 * KiB)
/* So slow that the test requests most pages before the background sends them */
#define BANDWIDTH (256 * KiB)

static const char *machine;
static uint64_t ram;

static QTestState *start(const char *args)
{
    return qtest_initf("-accel qtest -machine %s -m 16M -nodefaults "
                       "-display none %s", machine, args);
}

static void set_fault_exits(QTestState *who, const char *value)
{
    qtest_qmp_assert_success(who, "{ 'execute': 'migrate-set-parameters',"
                             "  'arguments': { 'postcopy-fault-exits': %s } }",
                             value);
}

static void assert_fault_exits(QTestState *who, const char *value)
{
    g_autofree char *line = g_strdup_printf("postcopy-fault-exits: %s\r\n",
                                            value);
    g_autofree char *hmp = qtest_hmp(who, "info migrate_parameters");
    QDict *rsp = qtest_qmp_assert_success_ref(
                     who, "{ 'execute': 'query-migrate-parameters' }");

    g_assert_cmpstr(qdict_get_str(rsp, "postcopy-fault-exits"), ==, value);
    g_assert_nonnull(strstr(hmp, line));
    qobject_unref(rsp);
}

static void test_parameter(void)
{
    QTestState *qts = start("");
    QDict *rsp;

    assert_fault_exits(qts, "auto");
    set_fault_exits(qts, "off");
    assert_fault_exits(qts, "off");
    g_free(qtest_hmp(qts, "migrate_set_parameter postcopy-fault-exits on"));
    assert_fault_exits(qts, "on");

    rsp = qtest_qmp_assert_failure_ref(
              qts, "{ 'execute': 'migrate-set-parameters',"
              "  'arguments': { 'postcopy-fault-exits': 'maybe' } }");
    qobject_unref(rsp);
    assert_fault_exits(qts, "on");
    qtest_quit(qts);

    qts = start("-global migration.postcopy-fault-exits=off");
    assert_fault_exits(qts, "off");
    qtest_quit(qts);
}

static void test_on_refused(void)
{
    QTestState *qts = start("-incoming defer");
    const char incoming[] = "{ 'execute': 'migrate-incoming',"
                            "  'arguments': { 'uri': %s } }";
    const char uri[] = "tcp:127.0.0.1:0";
    QDict *rsp;

    set_fault_exits(qts, "on");
    rsp = qtest_qmp_assert_failure_ref(qts, incoming, uri);
    g_assert_cmpstr(qdict_get_str(rsp, "desc"), ==, "postcopy-fault-exits=on: "
                    "exits on missing memory need the KVM accelerator");
    qobject_unref(rsp);

    /* The parameter can be corrected, and the command repeated */
    set_fault_exits(qts, "auto");
    qtest_qmp_assert_success(qts, incoming, uri);
    qtest_quit(qts);
}

static bool set_postcopy(QTestState *who)
{
    QDict *rsp = qtest_qmp(who, "{ 'execute': 'migrate-set-capabilities',"
                           "  'arguments': { 'capabilities': [ {"
                           "    'capability': 'postcopy-ram',"
                           "    'state': true } ] } }");
    bool ok = qdict_haskey(rsp, "return");

    qobject_unref(rsp);
    return ok;
}

static QDict *query_migrate(QTestState *who)
{
    return qtest_qmp_assert_success_ref(who, "{ 'execute': 'query-migrate' }");
}

static void wait_status(QTestState *who, const char *status)
{
    for (int i = 0; i < 1000; i++) {
        QDict *rsp = query_migrate(who);
        const char *is = qdict_get_try_str(rsp, "status");
        bool reached = !g_strcmp0(is, status);

        g_assert_cmpstr(is, !=, "failed");
        qobject_unref(rsp);
        if (reached) {
            return;
        }
        g_usleep(100 * 1000);
    }
    g_error("migration does not reach status %s", status);
}

static void test_uffd(void)
{
    g_autofree char *dir = g_dir_make_tmp("postcopy-fault-XXXXXX", NULL);
    g_autofree char *uri = g_strdup_printf("unix:%s/migrate", dir);
    QTestState *from, *to;
    QDict *rsp, *faults;
    int64_t uffd, requests;

    to = start("-incoming defer");
    if (!set_postcopy(to)) {
        qtest_quit(to);
        g_rmdir(dir);
        g_test_skip("userfaultfd is not available");
        return;
    }
    from = start("");
    g_assert_true(set_postcopy(from));

    for (uint64_t addr = TEST_START; addr < TEST_END; addr += STEP) {
        qtest_writeq(from, ram + addr, addr + 1);
    }

    qtest_qmp_assert_success(from, "{ 'execute': 'migrate-set-parameters',"
                             "  'arguments': { 'max-bandwidth': %d,"
                             "                 'max-postcopy-bandwidth': %d,"
                             "                 'downtime-limit': 1 } }",
                             (int)BANDWIDTH, (int)BANDWIDTH);
    qtest_qmp_assert_success(to, "{ 'execute': 'migrate-incoming',"
                             "  'arguments': { 'uri': %s } }", uri);
    qtest_qmp_assert_success(from, "{ 'execute': 'migrate',"
                             "  'arguments': { 'uri': %s } }", uri);
    wait_status(from, "active");
    qtest_qmp_assert_success(from, "{ 'execute': 'migrate-start-postcopy' }");
    wait_status(to, "postcopy-active");

    /* Read in the order opposite to that of the background */
    for (uint64_t addr = TEST_END - STEP; addr >= TEST_START; addr -= STEP) {
        g_assert_cmphex(qtest_readq(to, ram + addr), ==, addr + 1);
    }

    wait_status(to, "completed");
    wait_status(from, "completed");
    rsp = query_migrate(to);
    faults = qdict_get_qdict(rsp, "postcopy-faults");
    uffd = qdict_get_int(faults, "uffd");
    requests = qdict_get_int(faults, "requests");
    g_assert_cmpint(uffd, >, 100);
    g_assert_cmpint(requests, >, 100);
    g_assert_cmpint(requests, <=, uffd);
    g_assert_cmpint(qdict_get_int(faults, "exits"), ==, 0);
    g_assert_cmpint(qdict_get_int(faults, "populated"), ==, 0);
    qobject_unref(rsp);

    /* The source had no faults */
    rsp = query_migrate(from);
    g_assert_false(qdict_haskey(rsp, "postcopy-faults"));
    qobject_unref(rsp);

    qtest_quit(from);
    qtest_quit(to);
    g_rmdir(dir);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    if (!strcmp(qtest_get_arch(), "aarch64")) {
        machine = "virt";
        ram = 1 * GiB;
    } else {
        machine = "pc";
    }
    qtest_add_func("/postcopy-fault-exits/parameter", test_parameter);
    qtest_add_func("/postcopy-fault-exits/on-refused", test_on_refused);
    qtest_add_func("/postcopy-fault-exits/uffd", test_uffd);
    return g_test_run();
}
