# SPDX-License-Identifier: GPL-2.0-or-later
"""A snapshot begins while QEMU still cleans up after the one before."""
import re

import pytest
from qemu.qmp import ExecuteError

from tests.lab.pair import INJECT, until
from tests.lab.snapshot import Machine


def test_completed_is_the_end(place):
    """While memory is protected, and the guest may wait, a snapshot is not complete."""
    with Machine(place, qemu=INJECT, mem=4) as machine:
        inject = machine.side.inject
        inject.arm("snapshot-completing")
        machine.start()
        inject.wait_held("snapshot-completing")
        assert machine.side.cmd("query-migrate")["status"] == "active"
        inject.release("snapshot-completing")
        machine.wait()
        for _ in range(3):
            machine.take()
        machine.assert_whole()


@pytest.mark.slow
def test_failed_before_the_end(place):
    """After a failure, the status changes before the end. The next snapshot is refused, and changes nothing."""
    with Machine(place, qemu=INJECT, mem=4) as machine:
        inject = machine.side.inject
        inject.arm("snapshot-completing")
        machine.start("exec:head -c 300000 >/dev/null")
        inject.wait_held("snapshot-completing")
        assert machine.side.cmd("query-migrate")["status"] == "failed"
        with pytest.raises(ExecuteError, match="There's a migration process in progress"):
            machine.start()
        assert machine.side.cmd("query-migrate")["status"] == "failed"
        inject.release("snapshot-completing")

        def taken():
            try:
                return machine.take()
            except ExecuteError:
                return None
        until(taken, "a snapshot is taken after all")
        machine.restore()
        machine.assert_whole()


def test_memory_is_released_in_pieces(place):
    """At the end too: the kernel blocks the guest's page faults for a whole piece."""
    with Machine(place, INJECT, mem=4, memory_mb=256) as machine:
        side = machine.side
        side.inject.arm("snapshot-completing")
        machine.start()
        side.inject.wait_held("snapshot-completing")
        strace = place.job(f"exec strace -f -e trace=ioctl -p $(cat {side.pidfile})")
        try:
            until(lambda: " attached" in strace.output or not strace.running, "strace")
            side.inject.release("snapshot-completing")
            machine.wait()
        finally:
            strace.kill()
        pieces = [int(size, 16) >> 20 for size in re.findall(r"UFFDIO_UNREGISTER, .*len=(0x\w+)", strace.output)]
        assert sum(pieces) >= 256 and max(pieces) <= 64, strace.output
        machine.assert_whole()
