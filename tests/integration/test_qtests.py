# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU's own migration qtests with those that the series adds, and ours, with the fork on this machine.

The default set runs on TCG in make check; the slow set in make check-integration, on /dev/kvm where
this machine has it, else on TCG. The machine type is pc, since SeaBIOS 1.16 needs half a minute to
boot from the AHCI of q35, for which the tests' guests wait.
"""
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.lab.arches import listed
from tests.lab.paths import BUILD, FORK
from tests.static.test_style import run

KVM = FORK / "qemu-system-x86_64"
TCG = Path(__file__).parent / "tcg-system-x86_64"
DIRTY_RING = re.compile("dirty_(ring|limit)")
pytestmark = pytest.mark.timeout(1000)
LIMIT_S = 900
# Without --full, "-m slow" adds no test.
SLOW = "--full", "-m", "slow"


def qtest(name, *args, qemu=TCG):
    env = os.environ | {"QTEST_QEMU_BINARY": str(qemu), "QTEST_QEMU_MACHINE_TYPE": "pc",
                        "PYTHON": str(BUILD / "venv/bin/python")}
    try:
        return run(f"tests/qtest/{name}", *args, cwd=FORK, env=env, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as e:
        pytest.fail(f"{name} {' '.join(args)} did not end in {LIMIT_S} s:\n{(e.stdout or b'').decode()}")


def names(*mode):
    """The tests of a set; none while nothing is built, for pytest to collect."""
    if not (FORK / "tests/qtest/migration-test").exists():
        return []
    # GLib 2.84 lists them as comments.
    listed = qtest("migration-test", *mode, "-l")
    tests = re.findall("^(?:# )?(/.*)", listed, re.M)
    assert tests, f"migration-test lists no tests:\n{listed}"
    return tests


def migration_test(test, *mode, qemu=TCG):
    output = qtest("migration-test", *mode, "-p", test, qemu=qemu)
    lines = re.findall(r"^ok \d+ .*", output, re.M)
    if skip := [line for line in lines if "# SKIP" in line]:
        pytest.skip(skip[0])
    assert lines, output


@pytest.mark.parametrize("test", names())
def test_tcg(test):
    migration_test(test)


@pytest.mark.parametrize("name", listed("device-introspect-test", "qmp-cmd-test", "qom-test", "test-hmp",
                                        quick=["device-introspect-test"]))
def test_all_types_and_commands(name):
    """QEMU's tests of all types, properties and commands, ours among them."""
    output = qtest(name)
    assert "ok 1 " in output, output


def test_property_is_freed_once():
    """With a property of the migration set, QEMU ends without an error of the heap."""
    env = os.environ | {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    run(KVM, "-machine", "none", "-nodefaults", "-display", "none", "-monitor", "stdio",
        "-global", "migration.postcopy-fetch-channels=2", input="quit\n", env=env, timeout=60)


def test_fault_exits():
    output = qtest("postcopy-fault-exits-test")
    assert len(re.findall(r"^ok \d+ ", output, re.M)) == 3, output
    if skip := re.findall("^ok .*# SKIP .*", output, re.M):
        # migration-test then has no post-copy tests either; the lab runs all of them as root.
        pytest.skip(f"{skip[0]}: needs root, or vm.unprivileged_userfaultfd=1")


@pytest.mark.slow
@pytest.mark.parametrize("test", names(*SLOW))
def test_slow(test):
    kvm = os.access("/dev/kvm", os.R_OK | os.W_OK)
    if DIRTY_RING.search(test) and not (kvm and re.search(r"\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text())):
        pytest.skip("no /dev/kvm with VMX or SVM: PVM's dirty ring fails with stock QEMU, too")
    migration_test(test, *SLOW, qemu=KVM if kvm else TCG)
