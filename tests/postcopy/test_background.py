# SPDX-License-Identifier: GPL-2.0-or-later
"""With x-postcopy-window, what nobody has requested does not delay what somebody waits for."""
from tests.lab.pair import MIB, STOCK, Pair

WINDOW = ("-global", "migration.x-postcopy-window=on")
# Of the wire, which takes more from the source than this: what lies before it is a queue.
RATE = 16 * MIB


def migrated(place, **options):
    """Both sides' query-migrate after a migration by one connection whose background nothing limits."""
    with Pair(place, exits=None, capabilities=(), cpus=1, memory_mb=64, **options) as pair:
        pair.postcopy(pair.wire(pair.listen(), rate=RATE).uri, bandwidth=0)
        pair.finish()
        return [side.cmd("query-migrate") for side in pair.sides]


def test_requests_pass(place):
    """A requested page waits for what lies before it on the wire."""
    source, destination = migrated(place)
    assert "postcopy-window" not in source
    without_ms = destination["postcopy-latency"] / 1e6
    source, destination = migrated(place, source_options=WINDOW)
    with_ms = destination["postcopy-latency"] / 1e6
    assert with_ms < without_ms / 4, (source["postcopy-window"], destination["postcopy-latency-dist"])


def test_stock_answers(place):
    """A destination without the branch answers PINGs as well: what is on its way is little."""
    window = migrated(place, source_options=WINDOW, destination=STOCK)[0]["postcopy-window"]
    # Half a second of the wire would lie in its queue
    assert 0 < window["delay"] < 250e6 and window["size"] < RATE // 4, window
