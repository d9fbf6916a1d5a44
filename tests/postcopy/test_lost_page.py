# SPDX-License-Identifier: GPL-2.0-or-later
"""The end of post-copy when the source has sent all, and a page is missing."""
import pytest

from tests.lab.backends import CHANNELS
from tests.lab.pair import Pair, until
from tests.lab.proxy import MAIN, URGENT, Never


@pytest.mark.parametrize("trouble, exits, channels", [
    ("reset", "on", "preempt"),
    pytest.param(None, "on", "one-channel", marks=pytest.mark.slow),
    pytest.param("destination", "on", "preempt", marks=pytest.mark.slow),
    pytest.param("destination", "off", "preempt", marks=pytest.mark.slow),
    pytest.param("source", "on", "preempt", marks=pytest.mark.slow),
    pytest.param(None, "off", "one-channel", marks=pytest.mark.slow),
])
def test_requested_page_is_lost(place, trouble, exits, channels):
    """The destination has read the end of the main channel, and a page that it has requested is missing: it waits, can
    be paused, and recovered."""
    lying = URGENT if channels == "preempt" else MAIN
    with Pair(place, exits=exits, pattern="shared", mem=16, **CHANNELS[channels]) as pair:
        lie = Never()
        wire = pair.wire(pair.listen(), lie=lie, lying=lying)
        pair.postcopy(wire.uri, bandwidth=256 << 10)
        until(lambda: lie.page and (oldest := (pair.faults() or {}).get("oldest"))
              and oldest["offset"] == lie.told.address, "the page that does not come is asked for")
        pair.fast()
        until(pair.destination.has_read_the_end, "the destination has read the end")
        if channels == "preempt":
            # The page may still be received.
            for side in pair.sides:
                assert side.status() == "postcopy-active"
            assert pair.faults()["awaited"] > 0
            if trouble == "reset":
                wire.cut()
            else:
                (pair.source if trouble == "source" else pair.destination).cmd("migrate-pause")
        pair.wait_paused()
        if channels == "one-channel":
            # Pages are sent in order: the source has withheld this one.
            pair.destination.wait_says(f"without the page at offset 0x{lie.told.address:x}")
        assert pair.faults()["awaited"] > 0
        pair.recover()
        pair.finish()
