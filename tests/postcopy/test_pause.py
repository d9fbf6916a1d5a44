# SPDX-License-Identifier: GPL-2.0-or-later
"""migrate-pause ends what a thread sends to a peer that reads nothing, whatever lock that thread has."""
import time

from tests.lab.pair import INJECT, MIB, Pair
from tests.lab.proxy import URGENT, Wire


class ReadsNoUrgentPages(Wire):
    """Of its first connection."""

    def _forward(self, channel):
        return self._nothing if channel == URGENT else self._copy

    def _nothing(self, a, b):
        while not self.is_cut:
            time.sleep(0.1)


def test_destination_sends(lab):
    """Page requests, with the lock of the return path."""
    with Pair(lab, exits="on", source=INJECT, destination=INJECT, pattern="shared", mem=16) as pair:
        pair.midst()
        pair.destination.inject.arm("rp-message")
        pair.destination.inject.wait_held("rp-message")
        pair.destination.cmd("migrate-pause")
        pair.source.wait_status("postcopy-paused")
        pair.destination.inject.release("rp-message")
        pair.wait_paused()
        pair.recover_and_finish()


def test_source_sends(lab):
    """Huge pages on the channel for urgent ones, with the lock of the dirty bitmap, so that the background stops, too.
    Two fit into the sockets' buffers. A vCPU that sees first that it has moved waits for the others, missing none."""
    with Pair(lab, exits="on", backend="hugetlb", pattern="disjoint", memory_mb=64, mem=48) as pair:
        wire = pair.wire_of(ReadsNoUrgentPages, pair.listen())
        pair.postcopy(wire.uri, bandwidth=8 * MIB)
        pair.until_faults()
        pair.until_stuck()
        pair.source.cmd("migrate-pause")
        pair.source.wait_status("postcopy-paused")
        wire.cut()
        pair.wait_paused()
        pair.recover_and_finish()
