# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy by fetch channels, and their failures."""
import re
import socket
import struct
import threading
import time
from array import array
from dataclasses import replace

import pytest

from tests.lab import tls
from tests.lab.arches import both_interfaces, listed, on_both
from tests.lab.backends import guest_on
from tests.lab.fetch_proxy import END, HEADER, HELLO_SIZE, PAGES, PING, REQUEST, FetchWire, frames
from tests.lab.pair import FORK, MIB, NO_WINDOW, STOCK, Pair, listens, until
from tests.lab.proxy import MAIN, PAGE_SIZE, Close, Wire
from tests.postcopy.steps import assert_refused

slow = pytest.mark.slow
# From migration/savevm.c: commands, with the length of their data; and the first section of memory
MAIN_PING = b"\x08\x00\x02\x00\x04"
SWITCHOVER_START = b"\x08\x00\x0b\x00\x00"
RAM_PART = b"\x02\x00\x00\x00\x01"


def channels(side):
    return side.cmd("query-migrate")["postcopy-fetch"]["channels"]


class Requests(FetchWire):
    """Passes on requests one by one, each with its number on the channel."""

    def _back(self, a, b):
        if (a, b) == self.channels[MAIN][::-1]:
            super()._back(a, b)
            return
        with a.makefile("rb") as stream:
            b.sendall(stream.read(HELLO_SIZE))
            number = 0
            while len(head := stream.read(HEADER.size)) == HEADER.size:
                self.request(number, head + stream.read(head[1]), b.sendall)
                number += 1

    def request(self, number, data, send):
        send(data)


def assert_same(source, destination, unread=0.5):
    """Both sides count the same. But a source that has sent all memory reads no more requests: their pages had been
    sent before. They are at most the part `unread` of all requests."""
    sent, read = (sum(c["requests"] for c in counts) for counts in (destination, source))
    assert all(there["requests"] <= here["requests"] for there, here in zip(source, destination, strict=True))
    assert sent - read <= unread * sent
    assert [there | {"requests": 0} for there in source] == [here | {"requests": 0} for here in destination]


def wire(pair, kind=FetchWire, command="migrate-incoming", **options):
    return pair.wire_of(kind, pair.listen(command), **options)


@both_interfaces
@on_both("backend, exits, n", listed(
    ("anonymous", "on", 4), ("hugetlb", "on", 2),
    ("anonymous", "on", 1), ("anonymous", "off", 16), ("memfd", "on", 16), ("memfd", "off", 1),
    ("hugetlb", "on", 1), ("hugetlb", "off", 16), ("hugetlb-private", "on", 16), ("hugetlb-private", "off", 1),
    quick=[("anonymous", "on", 4), ("hugetlb", "on", 2)]))
def test_fetch(place, backend, exits, n):
    """All requests use the channels, and both sides count the same. vCPUs miss so many pages at a time that two
    channels are in use."""
    with Pair(place, exits=exits, fetch=n, **guest_on(backend, "sequential") | {"cpus": 8}) as pair:
        pair.postcopy(bandwidth=64 * MIB if "hugetlb" in backend else MIB)
        pair.finish()
        there, here = channels(pair.source), channels(pair.destination)
        assert len(there) == len(here) == n
        assert_same(there, here)
        faults = pair.faults()
        assert sum(c["requests"] for c in here) >= faults["requests"]
        assert faults["duplicates"] == 0
        # For every four outstanding pages, QEMU uses one more channel, except the last one; a page's address selects
        # its channel.
        assert "hugetlb" in backend or sum(c["requests"] > 0 for c in here) >= min(max(n - 1, 1), 2)
        assert n == 1 or here[-1]["requests"] == 0
        assert f"channel {n - 1}: requests {here[-1]['requests']}, " in pair.destination.hmp("info migrate")


@on_both("exits", ["on", pytest.param("off", marks=slow)], quick=[])
def test_last_requests_are_not_read(place, exits):
    """The background sends the requested pages like all others: nothing waits for an answer."""
    class Holds(Requests):
        """Withholds all requests but the first one of each channel."""

        def request(self, number, data, send):
            if number:
                self.stopped = True
            else:
                send(data)

    with Pair(place, exits=exits, fetch=2, pattern="disjoint", mem=8) as pair:
        between = wire(pair, Holds)
        pair.postcopy(between.uri, bandwidth=64 << 10)
        until(lambda: between.stopped, "a request that is kept back")
        pair.finish_fast()
        there, here = channels(pair.source), channels(pair.destination)
        assert there != here
        assert_same(there, here, unread=1)


@on_both("exits", ["on", pytest.param("off", marks=slow)], quick=[])
def test_few_pages(lab, exits):
    """While few pages are outstanding, one channel does all the work."""
    with Pair(lab, exits=exits, fetch=4, cpus=1, pattern="disjoint", mem=8) as pair:
        pair.midst(bandwidth=64 << 10)
        before, requests = channels(pair.destination), pair.faults()["requests"]
        until(lambda: pair.faults()["requests"] > requests + 100, "requests")
        after = channels(pair.destination)
        first, *others = ({key: a[key] - b[key] for key in a} for a, b in zip(after, before, strict=True))
        assert first["pages"] > 50
        assert sum(c["requests"] for c in others) <= first["requests"] / 20
        pair.finish_fast()


@slow
def test_release_ram(lab):
    """The source discards pages that it has sent or that were clean at the switch, once post-copy is active."""
    options = ("-trace", "ram_discard_range", "-trace", "migrate_set_state")
    with Pair(lab, exits="on", fetch=4, capabilities=("release-ram",), pattern="shared", mem=16,
              source_options=options) as pair:
        pair.postcopy()
        pair.finish()
        before, freed = lab.read_file(pair.source.trace_log).decode().split("new state postcopy-active")
        assert "ram_discard_range" not in before
        # Pieces of more than a page: those sent by pre-copy
        assert any(int(length, 16) > 4096 for length in re.findall(r"ram_discard_range .* (\w+)\n", freed))


REFUSED = {
    "other-number": (FORK, FORK, (4, 2), "takes 2"),
    "none-here": (FORK, FORK, (4, 0), "takes 0"),
    "none-there": (FORK, FORK, (0, 4), "the source has none"),
    "fork-to-stock": (FORK, STOCK, (4, 0), "takes 0"),
    "stock-to-fork": (STOCK, FORK, (0, 4), "the source has none"),
}


@pytest.mark.parametrize("ways", listed(*REFUSED, quick=["other-number", "fork-to-stock"]))
def test_refused(place, ways):
    """The migration fails before the source gives anything up: the guest resumes on the source, with one error line,
    and never runs on the destination, which would have all of it soon."""
    source, destination, fetch, says = REFUSED[ways]
    with Pair(place, source=source, destination=destination, machine="pc-i440fx-10.0", fetch=fetch, mem=8) as pair:
        uri = pair.listen()
        pair.source.wait_ready()
        pair.source.cmd("migrate", uri=uri)
        pair.source.wait_status("failed")
        assert pair.source.cmd("query-status")["status"] == "running"
        assert pair.destination.job.wait(20).rc == 1
        assert not pair.destination.reported(), "the guest has run on the destination, too"
        if fetch[0]:
            assert re.search(f"postcopy-fetch-channels is 4 here.* {says}",
                             pair.source.cmd("query-migrate")["error-desc"])
        else:
            pair.destination.wait_says(f"postcopy-fetch-channels is 4 here, and {says}")


def test_cannot_change(place):
    """The number cannot change after a migration has begun, or the destination listens; invalid values are refused.
    Other capabilities than postcopy-preempt can be set."""
    with Pair(place, fetch=2, mem=8) as pair:
        pair.listen()
        pair.destination.set_capabilities("events")
        for value, says in ((3, "before the migration begins"), ("auto", "before the migration begins"),
                            (17, "'auto' or a value between 0 and 16")):
            assert_refused(pair.destination, says, "migrate-set-parameters", postcopy_fetch_channels=value)


@slow
@pytest.mark.parametrize("fetch", [0, 2])
def test_cannot_change_while_nobody_listens(place, fetch):
    with Pair(place, fetch=fetch, pattern="shared", mem=16) as pair:
        pair.midst()
        pair.pause()
        assert_refused(pair.destination, "No such file", "migrate-recover", uri="unix:/no/such/directory/socket")
        assert_refused(pair.destination, "before the migration begins", "migrate-set-parameters",
                       postcopy_fetch_channels=4)
        pair.recover_and_finish()


@both_interfaces
@on_both("trouble", listed("one-channel", "cut", "pause-source", "pause-destination", quick=["one-channel"]))
def test_recovery(lab, trouble):
    with Pair(lab, exits="on", fetch=4, pattern="shared", mem=16) as pair:
        between = pair.wire(pair.listen())
        pair.midst(between.uri)
        if trouble == "cut":
            between.cut()
        elif trouble == "one-channel":
            between.abort(*between.channels[3])
        else:
            (pair.source if trouble == "pause-source" else pair.destination).cmd("migrate-pause")
        pair.wait_paused()
        counts = pair.until_all_wait()
        pair.recover()
        pair.until_requests(counts["requests"])
        pair.finish_fast()


def test_recovery_that_breaks(lab):
    """The connection breaks while channels are being opened; the next recovery opens them anew."""
    class Breaks(FetchWire):
        def _fetch(self, a, b):
            self.stopped = True
            raise Close

    with Pair(lab, exits="on", fetch=4, pattern="shared", mem=16) as pair:
        pair.midst()
        pair.pause()
        between = wire(pair, Breaks, "migrate-recover")
        pair.source.cmd("migrate", uri=between.uri, resume=True)
        until(lambda: between.stopped, "the channels break")
        pair.wait_paused()
        assert "0 of 4 fetch channels can be opened" in pair.source.cmd("query-migrate")["error-desc"]
        pair.recover_and_finish()


@pytest.mark.parametrize("end", listed("wait", "cancel", "cut", quick=["cut"]))
def test_no_answer(place, end):
    """The destination does not answer on one of a fixed number of channels: the guest resumes on the source."""
    with Pair(place, fetch=2, pattern="shared", mem=16) as pair:
        between = wire(pair, answers=1)
        pair.start(between.uri)
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: len(between.channels) >= 3, "the fetch channels")
        if end == "cancel":
            pair.source.cmd("migrate_cancel")
        elif end == "cut":
            between.cut()
        pair.source.wait_status("cancelled" if end == "cancel" else "failed")
        assert pair.source.cmd("query-status")["status"] == "running"
        if end == "wait":
            assert ("1 of 2 fetch channels can be opened: no answer within 10000 ms"
                    in pair.source.cmd("query-migrate")["error-desc"])


@pytest.mark.parametrize("fetch, cpus, n", [
    ("auto", 4, 2), ("auto", 8, 3), (("auto", 4), 1, 4), ((3, "auto"), 1, 3), (("auto", 0), 4, 0), ((0, "auto"), 4, 0)])
def test_agree(place, fetch, cpus, n):
    """Both sides agree on a number, which one side may have set. The capability postcopy-preempt, which libvirt sets,
    only has an effect without channels."""
    with Pair(place, fetch=fetch, cpus=cpus, mem=8) as pair:
        uri = pair.listen()
        between = pair.wire(uri)
        pair.postcopy(between.uri)
        # Once channels are open, the destination does not listen any more
        assert listens(pair.destination_lab, int(uri.rpartition(":")[2])) == (n == 0)
        pair.finish_fast()
        assert pair.fetch_channels() == [n, n]
        assert len(between.channels) == 1 + (n or 1)


@pytest.mark.parametrize("answers, n, preempt", [(0, 0, ()), (1, 1, ("postcopy-preempt",))])
def test_fall_back(place, answers, n, preempt):
    """QEMU uses the answered channels, within about two seconds, in which the guest runs; zero channels work, too."""
    with Pair(place, fetch="auto", pattern="shared", mem=16, capabilities=preempt) as pair:
        between = wire(pair, answers=answers)
        pair.start(between.uri)
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=MIB)
        begun = time.monotonic()
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: len(between.channels) == 3, "the channels", pause=0.01)
        assert pair.source.cmd("query-status")["status"] == "running"
        pair.source.wait_status("postcopy-active")
        assert time.monotonic() - begun < 5
        pair.source.wait_says(f"{n} fetch channels in place of 2: no answer within 2000 ms")
        pair.finish_fast()
        assert pair.fetch_channels() == [n, n]
        assert pair.faults()["requests"]


def test_one_connection(place):
    """A relay that accepts only one connection: QEMU does not wait."""
    class Once(Wire):
        def _accept(self):
            source, _ = self.listening.accept()
            self.listening.close()
            self._channel(self._copy, source, socket.create_connection(("127.0.0.1", self.to)))

    with Pair(place, fetch="auto", mem=8, capabilities=()) as pair:
        pair.postcopy(wire(pair, Once).uri)
        pair.finish_fast()
        assert pair.fetch_channels() == [0, 0]
        pair.source.wait_says("0 fetch channels in place of 2: Failed to connect")


@slow
def test_recovery_with_fewer(lab):
    """Recoveries with fewer channels, none, and as many as before: waiting vCPUs get their pages in each way."""
    with Pair(lab, exits="on", fetch="auto", pattern="shared", mem=16) as pair:
        pair.midst(bandwidth=64 << 10)
        for answers, n in (1, 1), (0, 0), (2, 2):
            pair.pause()
            counts = pair.until_all_wait()
            between = wire(pair, command="migrate-recover", answers=answers)
            pair.source.cmd("migrate", uri=between.uri, resume=True)
            pair.wait_recovered()
            pair.until_requests(counts["requests"])
            assert pair.fetch_channels() == [n, n]
        pair.finish_fast()


def test_unrelated_client(place):
    """The destination refuses an unrelated client, whose hello is valid except for the migration's token."""
    with Pair(place, fetch="auto", mem=8) as pair:
        uri = pair.listen()
        pair.start(uri)
        with socket.create_connection(("127.0.0.1", pair.host_port_of(uri))) as client:
            client.sendall(struct.pack(">4sHH16s", b"QPFC", 6, 0, bytes(16)))
            assert not client.recv(1)
        pair.destination.wait_says("fetch channel 0 is of another migration")
        pair.source.cmd("migrate-start-postcopy")
        pair.finish_fast()
        assert pair.fetch_channels() == [2, 2]


def test_old_peer(place):
    """Stock QEMU gets the same stream as without channels, but for the value of the first PING. The test ignores
    sections of memory, whose sizes depend on time."""
    class Keeps(Wire):
        def _forward(self, channel):
            self.kept = bytearray()
            return self._main

    asked, parts, held = [], [], ("-S", "-rtc", "base=2026-01-01,clock=vm")
    for fetch in 0, "auto":
        with Pair(place, fetch=fetch, destination=STOCK, machine="pc-i440fx-10.0", mem=8, source_options=held,
                  destination_options=held, capabilities=()) as pair:
            between = pair.wire_of(Keeps, pair.listen())
            pair.source.cmd("migrate", uri=between.uri)
            pair.wait_completed()
            assert between.kept
            begin, _, rest = bytes(between.kept).partition(MAIN_PING)
            asked.append(rest[:4].hex())
            parts.append([begin, rest[4:rest.index(RAM_PART)], rest[rest.rindex(SWITCHOVER_START):]])
    assert asked == ["51468000", "51468002"]
    assert parts[0] == parts[1]
    sizes = [len(part) for part in parts[0]]
    assert all(size > least for size, least in zip(sizes, (20, 100, 10000), strict=True)), sizes


def test_encrypted(place):
    with Pair(place, fetch="auto", mem=16, pattern="shared", tls=tls.directory(place)) as pair:
        pair.midst()
        pair.pause()
        pair.recover_and_finish()
        assert pair.fetch_channels() == [2, 2]


class Lie(Requests):
    """Changes, or withholds, one frame of a requested page, the 20th frame or later, but none whose block name later
    frames refer to."""

    def __init__(self, to, change=lambda frame, send: None, **options):
        self.change = change
        self.asked = set()
        self.told = None
        super().__init__(to, **options)

    def request(self, number, data, send):
        self.asked.add(HEADER.unpack(data[:HEADER.size])[-1])
        send(data)

    def frame(self, frame, send):
        if not (self.told or frame.name) and self.passed > 20 and frame.type == PAGES and frame.offset in self.asked:
            self.told = frame
            self.change(frame, send)
        else:
            send(frame.pack())


def short(frame, send):
    send(frame.pack()[:100])
    raise Close


def twice(frame, send):
    send(frame.pack())
    send(replace(frame, name=b"", body=b"\xee" * frame.length).pack())


# The frame that is sent instead, and the destination's message.
LIES = {
    "outside": (lambda frame, send: send(replace(frame, offset=1 << 40).pack()), "invalid pages"),
    "part": (lambda frame, send: send(replace(frame, length=100).pack()), "invalid pages"),
    "no-block": (lambda frame, send: send(replace(frame, name=b"nothing").pack()), "no block 'nothing'"),
    "type": (lambda frame, send: send(replace(frame, type=9).pack()), "invalid frame of type 9"),
    "request": (lambda frame, send: send(replace(frame, type=REQUEST).pack()), "invalid frame of type 1"),
    "end": (lambda frame, send: send(replace(frame, type=END, name=b"", length=0, offset=0, body=b"").pack()),
            "behind the end"),
    "ping": (lambda frame, send: send(replace(frame, type=PING, body=b"").pack()), "a frame of type 5 with pages"),
    "short": (short, "paused"),
}


@pytest.mark.parametrize("lie, exits", [
    ("outside", "on"), *(pytest.param(lie, "off", marks=slow) for lie in LIES)])
def test_lie(place, lie, exits):
    change, says = LIES[lie]
    with Pair(place, exits=exits, fetch=1, pattern="shared", mem=16) as pair:
        pair.postcopy(wire(pair, Lie, change=change).uri, bandwidth=64 << 10)
        if lie == "end":
            # All vCPUs may wait for the page of the changed frame, so that no request causes another one.
            pair.fast()
        pair.wait_paused()
        pair.destination.wait_says(says)
        pair.recover_and_finish()


@slow
def test_twice(place):
    """The page is sent again with other contents, when the guest may have changed it."""
    with Pair(place, fetch=1, pattern="shared", mem=16) as pair:
        pair.postcopy(wire(pair, Lie, change=twice).uri)
        pair.until_faults()
        until(lambda: pair.faults()["duplicates"] == 1, "the page that comes once more")
        pair.finish_fast()
        assert pair.faults()["duplicates"] == 1


def test_withheld(lab):
    """All is sent, the channels have ended, and a page is missing: the message names it."""
    with Pair(lab, exits="on", fetch=2, pattern="shared", mem=16) as pair:
        between = wire(pair, Lie)
        pair.postcopy(between.uri)
        until(lambda: between.told, "the lie")
        pair.fast()
        pair.wait_paused()
        pair.destination.wait_says(f"without the page at offset 0x{between.told.offset:x}")
        pair.recover()
        pair.finish()


@slow
def test_silent_end(place):
    """All is sent and one channel does not end, as if a firewall had dropped it: QEMU reports that."""
    class Endless(FetchWire):
        def frame(self, frame, send):
            if frame.type != END:
                send(frame.pack())

    with Pair(place, fetch=2, pattern="shared", mem=16) as pair:
        pair.postcopy(wire(pair, Endless).uri, bandwidth=64 * MIB)
        pair.destination.wait_says("not all fetch channels")
        pair.destination.cmd("migrate-pause")
        pair.wait_paused()
        pair.recover_and_finish()


@pytest.mark.parametrize("exits, fetch", listed(("off", 0), ("off", 4), ("on", 4), quick=[]))
def test_hot_first(place, exits, fetch):
    """The pages that the guest wrote before it was stopped, an eighth of its memory, anywhere, are received first."""
    with Pair(place, exits=exits, fetch=fetch, pattern="hot", memory_mb=48, zero=0, traced=False,
              destination_options=["-S", "-trace", "postcopy_place", "-D", f"{place.tmp}/placed"]) as pair:
        pair.start()
        time.sleep(1)   # for the slowest guest to write all hot pages
        pair.source.cmd("migrate-start-postcopy")
        pair.wait_completed()
        boot = pair.source.report().the("boot")
        first, size = boot["test_address"], boot["test_pages"] * 4096
        # The lower half of a page's first word counts its touches
        touches = array("Q", pair.destination.memory(first, size))[::512]
        log = place.read_file(f"{place.tmp}/placed").decode()
        placed = [int(at, 16) + i * 4096 for at, pages in re.findall(r"postcopy_place \S*ram 0x(\w+) pages (\d+) ", log)
                  for i in range(int(pages))]
        hot = sorted(range(len(touches)), key=lambda page: touches[page] % (1 << 32))[-len(touches) // 8:]
        early = set(placed[:len(placed) // 4])
        assert sum(first + page * 4096 in early for page in hot) / len(hot) > 0.9


# The background

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
        pages, zeros, frames = ([c[key] for c in channels(pair.source)] for key in ("pages", "zero-pages", "frames"))
        assert sum(zeros) > 500 if zero else sum(pages) > 23 * MIB // 4096
        assert not frames.pop(0)
        assert all(frames)
        # The smallest slice has four pages
        assert sum(frames) < (sum(pages) + sum(zeros)) / 3
        assert frames == [c["frames"] for c in channels(pair.destination)][-len(frames):]
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
            # A page far from the background: a vCPU may need one in the blocked connection, and others wait for it.
            pair.destination.memory(120 * MIB, PAGE_SIZE)
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
