# SPDX-License-Identifier: GPL-2.0-or-later
"""The next snapshot comes while QEMU still cleans up after the one before."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.pair import INJECT, until
from tests.lab.snapshot import Machine


def test_completed_is_the_end(place):
    """Memory is protected, and the guest may wait: it is not complete."""
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
    """The status comes first then. The next one is refused, and changes nothing."""
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
