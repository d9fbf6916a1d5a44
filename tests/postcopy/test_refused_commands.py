# SPDX-License-Identifier: GPL-2.0-or-later
"""Commands that would need all of the guest's memory, or replace it, while post-copy runs."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.pair import Pair

# Names of snapshots; "old" is taken before
TAG = {"snapshot-save": "new", "snapshot-load": "old"}
HUMAN = {"snapshot-save": "savevm new", "snapshot-load": "loadvm old", "migrate": "migrate -d tcp:127.0.0.1:1"}
REASON = "guest memory are missing"


def snapshot(side, command):
    return side.run_job(command, tag=TAG[command], vmstate="disk", devices=["disk"])


def error_of(side, command, pair):
    if command == "migrate":
        with pytest.raises(ExecuteError) as refused:
            side.cmd("migrate", uri=f"tcp:127.0.0.1:{pair.port()}")
        return str(refused.value)
    return snapshot(side, command)


@pytest.mark.parametrize("command", [
    pytest.param("snapshot-save", marks=pytest.mark.slow), pytest.param("snapshot-load", marks=pytest.mark.slow),
    "migrate"])
def test_refused(place, command):
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
        destination.attach_disk(image)
        assert REASON in error_of(destination, command, pair)
        assert REASON in destination.hmp(HUMAN[command])
        assert destination.cmd("query-status")["status"] == "running"
        source.signal("CONT")
        pair.finish_fast()
        if command != "migrate":
            assert not snapshot(destination, command)
