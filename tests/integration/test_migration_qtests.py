# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU's own post-copy tests, unchanged, on KVM with exits: the fork's default there."""
import re

import pytest

from tests.lab.arches import on_aarch64, on_both
from tests.lab.paths import below, qemu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CASES = ["plain", "recovery/plain", "preempt/plain", "preempt/recovery/plain", "recovery/double-failures/handshake",
         "recovery/double-failures/reconnect", "suspend"]


def run(lab, case, options=""):
    """Run a test; returns how often exits were enabled, and how many faults they served."""
    # The tests do not report exits, so QEMU runs with a trace in a file.
    lab.run("mkdir -p /tmp/traced && rm -f /tmp/traced/*", check=True)
    traced = f"/tmp/traced/qemu-system-{lab.arch}"
    lab.write_file(traced, f'#!/bin/sh\nexec /lab/{qemu(lab.arch)} "$@" {options}'
                   " -trace postcopy_fault_exit -trace kvm_exit_on_missing_enable"
                   " -D /tmp/traced/log.$$\n".encode(), mode=0o755)
    test = f"/{lab.arch}/migration/postcopy/{case}"
    machine = {"x86_64": "pc", "aarch64": "virt"}[lab.arch]
    # On the default machine, q35, SeaBIOS 1.16.2 (Debian 12) waits 32 s for an answer of AHCI.
    # The test reads the guest's memory in 25600 requests. Two CPUs that wake each other for each of them are
    # slow where they are emulated, and slower on a busy host.
    result = lab.run(f"QTEST_QEMU_BINARY={traced} QTEST_QEMU_MACHINE_TYPE={machine} taskset 1 "
                     f"build/{below('fork', lab.arch)}/tests/qtest/migration-test --full -m slow -p {test}",
                     timeout=300)
    assert result.rc == 0, result.output
    assert re.findall("^(?:not )?ok .*", result.output, re.M) == [f"ok 1 {test}"], result.output
    assert "-accel kvm" in result.output
    return int(lab.run("cat /tmp/traced/log.* | grep -c -e postcopy_fault_exit -e kvm_exit_on_missing_enable").output)


@on_both("case", CASES)
def test_postcopy(lab, case):
    # The guest writes 100 MiB continuously, unless it sleeps.
    assert run(lab, case) or case == "suspend"


@on_both()
def test_postcopy_with_exits_off(lab):
    assert run(lab, "plain", "-global migration.postcopy-fault-exits=off") == 0


@on_aarch64()
def test_fault_exits_qtest(lab):
    """Our own qtest, which make check runs for x86-64 on the host."""
    result = lab.run(f"QTEST_QEMU_BINARY={qemu(lab.arch)} "
                     f"build/{below('fork', lab.arch)}/tests/qtest/postcopy-fault-exits-test", timeout=120)
    assert result.rc == 0, result.output
    assert len(re.findall("^ok .*", result.output, re.M)) == 3 and "SKIP" not in result.output, result.output
