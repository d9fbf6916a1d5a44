# SPDX-License-Identifier: GPL-2.0-or-later
"""Pre-copy by multifd, behind which post-copy goes on by the other connections."""
import pytest

from tests.lab import tls
from tests.lab.backends import CHANNELS
from tests.lab.pair import MIB, Pair, until

NUMBER = 3


def ram(pair):
    return pair.source.cmd("query-migrate")["ram"]


def readers(side):
    return sum(thread.name.startswith("mig/dst/recv") for thread in side.threads())


@pytest.mark.parametrize("zeros", [False, True], ids=["pages", "zeros"])
@pytest.mark.parametrize("channels, encrypted", [*((each, False) for each in CHANNELS), ("auto", True)])
def test_postcopy(place, channels, encrypted, zeros):
    """A part of memory has come by multifd when post-copy begins. From then on nothing passes multifd's connections:
    one of them may break, and a recovery does without."""
    with Pair(place, memory_mb=96, mem=64, zero=100 if zeros else 0, pattern="disjoint", destination_options=["-S"],
              tls=tls.directory(place) if encrypted else None,
              **CHANNELS.get(channels, {"capabilities": (), "fetch": "auto"})) as pair:
        for side in pair.sides:
            side.set_capabilities("multifd")
            side.cmd("migrate-set-parameters", multifd_channels=NUMBER)
        pair.source.wait_ready()
        if zeros:
            # They stay what they are
            pair.source.cmd("stop")
        wire = pair.wire(pair.listen())
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=MIB)
        pair.start(wire.uri, bandwidth=64 << 10 if zeros else 8 * MIB)
        until(lambda: ram(pair)["duplicate"] > 4000 if zeros else ram(pair)["multifd-bytes"] > 8 * MIB, "pre-copy")
        pair.source.cmd("migrate-start-postcopy")
        pair.until_faults()
        before = ram(pair)["multifd-bytes"]
        # The second connection
        wire.abort(*wire.channels[1])
        until(lambda: readers(pair.destination) < NUMBER, "its thread has ended")
        assert not any("error-desc" in side.migration("postcopy-active") for side in pair.sides)
        wire.cut()
        pair.wait_paused()
        pair.destination.cmd("cont")
        pair.recover_and_finish()
        assert ram(pair)["multifd-bytes"] == before
        # Of 4,000 zero pages that have been received, hardly one was missing
        assert pair.faults()["uffd-spurious"] < 1000
