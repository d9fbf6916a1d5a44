# SPDX-License-Identifier: GPL-2.0-or-later
"""A destination that misses a page while QEMU's main thread loads the devices."""
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.lab.host import Place
from tests.lab.pair import NO_FIRST, Pair, Side, until
from tests.lab.proxy import MAIN, URGENT, Lie, Wire

SLOT, IO = 5, 0xc000
QUEUE_PAGES = 8     # pages, at most


def set_queue(side: Side, page: int) -> None:
    """Put virtio-rng's queue at this page, by its legacy interface."""
    for register, value in (0x10, IO), (0x04, 0x7):     # BAR 0; input and output, memory, bus master
        side.hmp(f"o/w 0xcf8 {1 << 31 | SLOT << 11 | register:#x}")
        side.hmp(f"o/w 0xcfc {value:#x}")
    side.hmp(f"o/h {IO + 14:#x} 0")
    side.hmp(f"o/w {IO + 8:#x} {page:#x}")


@contextlib.contextmanager
def loading(lab: Place, lie: Lie, lying: int = MAIN, until_waits: bool = True, capabilities: Sequence[str] = (),
            mem: int = 16, source_options: Sequence[str] = (), **options: Any) -> Iterator[tuple[Pair, Wire]]:
    """A pair whose destination's main thread waits for a page of virtio's ring."""
    words = ("-device", f"virtio-rng-pci,addr={SLOT:#x},disable-modern=on")
    if lying == URGENT:
        # The background, on the other channel, would begin with the ring.
        source_options = (*source_options, *NO_FIRST)
    with Pair(lab, capabilities=capabilities, mem=mem, zero=0, both_options=words, source_options=source_options,
              **options) as pair:
        pair.source.wait_event("ready")
        # The guest writes this memory all the time, and pre-copy sends its end last: it is missing.
        boot = pair.source.report().the("boot")
        set_queue(pair.source, (boot["test_address"] >> 12) + boot["test_pages"] - QUEUE_PAGES)
        wire = pair.wire(pair.listen(), lie=lie, lying=lying)
        pair.postcopy(wire.uri, bandwidth=64 << 10)
        if until_waits:
            until(pair.destination.main_thread_waits, "the main thread waits for a page")
        yield pair, wire
