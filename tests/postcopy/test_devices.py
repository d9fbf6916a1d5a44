# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy while QEMU's main thread loads devices, which need the guest's memory."""
import contextlib
from dataclasses import replace

import pytest

from tests.lab import peer
from tests.lab.faults import Ended, Faults
from tests.lab.pair import FORK, STOCK, Pair, until
from tests.lab.wire import MAIN, URGENT, Nothing

SLOT, IO = 5, 0xc000
QUEUE_PAGES = 8     # at most


def set_queue(side, page):
    """Let virtio-rng have its queue there, by its legacy interface."""
    for register, value in (0x10, IO), (0x04, 0x7):     # BAR 0; input and output, memory, bus master
        side.hmp(f"o/w 0xcf8 {1 << 31 | SLOT << 11 | register:#x}")
        side.hmp(f"o/w 0xcfc {value:#x}")
    side.hmp(f"o/h {IO + 14:#x} 0")
    side.hmp(f"o/w {IO + 8:#x} {page:#x}")


@pytest.mark.parametrize("end, channels, destination", [
    ("killed", "one-channel", FORK),
    pytest.param("reset", "preempt", FORK, marks=pytest.mark.slow),
    pytest.param("reset", "one-channel", FORK, marks=pytest.mark.slow),
    pytest.param("killed", "preempt", FORK, marks=pytest.mark.slow),
    # What is expected.
    pytest.param("killed", "one-channel", STOCK, marks=pytest.mark.slow),
])
def test_source_ends_while_devices_are_loaded(lab, end, channels, destination):
    """virtio reads its ring, which has not come and will not come: the destination ends."""
    ends(lab, end, channels, destination)


@pytest.mark.slow
def test_both_threads_exit(lab):
    """One of the two threads that find an error waits for the other in exit(), from glibc 2.41 on."""
    peer.put(lab)
    for _ in range(10):
        ends(lab, "killed", "one-channel", FORK, wrapper=peer.LIBRARIES)


class BadAtLast(Nothing):
    """No page, until it is told to send one that is nowhere."""

    bad = False

    def __call__(self, n, page, send):
        if self.bad:
            send(replace(page, address=1 << 40).pack())


def test_error_while_devices_are_loaded(lab):
    """One that is not the connection's, in the thread that receives memory: the guest has not run there, and goes on
    on the source by itself, though the main thread has read its ring as zeros by then."""
    lie = BadAtLast()
    with loading(lab, FORK, lie) as (pair, _):
        lie.bad = True
        until(lambda: not pair.destination.job.running, "the destination ends")
        assert "has failed while the devices were loaded" in pair.destination.job.output
        pair.source.wait_status("failed")
        until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on")
        assert Faults(pair).ended() == Ended.SOURCE


def ends(lab, end, channels, destination, wrapper=()):
    capabilities, lying = {"preempt": (("postcopy-preempt",), URGENT), "one-channel": ((), MAIN)}[channels]
    with loading(lab, destination, Nothing(), capabilities, lying, wrapper) as (pair, wire):
        if end == "killed":
            pair.source.signal("KILL")
        else:
            wire.cut()
        until(lambda: not pair.destination.job.running, "the destination ends", timeout=20)
        assert pair.destination.job.wait().rc == 1
        assert "load of migration failed" in pair.destination.job.output \
            or "loadvm failed" in pair.destination.job.output


@contextlib.contextmanager
def loading(lab, destination, lie, capabilities=(), lying=MAIN, wrapper=()):
    """The destination's main thread waits for a page of virtio's ring."""
    words = ("-device", f"virtio-rng-pci,addr={SLOT:#x},disable-modern=on")
    with Pair(lab, capabilities=capabilities, destination=destination, mem=16, zero=0,
              source_options=words, destination_options=words, wrapper=wrapper) as pair:
        pair.source.wait_event("ready")
        # This memory is written without end, and its end comes last in pre-copy: it is missing.
        boot = pair.source.report().the("boot")
        set_queue(pair.source, (boot["test_address"] >> 12) + boot["test_pages"] - QUEUE_PAGES)
        wire = pair.wire(pair.listen(), lie=lie, lying=lying)
        pair.postcopy(wire.uri, bandwidth=64 << 10)
        until(pair.destination.main_thread_waits, "the main thread waits for a page")
        yield pair, wire
