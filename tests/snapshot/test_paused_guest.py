# SPDX-License-Identifier: GPL-2.0-or-later
"""Snapshots of a guest that does not run, and of one that gives memory back."""
from tests.lab.pair import INJECT, until
from tests.lab.qtest import Qtest, eject_memory, unplug_memory
from tests.lab.snapshot import Machine

PVPANIC, PANICKED = 0x505, 1
DIMM = ("-object", "memory-backend-ram,id=more,size=8M", "-device", "pc-dimm,id=dimm,memdev=more")


def status(machine):
    return machine.side.cmd("query-status")["status"]


def test_panicked(place):
    """The guest stays panicked, in the snapshot too."""
    with Machine(place, mem=4, arguments=["-device", "pvpanic", "-action", "panic=pause"]) as machine:
        machine.side.hmp(f"o/b {PVPANIC:#x} {PANICKED}")
        until(lambda: status(machine) == "guest-panicked", "the guest panics")
        machine.take()
        assert status(machine) == "guest-panicked"
        machine.restore(status="guest-panicked")
        machine.side.cmd("cont")
        machine.assert_whole()


def test_reset_while_paused(place):
    """After a reset, the guest is in the state of one that was never started: prelaunch."""
    with Machine(place, mem=4) as machine:
        machine.side.cmd("set-action", reboot="reset")
        machine.side.cmd("stop")
        machine.side.cmd("system_reset")
        until(lambda: status(machine) == "prelaunch", "the guest is reset")
        machine.take()
        assert status(machine) == "prelaunch"
        machine.side.cmd("cont")
        machine.assert_goes_on()


def test_stopped_while_it_is_taken(place):
    """Only the user starts a stopped guest, not the begin of the snapshot."""
    with Machine(place, qemu=INJECT, mem=4) as machine:
        machine.side.cmd("stop")
        machine.side.inject.arm("snapshot-iterate")
        machine.start()
        machine.side.inject.wait_held("snapshot-iterate")
        machine.side.cmd("cont")
        machine.side.inject.release("snapshot-iterate")
        machine.wait()
        assert status(machine) == "running"
        machine.restore(status="paused")
        machine.assert_whole()


def test_ejected_memory(place):
    """The guest was requested before to give memory back, and does so during the snapshot: it stays until the end."""
    with Machine(place, qemu=INJECT, mem=4, memory_mb="64,slots=1,maxmem=1G", arguments=DIMM,
                 taker=Qtest.arguments(place, "source")) as machine:
        side = machine.side
        side.cmd("device_del", id="dimm")
        side.inject.arm("snapshot-iterate")
        machine.start()
        side.inject.wait_held("snapshot-iterate")
        eject_memory(place, "source")
        assert side.cmd("query-memory-devices")
        side.inject.release("snapshot-iterate")
        machine.wait()
        machine.restore()
        unplug_memory(side)
        side.cmd("object-del", id="more")
        machine.assert_goes_on()
