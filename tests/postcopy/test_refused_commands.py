# SPDX-License-Identifier: GPL-2.0-or-later
"""Commands that are refused during a migration: changes of settings on which it depends, on either side; and commands
that need all of the guest's memory, or replace it."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.arches import listed
from tests.lab.pair import MIB, Pair
from tests.postcopy.steps import assert_refused

IN_PROGRESS = "in progress"
# Names of snapshots; "old" is taken before
TAG = {"snapshot-save": "new", "snapshot-load": "old"}
HUMAN = {"snapshot-save": "savevm new", "snapshot-load": "loadvm old", "migrate": "migrate -d tcp:127.0.0.1:1"}
REASON = "guest memory are missing"


def test_capabilities_of_a_destination(place):
    """Capabilities decide the meaning of a stream's end: without postcopy-ram, no page is missing."""
    with Pair(place, mem=8) as pair:
        pair.start()

        def assert_kept():
            for name in "postcopy-preempt", "postcopy-ram":
                with pytest.raises(ExecuteError, match=IN_PROGRESS):
                    pair.destination.set_capabilities(name, state=False)

        assert_kept()
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=64 << 10)
        pair.source.cmd("migrate-start-postcopy")
        pair.until_faults()
        assert_kept()
        pair.pause()
        assert_kept()
        pair.recover_and_finish()
        pair.destination.set_capabilities("postcopy-preempt", state=False)


def test_number_of_channels(place):
    """All loops over the channels end at the parameter's value."""
    with Pair(place, mem=16, capabilities=None) as pair:
        pair.use_multifd()
        pair.start(bandwidth=MIB)
        for side in pair.sides:
            for name, value in ("multifd-channels", 1), ("multifd-channels", 255), ("mode", "cpr-reboot"):
                assert_refused(side, f"{name}.*{IN_PROGRESS}", "migrate-set-parameters", **{name: value})
            # Other parameters, and the same number, can be set.
            side.cmd("migrate-set-parameters", multifd_channels=2, announce_rounds=3)
        pair.source.cmd("migrate-set-parameters", max_bandwidth=128 * MIB, downtime_limit=20000)
        pair.finish()
        pair.destination.cmd("migrate-set-parameters", multifd_channels=4)


def test_snapshots_of_a_source(place):
    """A snapshot is refused before the old one of that name is deleted, or the guest is stopped. In post-copy, a reset
    on the source would write to memory that is still to be sent."""
    with Pair(place, mem=8) as pair:
        source = pair.source
        source.wait_ready()
        source.add_disk()
        assert not source.run_job("snapshot-save", tag="old", vmstate="disk", devices=["disk"])
        pair.start()
        for line in "savevm old", "loadvm old":
            assert IN_PROGRESS in source.hmp(line)
        assert IN_PROGRESS in snapshot(source, "snapshot-load")
        assert "old" in source.hmp("info snapshots")
        assert source.cmd("query-status")["status"] == "running"
        source.cmd("blockdev-del", node_name="disk")
        source.cmd("migrate-set-parameters", max_postcopy_bandwidth=64 << 10)
        source.cmd("migrate-start-postcopy")
        pair.destination.wait_event("timing")
        assert_refused(source, "reset it on the destination", "system_reset")
        assert "reset it on the destination" in source.hmp("system_reset")
        pair.finish_fast()


def snapshot(side, command):
    return side.run_job(command, tag=TAG[command], vmstate="disk", devices=["disk"])


@pytest.mark.parametrize("command", listed(*HUMAN, quick=["migrate"]))
def test_what_needs_all_memory(place, command):
    """The source sends no data: a command that waited for it would block QEMU's main thread. The guest continues, and
    when all memory is received, the commands succeed."""
    with Pair(place, pattern="shared", mem=16) as pair:
        source, destination = pair.sides
        source.wait_ready()
        image = source.add_disk()
        assert not source.run_job("snapshot-save", tag="old", vmstate="disk", devices=["disk"])
        source.cmd("blockdev-del", node_name="disk")
        pair.midst()
        source.signal("STOP")
        destination.cmd("blockdev-add", driver="qcow2", node_name="disk", file={"driver": "file", "filename": image})
        if command == "migrate":
            assert_refused(destination, REASON, "migrate", uri=f"tcp:127.0.0.1:{pair.port()}")
        else:
            assert REASON in snapshot(destination, command)
        assert REASON in destination.hmp(HUMAN[command])
        assert destination.cmd("query-status")["status"] == "running"
        source.signal("CONT")
        pair.finish_fast()
        if command != "migrate":
            assert not snapshot(destination, command)
