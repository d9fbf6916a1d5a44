# SPDX-License-Identifier: GPL-2.0-or-later
"""The background of post-copy on fetch channels."""
import socket
import threading

import pytest

from tests.lab.fetch_proxy import HELLO_SIZE, FetchWire, frames
from tests.lab.pair import MIB, NO_WINDOW, Pair, until
from tests.lab.proxy import PAGE_SIZE

FAR = 120 * MIB


def counts(side, key):
    return [channel[key] for channel in side.cmd("query-migrate")["postcopy-fetch"]["channels"]]


@pytest.mark.parametrize("fetch, zero", [(2, 0), (3, 0), (2, 100)])
def test_runs(place, fetch, zero):
    """The background also uses the channels: the first one only serves requests, each other one has a part, and many
    pages share a frame."""
    with Pair(place, fetch=fetch, cpus=1, mem=24, zero=zero, pattern="disjoint") as pair:
        uri = pair.listen()
        pair.source.wait_ready()
        pair.source.cmd("stop")
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)
        # Of zero pages, pre-copy sends a thousand in a second
        pair.start(uri, bandwidth=8 << 10)
        pair.source.cmd("migrate-start-postcopy")
        pair.wait_completed()
        pages, zeros, frames = (counts(pair.source, key) for key in ("pages", "zero-pages", "frames"))
        print(pages, zeros, frames)
        assert sum(zeros) > 500 if zero else sum(pages) > 23 * MIB // 4096
        assert not frames.pop(0)
        assert all(frames)
        # The smallest slice has four pages
        assert sum(frames) < (sum(pages) + sum(zeros)) / 3
        assert frames == counts(pair.destination, "frames")[-len(frames):]
        pair.destination.cmd("cont")
        pair.destination.wait_event("end")
        assert pair.destination.report().intact


class Stops(FetchWire):
    """On the last of two channels, withholds the frames from the 100th on, behind pages that vCPUs need to resume."""

    def __init__(self, to, **options):
        self.halted, self.go_on = threading.Event(), threading.Event()
        super().__init__(to, **options)

    def _fetch(self, a, b):
        with a.makefile("rb") as stream:
            hello = stream.read(HELLO_SIZE)
            b.sendall(hello)
            for n, frame in enumerate(frames(stream)):
                if hello[7] == 1 and n > 100:
                    self.halted.set()
                    self.go_on.wait()
                b.sendall(frame.pack())


@pytest.mark.parametrize("end", ["goes-on", "pause-source", "pause-destination"])
def test_blocked(place, end):
    """While the background's connection is not read, the other channel answers requests. Once the connection is full,
    either side can break it."""
    pauses = end != "goes-on"
    with Pair(place, fetch=2, mem=128, memory_mb=160, zero=0, pattern="disjoint", destination_options=["-S"],
              source_options=NO_WINDOW if pauses else ()) as pair:
        between = pair.wire_of(Stops, pair.listen())
        between.listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        try:
            pair.postcopy(between.uri, bandwidth=0)
            assert between.halted.wait(30)
            if pauses:
                pair.until_stuck()
            before = pair.faults()["copied-bytes"]
            # The background is far from FAR. A vCPU may need a page in the blocked connection, and others wait for it.
            pair.destination.memory(FAR, PAGE_SIZE)
            until(lambda: pair.faults()["copied-bytes"] > before, "the answered request is counted")
            pair.destination.cmd("cont")
            if pauses:
                (pair.source if end == "pause-source" else pair.destination).cmd("migrate-pause")
                pair.wait_paused()
        finally:
            between.go_on.set()
        if pauses:
            pair.recover_and_finish()
        else:
            pair.finish_fast()
