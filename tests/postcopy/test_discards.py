# SPDX-License-Identifier: GPL-2.0-or-later
"""The destination discards pages before it runs the guest, while the guest still runs on the source."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.backends import CHANNELS
from tests.lab.failures import Failures, phase_wire
from tests.lab.pair import FORK, STOCK, Pair, until
from tests.lab.paths import PATIENCE
from tests.lab.text import search


def syncs(pair):
    return pair.source.cmd("query-migrate")["ram"]["dirty-sync-count"]


def ranges(pair):
    """By block: how many ranges were sent before the guest stopped, and after."""
    counts: tuple[dict[str, int], dict[str, int]] = {}, {}
    stopped = 0
    for name, text in pair.source.trace():
        if name == "postcopy_start":
            stopped = 1
        elif name == "postcopy_discard_send_finish":
            block, number = search(r"(\S+) mask words sent=(\d+)", text).groups()
            counts[stopped][block] = counts[stopped].get(block, 0) + int(number)
    return counts


@pytest.mark.parametrize("destination", [FORK, STOCK])
def test_before_the_guest_stops(place, destination):
    """Except the memory of a display, which the destination may read at any time: it would find zeros indefinitely."""
    vga = "-device", "VGA,romfile="
    with Pair(place, destination=destination, memory_mb=160, mem=128, pattern="hot", cpus=2,
              source_options=vga, destination_options=vga, **CHANNELS["preempt"]) as pair:
        # The guest writes faster than this, so that memory has been sent once and is dirty in many places
        pair.start(bandwidth=1 << 30)
        until(lambda: syncs(pair) >= 3, "pre-copy's third pass", timeout=120)
        pair.source.cmd("migrate-start-postcopy")
        pair.finish_fast()
        early, late = ranges(pair)
        assert early["pc.ram"] > 1000 and late["pc.ram"] < early["pc.ram"] / 2, (early, late)
        assert "0000:00:02.0/vga.vram" not in early, early


@pytest.mark.parametrize("end", ["cancelled", "destination-killed"])
def test_destination_does_not_discard(place, end):
    """The guest was not stopped for the discards, and can be migrated anew."""
    with Pair(place, mem=8, **CHANNELS["one-channel"]) as pair:
        pair.start()
        before = syncs(pair)
        pair.destination.signal("STOP")
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: syncs(pair) > before, "the source syncs before it sends discards")
        if end == "cancelled":
            pair.source.cmd("migrate_cancel")
        pair.destination.signal("KILL")
        pair.source.wait_status("cancelled" if end == "cancelled" else "failed")
        assert pair.source.cmd("query-status")["running"]
        assert "STOP" not in [event["event"] for event in pair.source.qmp.get_events(wait=False)]
        Failures(pair).check_by_another()


def test_memory_is_not_read_meanwhile(place):
    """A monitor that reads a discarded page before userfaultfd is registered would make it a page of zeros."""
    with Pair(place, mem=8, **CHANNELS["one-channel"]) as pair:
        wire = phase_wire(pair, pair.listen(), "switch", 0.5)
        pair.start(wire.uri)
        pair.source.cmd("migrate-start-postcopy")
        assert wire.reached.wait(60 * PATIENCE)
        with pytest.raises(ExecuteError, match="Postcopy begins"):
            pair.destination.cmd("pmemsave", val=0, size=4096, filename="/dev/null")
        Failures(pair).act("kill-destination", wire)
        pair.source.wait_status("postcopy-paused")
