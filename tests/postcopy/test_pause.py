# SPDX-License-Identifier: GPL-2.0-or-later
"""migrate-pause interrupts a thread that sends to a peer that does not read, whatever lock the thread holds."""
import time

from tests.lab.pair import INJECT, MIB, Pair
from tests.lab.proxy import URGENT, Wire


class ReadsNoUrgentPages(Wire):
    """Reads nothing on the source's first preempt channel."""

    def _forward(self, channel):
        return self._nothing if channel == URGENT else self._copy

    def _nothing(self, a, b):
        while not self.is_cut:
            time.sleep(0.1)


def test_destination_sends(lab):
    """The destination sends page requests, with the lock of the return path."""
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
    """The source sends huge pages on the preempt channel, with the lock of the dirty bitmap, so that the background
    stops, too. Two fit into the sockets' buffers. A vCPU that moves first waits for the others, and misses no page."""
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
