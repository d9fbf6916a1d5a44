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

KVM = FORK / "qemu-system-x86_64"
TCG = Path(__file__).parent / "tcg-system-x86_64"
DIRTY_RING = re.compile("dirty_(ring|limit)")
pytestmark = pytest.mark.timeout(1000)
# Without --full, "-m slow" adds no test.
SLOW = "--full", "-m", "slow"


def qtest(name, *args, qemu=TCG, timeout=900):
    env = os.environ | {"QTEST_QEMU_BINARY": str(qemu), "QTEST_QEMU_MACHINE_TYPE": "pc",
                        "PYTHON": str(BUILD / "venv/bin/python")}
    try:
        done = subprocess.run([f"tests/qtest/{name}", *args], cwd=FORK, env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout)
    except subprocess.TimeoutExpired as e:
        pytest.fail(f"{name} {' '.join(args)} did not end in {timeout} s:\n{(e.stdout or b'').decode()}")
    return done


def names(*mode):
    """The tests of a set; none while nothing is built, for pytest to collect."""
    if not (FORK / "tests/qtest/migration-test").exists():
        return []
    # GLib 2.84 lists them as comments.
    listed = qtest("migration-test", *mode, "-l").stdout
    tests = re.findall("^(?:# )?(/.*)", listed, re.M)
    assert tests, f"migration-test lists no tests:\n{listed}"
    return tests


def run(test, *mode, qemu=TCG):
    done = qtest("migration-test", *mode, "-p", test, qemu=qemu)
    lines = re.findall(r"^(?:not )?ok \d+ .*", done.stdout, re.M)
    skip = [line for line in lines if "# SKIP" in line]
    if done.returncode == 0 and skip:
        pytest.skip(skip[0])
    assert done.returncode == 0 and lines, done.stdout


@pytest.mark.parametrize("test", names())
def test_tcg(test):
    run(test)


@pytest.mark.parametrize("name", listed("device-introspect-test", "qmp-cmd-test", "qom-test", "test-hmp",
                                        quick=["device-introspect-test"]))
def test_all_types_and_commands(name):
    """QEMU's tests of all types, properties and commands, ours among them."""
    done = qtest(name)
    assert done.returncode == 0 and "ok 1 " in done.stdout, done.stdout


def test_property_is_freed_once():
    """With a property of the migration set, QEMU ends without an error of the heap."""
    env = os.environ | {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    done = subprocess.run([KVM, "-machine", "none", "-nodefaults", "-display", "none", "-monitor", "stdio",
                           "-global", "migration.postcopy-fetch-channels=2"], input="quit\n", env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    assert done.returncode == 0, done.stdout


def test_fault_exits():
    done = qtest("postcopy-fault-exits-test")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^ok \d+ ", done.stdout, re.M)) == 3, done.stdout
    if skip := re.findall("^ok .*# SKIP .*", done.stdout, re.M):
        # migration-test then has no post-copy tests either; the lab runs all of them as root.
        pytest.skip(f"{skip[0]}: needs root, or vm.unprivileged_userfaultfd=1")


@pytest.mark.slow
@pytest.mark.parametrize("test", names(*SLOW))
def test_slow(test):
    kvm = os.access("/dev/kvm", os.R_OK | os.W_OK)
    if DIRTY_RING.search(test) and not (kvm and re.search(r"\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text())):
        pytest.skip("no /dev/kvm with VMX or SVM: PVM's dirty ring fails with stock QEMU, too")
    run(test, *SLOW, qemu=KVM if kvm else TCG)
