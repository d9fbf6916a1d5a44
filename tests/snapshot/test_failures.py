# SPDX-License-Identifier: GPL-2.0-or-later
"""A snapshot that fails or is cancelled leaves the guest running, unprotected and whole."""
import time

import pytest

from tests.lab.pair import INJECT, until
from tests.lab.snapshot import Machine

SMALL = "/tmp/small"
# STUCK reads a little and then nothing, SLOW reads slowly.
STUCK = "exec:echo $$ >{0}; exec sleep 1000"
SLOW = "exec:while dd bs=64k count=1 2>/dev/null | grep -q .; do sleep 0.02; done"


@pytest.fixture
def full_disk(lab):
    lab.run(f"mkdir -p {SMALL} && mount -t tmpfs -o size=8M tmpfs {SMALL}", check=True)
    yield f"file:{SMALL}/snapshot"
    lab.run(f"umount {SMALL}", check=True)


@pytest.mark.slow
def test_full_disk(lab, full_disk):
    with Machine(lab, mem=16) as machine:
        assert "No space left on device" in machine.take(full_disk, "failed")["error-desc"]
        machine.assert_whole()


@pytest.mark.slow
def test_closed_pipe(lab):
    with Machine(lab, mem=16, backend="memfd") as machine:
        machine.take("exec:head -c 3000000 >/dev/null", "failed")
        machine.assert_whole()


def test_devices_that_cannot_be_saved(place):
    """The snapshot fails before memory is protected, and closes no other file: standard input has number 0."""
    with Machine(place, INJECT, mem=16) as machine:
        standard_input = f"readlink /proc/$(cat {machine.side.pidfile})/fd/0"
        before = place.run(standard_input, check=True).output
        machine.side.inject.arm("snapshot-devices")
        machine.take(status="failed")
        machine.assert_goes_on()
        assert place.run(standard_input).output == before


@pytest.mark.slow
def test_cancel_a_slow_snapshot(place):
    with Machine(place, mem=16) as machine:
        machine.start(SLOW)
        until(lambda: machine.side.cmd("query-migrate").get("ram", {}).get("transferred", 0) > 1 << 20,
              "the snapshot has begun")
        machine.side.cmd("migrate_cancel")
        machine.wait("cancelled")
        machine.assert_whole()


def test_cancel_a_stuck_snapshot(place):
    """The thread that writes the snapshot hangs; the guest does not."""
    with Machine(place, mem=16, cpus=2) as machine:
        taker = f"{place.tmp}/taker"
        machine.start(STUCK.format(taker))
        machine.wait_running()
        # All vCPUs will write pages that are not saved.
        def waits():
            before = machine.touches()
            time.sleep(1)
            return machine.touches() == before
        until(waits, "the guest waits")
        machine.side.cmd("migrate_cancel")
        machine.assert_goes_on()
        assert not machine.protected()
        assert machine.side.cmd("query-migrate")["status"] == "cancelling"
        place.run(f"kill $(cat {taker})", check=True)
        machine.wait("cancelled")
        machine.assert_whole()


@pytest.mark.slow
def test_no_userfaultfd_left(place):
    """Memory cannot be protected: the guest resumes."""
    with Machine(place, mem=16, wrapper=["sh", "-c", 'ulimit -n 64; exec "$@"', "-"]) as machine:
        n = 0
        try:
            while n < 64:
                machine.side.cmd("chardev-add", id=f"c{n}", backend={
                    "type": "file", "data": {"out": "/dev/null"}})
                n += 1
        except Exception as e:
            assert "Too many open files" in str(e)
        # Leaves one descriptor, for the snapshot's file.
        machine.side.cmd("chardev-remove", id=f"c{n - 1}")
        assert "userfaultfd" in machine.take(status="failed")["error-desc"]
        machine.assert_goes_on()
        for i in range(n - 1):
            machine.side.cmd("chardev-remove", id=f"c{i}")
        machine.assert_whole()
