# SPDX-License-Identifier: GPL-2.0-or-later
"""Pre-copy by multifd, followed by post-copy on the other connections."""
import threading
from itertools import product

import pytest

from tests.lab import tls
from tests.lab.arches import listed
from tests.lab.backends import CHANNELS
from tests.lab.failures import Failures
from tests.lab.pair import MIB, Pair, until
from tests.lab.proxy import CHUNK, Wire
from tests.postcopy.steps import events, held_at, ram

NUMBER = 3


@pytest.mark.parametrize("channels, encrypted, zeros", listed(
    *product(CHANNELS, [False], [False, True]), ("auto", True, False), ("auto", True, True),
    quick=[("preempt", False, False), ("one-channel", False, True), ("auto", True, False)]))
def test_postcopy(place, channels, encrypted, zeros):
    """A part of memory was received by multifd when post-copy begins. From then on, multifd's connections are unused:
    one of them may break, and a recovery does without them."""
    with Pair(place, memory_mb=96, mem=64, zero=100 if zeros else 0, pattern="disjoint", destination_options=["-S"],
              tls=tls.directory(place) if encrypted else None,
              **CHANNELS.get(channels, {"capabilities": (), "fetch": "auto"})) as pair:
        pair.use_multifd(NUMBER)
        pair.source.wait_ready()
        if zeros:
            # Zero pages must stay zero
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
        until(lambda: sum(thread.name.startswith("mig/dst/recv") for thread in pair.destination.threads()) < NUMBER,
              "its thread has ended")
        assert not any("error-desc" in side.migration("postcopy-active") for side in pair.sides)
        wire.cut()
        pair.wait_paused()
        pair.destination.cmd("cont")
        pair.recover_and_finish()
        assert ram(pair)["multifd-bytes"] == before
        # Of 4,000 zero pages that have been received, hardly one was missing
        assert pair.faults()["uffd-spurious"] < 1000


@pytest.mark.parametrize("channels", ["preempt", "one-channel"])
def test_old_machine_type(place, channels):
    """The machine type of a QEMU whose preempt channel is connected with the others, without an identification."""
    with Pair(place, machine="pc-i440fx-7.2", mem=8, **CHANNELS[channels]) as pair:
        pair.use_multifd(NUMBER)
        pair.midst()
        pair.finish_fast()


class Holds(Wire):
    """Withholds the data of the second connection while goes_on is clear."""

    def __init__(self, to, **options):
        self.goes_on = threading.Event()
        self.goes_on.set()
        super().__init__(to, **options)

    def _forward(self, channel):
        return self._held if channel == 1 else super()._forward(channel)

    def _held(self, a, b):
        while data := a.recv(CHUNK):
            self.goes_on.wait()
            b.sendall(data)


def whole_on_source(pair):
    until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on")
    pair.source.set_capabilities("multifd", state=False)
    Failures(pair).check_by_another()


def test_channel_breaks_before_all_is_read(place):
    """The source has sent all of multifd's pages, without which the destination must not run the guest. The guest is
    only stopped when the destination has reported that it has read all."""
    with Pair(place, mem=16, **CHANNELS["one-channel"]) as pair:
        pair.use_multifd(NUMBER)
        wire = pair.wire_of(Holds, pair.listen())
        pair.start(wire.uri, bandwidth=MIB)
        until(lambda: ram(pair)["multifd-bytes"] > MIB, "pages that multifd has sent")
        wire.goes_on.clear()
        before = ram(pair)["dirty-sync-count"]
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: ram(pair)["dirty-sync-count"] > before, "discards are sent")
        wire.abort(*wire.channels[1])
        wire.goes_on.set()
        until(lambda: not pair.destination.job.running, "the destination ends")
        pair.source.wait_status("failed")
        assert "STOP" not in events(pair.source)
        whole_on_source(pair)


def test_killed_within_the_devices(place):
    """The paused source has no main channel when it resumes its guest."""
    with Pair(place, mem=8, **CHANNELS["one-channel"]) as pair:
        pair.use_multifd(NUMBER)
        wire = held_at(pair)
        Failures(pair).act("kill-destination", wire)
        pair.source.wait_status("postcopy-paused")
        pair.source.cmd("migrate_cancel", destination_dead=True)
        whole_on_source(pair)
