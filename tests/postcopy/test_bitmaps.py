# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy of dirty bitmaps, where memory has come before."""
from tests.lab.pair import MIB, Pair


def test_bitmaps_alone(place):
    """The source ends its memory once more in post-copy, which takes no part in it."""
    with Pair(place, capabilities=None, mem=4) as pair:
        for side in pair.sides:
            # By its bitmap, QEMU takes it for 32 MiB to be sent: too much for the blackout, which has time for memory
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
