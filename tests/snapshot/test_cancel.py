# SPDX-License-Identifier: GPL-2.0-or-later
"""A snapshot that is cancelled is never reported complete, whatever its thread does meanwhile."""
import threading
import time

import pytest

from tests.lab.pair import INJECT, until
from tests.lab.snapshot import Machine

# The position of the thread that writes the snapshot at migrate_cancel.
POINTS = [
    pytest.param("snapshot-iterate", marks=pytest.mark.slow),   # before the thread saves a page
    pytest.param("snapshot-saved", marks=pytest.mark.slow),     # it has saved all pages
    "snapshot-completing",                                      # it has written all there is
]


@pytest.mark.parametrize("point", POINTS)
def test_cancel_while_the_thread_is_held(place, point):
    with Machine(place, qemu=INJECT, mem=4) as machine:
        inject = machine.side.inject
        inject.arm(point)
        machine.start()
        inject.wait_held(point)
        machine.side.cmd("migrate_cancel")
        assert machine.side.cmd("query-migrate")["status"] == "cancelling"
        inject.release(point)
        machine.wait("cancelled")
        machine.assert_whole()


def test_the_guest_goes_on_before_the_thread_does(place):
    """Memory is not protected any more, the guest writes, and the thread saves changed pages."""
    with Machine(place, qemu=INJECT, mem=4, cpus=2) as machine:
        inject = machine.side.inject
        inject.arm("snapshot-iterate")
        machine.start()
        inject.wait_held("snapshot-iterate")
        vcpus = [machine.side.vcpu(n) for n in range(2)]
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
