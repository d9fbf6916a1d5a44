# SPDX-License-Identifier: GPL-2.0-or-later
"""Dirty bitmaps in post-copy: of disks, when all memory was received before, and of memory. The destination discards
dirty pages before it runs the guest, while the guest still runs on the source."""
import re

import pytest

from tests.lab.backends import CHANNELS
from tests.lab.failures import Failures
from tests.lab.pair import FORK, MIB, STOCK, Pair, until
from tests.lab.text import search
from tests.postcopy.steps import assert_refused, events, held_at, ram

# KVM's log is cleared by chunks of 1 GiB; here of 256 KiB, so that a small guest has many
CHUNK = 256 << 10
OPTIONS = ("-global", "migration.x-clear-bitmap-shift=6", "-trace", "migration_bitmap_clear_dirty")


def test_bitmaps_alone(place):
    """Post-copy takes no part, but the source ends its memory once more in it."""
    with Pair(place, capabilities=None, mem=4) as pair:
        for side in pair.sides:
            # QEMU estimates 32 MiB for its bitmap: too much for the blackout, which has time for memory
            side.add_disk(16 << 30)
            side.set_capabilities("dirty-bitmaps")
        pair.source.qmp.cmd("block-dirty-bitmap-add", node="disk", name="changed", granularity=512)
        pair.start(bandwidth=8 * MIB)
        pair.source.cmd("migrate-start-postcopy")
        pair.source.cmd("migrate-set-parameters", downtime_limit=1000)
        pair.finish()
        assert "loadvm_handle_cmd_packaged_received" in dict(pair.destination.trace())
        [disk] = [node for node in pair.destination.cmd("query-named-block-nodes") if node.get("node-name") == "disk"]
        assert [bitmap["name"] for bitmap in disk["dirty-bitmaps"]] == ["changed"]


@pytest.mark.parametrize("fetch", [0, 2])
def test_not_cleared_in_postcopy(place, fetch):
    """The memory of a stopped guest is not write-protected to find its writes."""
    def cleared():
        log = place.read_file(pair.source.trace_log).decode()
        return len(re.findall(r"migration_bitmap_clear_dirty rb (?:ram|pc\.ram) ", log))

    with Pair(place, fetch=fetch, memory_mb=48, source_options=OPTIONS) as pair:
        pair.start(bandwidth=4 * MIB)
        until(cleared, "memory that is protected in pre-copy")
        pair.source.cmd("migrate-start-postcopy")
        pair.source.wait_status("postcopy-active", "completed")
        before = cleared()
        # Pre-copy has sent a part of it
        assert before < 40 * MIB // CHUNK
        pair.finish()
        assert cleared() == before


def test_writes_behind_a_sync(place):
    """QEMU is notified of each write, wherever the RAM block lies: a DIMM's is before the machine's memory."""
    options = ("-m", "48M,slots=1,maxmem=1G", "-object", "memory-backend-ram,id=near,size=16M",
               "-device", "pc-dimm,memdev=near")
    with Pair(place, exits=None, memory_mb=48, both_options=options) as pair:
        pair.start(bandwidth=64 * MIB)
        until(lambda: ram(pair)["dirty-sync-count"] > 4, "syncs of what has been written")
        pair.source.cmd("migrate-set-parameters", downtime_limit=20000)
        pair.finish()


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
def test_discards_before_the_guest_stops(place, destination):
    """Except the memory of a display, which the destination may read at any time: it would find zeros indefinitely."""
    vga = "-device", "VGA,romfile="
    with Pair(place, destination=destination, memory_mb=160, mem=128, pattern="hot", cpus=2,
              both_options=vga, **CHANNELS["preempt"]) as pair:
        # The guest writes faster than this, so that memory has been sent once and is dirty in many places
        pair.start(bandwidth=1 << 30)
        until(lambda: ram(pair)["dirty-sync-count"] >= 3, "pre-copy's third pass", timeout=120)
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
        before = ram(pair)["dirty-sync-count"]
        pair.destination.signal("STOP")
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: ram(pair)["dirty-sync-count"] > before, "the source syncs before it sends discards")
        if end == "cancelled":
            pair.source.cmd("migrate_cancel")
        pair.destination.signal("KILL")
        pair.source.wait_status("cancelled" if end == "cancelled" else "failed")
        assert pair.source.cmd("query-status")["running"]
        assert "STOP" not in events(pair.source)
        Failures(pair).check_by_another()


def test_memory_is_not_read_meanwhile(place):
    """A monitor that reads a discarded page before userfaultfd is registered would make it a page of zeros."""
    with Pair(place, mem=8, **CHANNELS["one-channel"]) as pair:
        held_at(pair)
        assert_refused(pair.destination, "Postcopy begins", "pmemsave", val=0, size=4096, filename="/dev/null")
