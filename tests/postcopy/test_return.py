# SPDX-License-Identifier: GPL-2.0-or-later
"""After the switch, before the destination has loaded the devices: the guest can go on where it was."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.faults import Ended, Faults, phase_wire
from tests.lab.pair import STOCK, Pair, until

REFUSED = "Postcopy migration in progress, cannot cancel."


def until_split(pair, wire):
    """The destination has ended, and the source is paused."""
    pair.start(wire.uri)
    pair.source.cmd("migrate-start-postcopy")
    assert wire.reached.wait(60)
    wire.cut()
    pair.source.wait_status("postcopy-paused")
    until(lambda: not pair.destination.job.running, "the destination ends")


@pytest.mark.parametrize("end, channels, destination", [
    ("cut", "preempt", None),
    ("killed", "one-channel", None),
    pytest.param("cut", "one-channel", STOCK, marks=pytest.mark.slow),
])
def test_cut_within_the_devices(lab, end, channels, destination):
    """Nobody can know whether the destination runs the guest but who looks: he lets it go on."""
    with Pair(lab, capabilities=("postcopy-preempt",) if channels == "preempt" else (), mem=8,
              **({"destination": destination} if destination else {})) as pair:
        wire = phase_wire(pair, pair.listen(), "switch", 0.5)
        faults = Faults(pair)
        pair.start(wire.uri)
        pair.source.cmd("migrate-start-postcopy")
        assert wire.reached.wait(60)
        with pytest.raises(ExecuteError, match="cannot cancel unless it is paused"):
            pair.source.cmd("migrate_cancel")
        faults.act("cut" if end == "cut" else "kill-destination", wire)
        pair.source.wait_status("postcopy-paused")
        assert "migrate_cancel lets the guest go on here" in pair.source.cmd("query-migrate")["error-desc"]
        assert not pair.source.cmd("query-status")["running"]
        assert faults.ended() == Ended.SOURCE


def test_destination_cannot_load_the_devices(lab):
    """It says so: the guest goes on by itself."""
    device = "-device", "pvpanic-pci"
    with Pair(lab, mem=8, source_options=device) as pair:
        pair.start()
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: not pair.destination.job.running, "the destination ends")
        assert pair.destination.job.wait().rc == 1
        pair.source.wait_status("failed")
        until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on")
        # Another one has it.
        pair.plans[1].arguments += device
        assert Faults(pair).ended() == Ended.SOURCE


def test_not_once_the_destination_may_run_it(lab):
    with Pair(lab, mem=8) as pair:
        wire = phase_wire(pair, pair.listen(), "listen", 0.5)
        pair.start(wire.uri)
        pair.source.cmd("migrate-start-postcopy")
        assert wire.reached.wait(60)
        until(lambda: pair.destination.cmd("query-status")["running"], "the guest runs on the destination")
        # If this is lost, the administrator decides
        until(lambda: ("source_return_path_thread_pong", "0x3") in pair.source.trace(), "the source is told")
        pair.source.cmd("migrate-pause")
        wire.cut()
        pair.wait_paused()
        with pytest.raises(ExecuteError, match=REFUSED):
            pair.source.cmd("migrate_cancel")
        pair.recover()
        with pytest.raises(ExecuteError, match=REFUSED):
            pair.source.cmd("migrate_cancel")
        pair.finish()


def test_not_with_released_memory(lab):
    """What release-ram has given up on the source is nowhere else."""
    with Pair(lab, capabilities=("postcopy-preempt", "release-ram"), mem=8) as pair:
        until_split(pair, phase_wire(pair, pair.listen(), "switch", 0.5))
        with pytest.raises(ExecuteError, match=REFUSED):
            pair.source.cmd("migrate_cancel")


def test_a_source_that_quits_runs_nothing(lab):
    with Pair(lab, mem=8) as pair:
        until_split(pair, phase_wire(pair, pair.listen(), "switch", 0.5))
        events = pair.source.report().events
        pair.source.cmd("quit")
        assert pair.source.job.wait(20).rc == 0
        assert pair.source.report().events == events
