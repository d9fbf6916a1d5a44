# SPDX-License-Identifier: GPL-2.0-or-later
"""Snapshots while migration's capabilities are set, as the last migration has left them."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.pair import Pair
from tests.lab.snapshot import Machine

REFUSED = {"multifd", "mapped-ram", "x-ignore-shared", "dirty-bitmaps", "background-snapshot", "zero-copy-send"}
# Capabilities that need others; x-colo may be left out of a build, dirty-limit needs KVM's dirty ring.
NEEDS = {"postcopy-preempt": ["postcopy-ram"], "switchover-ack": ["return-path"], "zero-copy-send": ["multifd"]}
NOT_HERE = {"x-colo", "dirty-limit"}


def snapshot(side, command, tag):
    return side.run_job(command, tag=tag, vmstate="disk", devices=["disk"])


@pytest.mark.slow
def test_snapshots_in_images(place):
    """With each capability, QEMU either refuses with a reason, or saves and loads a snapshot."""
    with Machine(place, mem=8) as machine:
        side = machine.side
        side.set_capabilities("background-snapshot", state=False)
        side.add_disk(64 << 20)
        assert not snapshot(side, "snapshot-save", "old")
        names = [c["capability"] for c in side.cmd("query-migrate-capabilities") if not c["state"]]
        refused = set()
        for name in names:
            set_ = [*NEEDS.get(name, ()), name]
            try:
                side.set_capabilities(*set_)
            except ExecuteError as e:
                assert name in NOT_HERE, f"{name}: {e}"
                continue
            errors = [snapshot(side, "snapshot-save", name), snapshot(side, "snapshot-load", "old")]
            assert bool(errors[0]) == bool(errors[1]), f"{name}: {errors}"
            if errors[0]:
                refused.add(name)
                assert all(f"while migration capability '{set_[0]}' is set" in error for error in errors), errors
            else:
                assert not snapshot(side, "snapshot-load", name), name
            side.set_capabilities(*reversed(set_), state=False)
            machine.assert_goes_on()
        assert refused == REFUSED
        side.set_capabilities("background-snapshot")
        machine.assert_whole()


@pytest.mark.parametrize("more", [(), ("multifd",)], ids=["", "multifd"])
def test_memory_that_stays_where_it_is(place, more):
    """The file lacks the memory that both QEMUs share in a file of its own."""
    state, memory = f"{place.tmp}/state", f"{place.tmp}/memory"
    place.run(f"rm -f {state} {memory}")
    with Pair(place, mem=16, capabilities=None, backend=f"memory-backend-file,mem-path={memory},share=on") as pair:
        for side in pair.sides:
            side.set_capabilities("mapped-ram", "x-ignore-shared", *more)
        pair.source.wait_ready()
        pair.source.cmd("migrate", uri=f"file:{state}")
        pair.source.wait_status("completed")
        assert int(place.run(f"du -k {state}", check=True).output.split()[0]) < 4096
        pair.destination.cmd("migrate-incoming", uri=f"file:{state}")
        pair.finish()
    place.run(f"rm {state} {memory}", check=True)


def test_background_snapshot_of_memory_that_is_not_saved(place):
    """The snapshot would be of two instants."""
    with Machine(place, mem=4) as machine, pytest.raises(ExecuteError, match="x-ignore-shared"):
        machine.side.set_capabilities("x-ignore-shared")
