# SPDX-License-Identifier: GPL-2.0-or-later
"""A snapshot that fails or is cancelled is never reported complete, whatever its thread does meanwhile, and leaves the
guest running, unprotected and whole. The next snapshot may begin while QEMU still cleans up."""
import re
import threading
import time

import pytest
from qemu.qmp import ExecuteError

from tests.lab.pair import INJECT, until
from tests.lab.snapshot import Machine

# The position of the thread that writes the snapshot at migrate_cancel.
POINTS = [
    pytest.param("snapshot-iterate", marks=pytest.mark.slow),   # before the thread saves a page
    pytest.param("snapshot-saved", marks=pytest.mark.slow),     # it has saved all pages
    "snapshot-completing",                                      # it has written all there is
]


def start_held(machine, point, uri=""):
    """Start a snapshot, and hold its thread at the point."""
    machine.side.inject.arm(point)
    machine.start(uri)
    machine.side.inject.wait_held(point)


@pytest.mark.parametrize("point", POINTS)
def test_cancel_while_the_thread_is_held(place, point):
    with Machine(place, qemu=INJECT, mem=4) as machine:
        start_held(machine, point)
        machine.side.cmd("migrate_cancel")
        assert machine.side.status() == "cancelling"
        machine.side.inject.release(point)
        machine.wait("cancelled")
        machine.assert_whole()


def test_the_guest_goes_on_before_the_thread_does(place):
    """Memory is not protected any more, the guest writes, and the thread saves changed pages."""
    with Machine(place, qemu=INJECT, mem=4, cpus=2) as machine:
        inject = machine.side.inject
        start_held(machine, "snapshot-iterate")
        vcpus = "CPU 0/", "CPU 1/"
        until(lambda: machine.side.sleeps_in("handle_userfault", *vcpus), "the vCPUs wait for pages")
        inject.arm("snapshot-given-up")
        # QMP answers no command while migrate_cancel is held.
        cancel = threading.Thread(target=machine.side.cmd, args=("migrate_cancel",))
        cancel.start()
        inject.wait_held("snapshot-given-up")
        # The vCPUs have made the writes that waited, and more.
        until(lambda: machine.side.sleeps_in("futex", *vcpus), "the vCPUs wait for the BQL")
        inject.release("snapshot-iterate")
        until(lambda: machine.side.sleeps_in("futex", "mig/snapshot"), "the thread waits for the BQL, having saved all")
        inject.release("snapshot-given-up")
        cancel.join()
        machine.wait("cancelled")
        machine.assert_whole()


@pytest.mark.slow
def test_cancel_about_when_it_completes(place):
    """A snapshot that is reported complete is of one instant; all others were cancelled."""
    ended: list[str] = []
    with Machine(place, mem=8, pattern="shared") as machine:
        start = time.monotonic()
        machine.take()
        delay_s = time.monotonic() - start
        for _ in range(24):
            machine.start()
            time.sleep(delay_s)
            machine.side.cmd("migrate_cancel")
            ended.append(machine.wait("completed", "cancelled")["status"])
            if ended[-1] == "completed":
                machine.restore()
            # So that the next delay is close to the border
            delay_s *= 1.3 if ended[-1] == "cancelled" else 1 / 1.3
        assert min(ended.count("completed"), ended.count("cancelled")) >= 5, ended
        machine.assert_whole()


def test_completed_is_the_end(place):
    """While memory is protected, and the guest may wait, a snapshot is not complete."""
    with Machine(place, qemu=INJECT, mem=4) as machine:
        start_held(machine, "snapshot-completing")
        assert machine.side.status() == "active"
        machine.side.inject.release("snapshot-completing")
        machine.wait()
        for _ in range(3):
            machine.take()
        machine.assert_whole()


@pytest.mark.slow
def test_failed_before_the_end(place):
    """After a failure, the status changes before the end. The next snapshot is refused, and changes nothing."""
    with Machine(place, qemu=INJECT, mem=4) as machine:
        start_held(machine, "snapshot-completing", "exec:head -c 300000 >/dev/null")
        assert machine.side.status() == "failed"
        with pytest.raises(ExecuteError, match="There's a migration process in progress"):
            machine.start()
        assert machine.side.status() == "failed"
        machine.side.inject.release("snapshot-completing")

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
        start_held(machine, "snapshot-completing")
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


@pytest.mark.slow
def test_full_disk(lab):
    lab.run("mkdir -p /tmp/small && mount -t tmpfs -o size=8M tmpfs /tmp/small", check=True)
    try:
        with Machine(lab, mem=16, backend="memfd") as machine:
            assert "No space left on device" in machine.take("file:/tmp/small/snapshot", "failed")["error-desc"]
            machine.assert_whole()
    finally:
        lab.run("umount /tmp/small", check=True)


def test_devices_that_cannot_be_saved(place):
    """The snapshot fails before memory is protected, and closes no other file: standard input has number 0."""
    with Machine(place, INJECT, mem=16) as machine:
        standard_input = f"readlink /proc/$(cat {machine.side.pidfile})/fd/0"
        before = place.run(standard_input, check=True).output
        machine.side.inject.arm("snapshot-devices")
        machine.take(status="failed")
        machine.assert_goes_on()
        assert place.run(standard_input).output == before


def test_cancel_a_stuck_snapshot(place):
    """The thread that writes the snapshot hangs; the guest does not."""
    with Machine(place, mem=16, cpus=2) as machine:
        taker = f"{place.tmp}/taker"
        machine.start(f"exec:echo $$ >{taker}; exec sleep 1000")
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
        assert machine.side.status() == "cancelling"
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
