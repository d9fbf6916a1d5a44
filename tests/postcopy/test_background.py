# SPDX-License-Identifier: GPL-2.0-or-later
"""The background: it does not delay requested pages, and it begins with pages that vCPUs must touch first."""
import statistics
import time

import pytest

from tests.lab.arches import listed
from tests.lab.backends import CHANNELS
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import MIB, NO_WINDOW, STOCK, Pair, until
from tests.lab.proxy import MAIN, PAGE_SIZE, Lie, Page, pack
from tests.lab.text import search

# The rate of the wire. The source's processor can send more: pages before a requested one on the wire are a queue.
RATE = 16 * MIB
HUGE = 2 * MIB
PC_ROM = 0xc0000    # address of the RAMBlock pc.rom


def migrated(place, **options):
    """Both sides' query-migrate after a migration by one connection, with an unlimited background."""
    with Pair(place, capabilities=(), cpus=1, memory_mb=64, **options) as pair:
        pair.postcopy(pair.wire(pair.listen(), rate=RATE).uri, bandwidth=0)
        pair.finish()
        return [side.cmd("query-migrate") for side in pair.sides]


def test_requests_pass(place):
    """A requested page waits for all data before it on the wire."""
    source, destination = migrated(place, source_options=NO_WINDOW)
    assert "postcopy-window" not in source
    without_ms = destination["postcopy-latency"] / 1e6
    source, destination = migrated(place)
    with_ms = destination["postcopy-latency"] / 1e6
    assert with_ms < without_ms / 2, (source["postcopy-window"], destination["postcopy-latency-dist"])


def test_stock_answers(place):
    """A destination without the branch answers PINGs as well."""
    window = migrated(place, destination=STOCK)[0]["postcopy-window"]
    assert window["delay"] > 0, window


def around(place, channels, rate=None):
    """How many pages went together, for each request; pages that the preempt channel sent without a request; by how
    many calls of the kernel the destination has placed how many pages."""
    urgent = Order()
    with Pair(place, memory_mb=160, mem=128, **CHANNELS[channels]) as pair:
        wire = pair.wire(pair.listen(), rate=rate, lie=urgent if channels == "preempt" else None)
        pair.postcopy(wire.uri, bandwidth=0)
        pair.finish()
        together = [int(text) for name, text in pair.source.trace() if name == "postcopy_along"]
        faults = pair.faults()
    assert channels != "preempt" or urgent.pages
    return (together, set(urgent.pages) - urgent.asked,
            faults["wakes"] + faults["wakes-saved"], (faults["copied-bytes"] + faults["zero-bytes"]) // PAGE_SIZE)


@pytest.mark.parametrize("channels", listed("preempt", "one-channel", "fetch", quick=["preempt"]))
def test_pages_around_a_requested_one(place, channels):
    """Pages go along if a request would take longer, and adjacent pages are placed together."""
    together, unasked, calls, pages = around(place, channels)
    # The number of calls depends on the scheduler; page by page, it would be the number of pages
    assert 1 < max(together) <= 32 and calls < pages
    # When the stream ends, the destination only reads requested pages from that channel: these pages would be lost.
    assert not unasked
    if channels == "preempt":
        slow = around(place, channels, RATE)[0]
        assert statistics.mean(slow) < statistics.mean(together), (slow, together)


class Order(Lie):
    """Passes on all pages, and keeps their order."""

    def __init__(self):
        super().__init__()
        self.pages = []

    def __call__(self, n, page, send):
        self.pages.append((page.name, page.address))
        send(page.pack())

    def package(self, package):
        self.pages.clear()
        # The source's next pages are in flight before the guest can request them
        time.sleep(1)
        return pack(package)


class SmallFirst(Lie):
    """Sends a small page right before the first huge one, in one piece, so that a buffer holds more than that page."""

    def __init__(self, small):
        super().__init__()
        self.held = small.pack()
        self.sent = False

    def __call__(self, n, page, send):
        if self.sent:
            send(page.pack())
            return
        self.held += page.pack()
        if page.address % HUGE == HUGE - PAGE_SIZE:
            self.sent = True
            send(self.held)


@pytest.mark.slow
def test_small_page_before_a_huge_one(lab):
    """The small page is placed, though no page of its run follows: on the preempt channel no section ends."""
    with Pair(lab, backend="hugetlb", memory_mb=64, mem=48, pattern="samehuge", late_rom=1) as pair:
        pair.source.wait_ready()
        lie = SmallFirst(Page(0, b"pc.rom", pair.source.memory(PC_ROM, PAGE_SIZE)))
        pair.postcopy(pair.wire(pair.listen(), lie=lie).uri, bandwidth=64 << 10)
        until(lambda: lie.sent, "a huge page goes by the preempt channel")
        pair.destination.wait_event("moved")
        time.sleep(1)
        pair.destination.memory(PC_ROM, PAGE_SIZE)
        missed = [text for name, text in pair.destination.trace() if name == "postcopy_fault_uffd"]
        assert not any(text.startswith("pc.rom 0x0 ") for text in missed), missed
        pair.finish_fast()


def bound_to_be_touched(source, cpu):
    """Guest physical pages of a vCPU's registers and tables, by the monitor."""
    def ask(line):
        return source.cmd("human-monitor-command", command_line=line, cpu_index=cpu)

    registers = ask("info registers")
    found = {"CR3": int(search(r"CR3=(\w+)", registers)[1], 16)}
    for name in ("RIP=", "RSP=", "TR =\\w+ ", "GDT= +", "IDT= +"):
        address = search(name + r"(\w+)", registers)[1]
        found[name[:3]] = int(search(r"gpa: 0x(\w+)", ask(f"gva2gpa 0x{address}"))[1], 16)
    return {(cpu, name): address & -PAGE_SIZE for name, address in found.items()}


def test_begins_with_what_vcpus_touch(place):
    """Before the migration, none of 40,000 pages has been sent."""
    order = Order()
    with LinuxPair(place, cpus=2) as pair:
        pair.postcopy(pair.wire(pair.listen(), lie=order, lying=MAIN).uri, bandwidth=0)
        wanted = bound_to_be_touched(pair.source, 0) | bound_to_be_touched(pair.source, 1)
        pair.finish()
    # 64 pages per vCPU, as many that all vCPUs share, and 129 of 64 queues
    first = {address for name, address in order.pages[:64 * 2 * 2 + 129] if name == b"pc.ram"}
    assert not {what: hex(address) for what, address in wanted.items() if address not in first}


JUDGED = 200    # requests: 64 of other pages are enough


def before_others(place, **load):
    """How many pages precede half of the lowest hundred, where the background begins unless hot pages go first.

    Counts from the time on at which the guest has requested enough, and the background has no limit.
    """
    order = Order()
    with Pair(place, memory_mb=96, mem=64, **load) as pair:
        pair.postcopy(pair.wire(pair.listen(), lie=order, lying=MAIN).uri, bandwidth=64 << 10)
        pair.until_faults()
        pair.until_requests(JUDGED)
        begin = len(order.pages)
        pair.finish_fast()
    addresses = [address for name, address in order.pages[begin:] if name == b"pc.ram"]
    lowest = set(sorted(addresses)[:100])
    return statistics.median(n for n, address in enumerate(addresses) if address in lowest)


def test_hot_pages_first(place):
    """The background sends the pages written last first, unless the guest requests other ones."""
    # This guest continues with an eighth, which it wrote last
    wanted = before_others(place, pattern="hot")
    # This guest wrote a tenth, and needs the zero pages as much
    unwanted = before_others(place, pattern="zerowrite", zero=90)
    assert wanted > 10 * unwanted
