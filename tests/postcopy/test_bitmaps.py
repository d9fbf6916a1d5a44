# SPDX-License-Identifier: GPL-2.0-or-later
"""Dirty bitmaps in post-copy: of disks, when all memory was received before, and of memory."""
import re

import pytest

from tests.lab.pair import MIB, Pair, until

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
    with Pair(place, exits=None, memory_mb=48, source_options=options, destination_options=options) as pair:
        pair.start(bandwidth=64 * MIB)
        until(lambda: pair.source.cmd("query-migrate")["ram"]["dirty-sync-count"] > 4, "syncs of what has been written")
        pair.source.cmd("migrate-set-parameters", downtime_limit=20000)
        pair.finish()
