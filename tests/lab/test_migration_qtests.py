# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU's own post-copy tests, unchanged, on KVM with exits: the fork's default there."""
import re

import pytest

QEMU = "/tmp/traced/qemu-system-x86_64"
CASES = [
    "plain",
    "recovery/plain",
    "preempt/plain",
    pytest.param("preempt/recovery/plain", marks=pytest.mark.slow),
    pytest.param("recovery/double-failures/handshake", marks=pytest.mark.slow),
    pytest.param("recovery/double-failures/reconnect", marks=pytest.mark.slow),
    pytest.param("suspend", marks=pytest.mark.slow),
]


def run(lab, case, options=""):
    """Run a test; how many faults were served by exits."""
    # The tests tell nothing of it, so QEMU is run with its trace in a file.
    lab.run("mkdir -p /tmp/traced && rm -f /tmp/traced/*", check=True)
    lab.write_file(QEMU, b'#!/bin/sh\nexec /lab/build/fork/qemu-system-x86_64 "$@" ' + options.encode() +
                   b" -trace postcopy_fault_exit -trace kvm_exit_on_missing_enable"
                   b" -D /tmp/traced/log.$$\n", mode=0o755)
    test = f"/x86_64/migration/postcopy/{case}"
    # With the default, q35, SeaBIOS 1.16.2 (Debian 12) waits 32 s for an answer of AHCI.
    # The test reads the guest's memory in 25600 requests: two CPUs that wake each other
    # for each of them are slow where they are emulated, and slower on a busy host.
    result = lab.run(f"QTEST_QEMU_BINARY={QEMU} QTEST_QEMU_MACHINE_TYPE=pc taskset 1 "
                     f"build/fork/tests/qtest/migration-test --full -m slow -p {test}", timeout=300)
    assert result.rc == 0, result.output
    assert re.findall("^(?:not )?ok .*", result.output, re.M) == [f"ok 1 {test}"], result.output
    assert "-accel kvm" in result.output
    return int(lab.run("cat /tmp/traced/log.* | grep -c postcopy_fault_exit").output)


@pytest.mark.parametrize("case", CASES)
def test_postcopy(lab, case):
    faults = run(lab, case)
    # The guest writes 100 MiB all the time, except where it sleeps.
    assert faults or case == "suspend"


@pytest.mark.slow
def test_postcopy_with_exits_off(lab):
    assert run(lab, "plain", "-global migration.postcopy-fault-exits=off") == 0
