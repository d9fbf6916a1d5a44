# SPDX-License-Identifier: GPL-2.0-or-later
"""A proxy between source and destination that can be slow, break, and send wrong data.

It runs in the test's process. The source, in L1, connects to the host; from there the data go through
L1's port forwarding to the destination.
"""
import contextlib
import ctypes
import itertools
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import Any

# Flags of a page's header, migration/ram.c
ZERO, PAGE, EOS, CONTINUE = 0x02, 0x08, 0x10, 0x20
PAGE_SIZE = 4096
CHUNK = 16 << 10
GRACE_S = 1
SO_ATTACH_FILTER, BPF_RET = 26, 6

MAIN, URGENT = 0, 1  # the order in which the source connects

# From migration/savevm.c: sections of the stream, and MIG_CMD_PACKAGED with the 4 bytes of a length
# below 16 MiB. The packaged device state is followed by pages.
VM_EOF, VM_SECTION_PART, VM_SECTION_END, VM_COMMAND = 0x00, 0x02, 0x03, 0x08
PACKAGE = b"\x08\x00\x07\x00\x04\x00"
PACKAGE_LENGTH = 3
LISTEN = b"\x08\x00\x04\x00\x00"
SECTION_ID, FOOTER = 4, 5
REQUEST = 3     # MIG_RP_MSG_REQ_PAGES_ID: offset, length, name of the RAMBlock
END_OF_PAGES = EOS.to_bytes(8, "big")

# Socket.sendall
Send = Callable[[bytes], None]
# Carries a channel from one socket to the other, until either ends.
Copy = Callable[[socket.socket, socket.socket], None]


@dataclass
class Page:
    address: int
    name: bytes
    body: bytes

    def pack(self) -> bytes:
        """The page with the name of its RAMBlock in any case."""
        flags = PAGE if len(self.body) > 1 else ZERO
        return ((self.address | flags).to_bytes(8, "big")
                + bytes([len(self.name)]) + self.name + self.body)


class Close(Exception):
    """Ends this channel: raised by a Lie, and where a stream ends within a part."""


def exactly(stream: BufferedReader, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise Close
    return data


class Pages:
    """The data of a channel: Pages, and all else as bytes."""

    def __init__(self, stream: BufferedReader) -> None:
        self.stream = stream
        self.name = b""

    def all(self, ends: bool = False) -> Iterator[Page | bytes]:
        """The data of the preempt channel, only pages; ends: stops at the end of a section's pages."""
        while self.stream.peek(1):
            head = exactly(self.stream, 8)
            address = int.from_bytes(head, "big")
            if address & EOS:
                yield head
                if ends:
                    return
                continue
            if not address & CONTINUE:
                self.name = exactly(self.stream, exactly(self.stream, 1)[0])
            yield Page(address & -PAGE_SIZE, self.name, exactly(self.stream, PAGE_SIZE if address & PAGE else 1))

    def after_the_package(self) -> Iterator[Page | bytes]:
        while kind := self.stream.read(1):
            if kind[0] in (VM_SECTION_PART, VM_SECTION_END):
                yield kind + self.stream.read(SECTION_ID)
                yield from self.all(ends=True)
                yield self.stream.read(FOOTER)
            elif kind[0] == VM_COMMAND:
                head = self.stream.read(4)
                yield kind + head + self.stream.read(int.from_bytes(head[2:], "big"))
            else:
                assert kind[0] == VM_EOF, f"section {kind[0]}"
                yield kind


def package_of(stream: BufferedReader, send: Send) -> bytes | None:
    """Send the data up to the length of the packaged device state. Returns that state, or None if the
    stream ends before."""
    seen = b""
    while PACKAGE not in seen:
        if not (data := stream.peek()):
            return None
        seen = seen[1 - len(PACKAGE):]
        at = (seen + data).find(PACKAGE)
        data = stream.read(len(data) if at < 0 else at + len(PACKAGE) - len(seen))
        send(data)
        seen += data
    return stream.read(int.from_bytes(stream.read(PACKAGE_LENGTH), "big"))


def pack(package: bytes) -> bytes:
    """The package, after its length."""
    return len(package).to_bytes(PACKAGE_LENGTH, "big") + package


class Wire:
    """to: port of the destination on the host; rate: bytes per second of each channel;
    stop_after: end the main channel after so many bytes; lie: a Lie, which replaces data of the channel `lying`, on
    MAIN those of post-copy; refused: a channel that the destination never sees."""

    def __init__(self, to: int, rate: float | None = None, stop_after: int | None = None,
                 lie: "Lie | None" = None, lying: int = URGENT, refused: int | None = None) -> None:
        self.to = to
        self.rate = rate
        self.stop_after = stop_after
        self.lie = lie
        self.lying = lying
        self.refused = refused
        self.channels: list[tuple[socket.socket, socket.socket]] = []
        self.stopped = False
        self.swallows = False   # drop the source's data from here on
        self._passes = threading.Event()
        self._passes.set()
        self.is_cut = False
        self.kept: bytearray | None = None  # the main channel's data, if they are kept
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.uri = ""   # for the source, set by a pair
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for channel in itertools.count():
                source, _ = self.listening.accept()
                if channel == self.refused:
                    self.channels.append((source, source))
                    continue
                destination = socket.create_connection(("127.0.0.1", self.to))
                self.channels.append((source, destination))
                threading.Thread(target=self._channel, args=(self._forward(channel), source, destination),
                                 daemon=True).start()

    def _forward(self, channel: int) -> Copy:
        """The function that carries a channel from the source to the destination."""
        if not self.lie or channel != self.lying:
            return self._copy
        return self._main if channel == MAIN else self._urgent

    def _channel(self, forward: Copy, source: socket.socket, destination: socket.socket) -> None:
        ended = threading.Event()

        def run(fn: Copy, a: socket.socket, b: socket.socket) -> None:
            try:
                with contextlib.suppress(OSError, Close):
                    fn(a, b)
            finally:
                ended.set()

        ways = [threading.Thread(target=run, args=way, daemon=True)
                for way in ((forward, source, destination), (self._back, destination, source))]
        for way in ways:
            way.start()
        ended.wait()
        # Data in flight in the other direction may arrive, unless the channel was cut.
        for way in ways:
            way.join(0 if self.is_cut else GRACE_S)
        self.abort(source, destination)
        for way in ways:
            way.join()
        source.close()
        destination.close()

    @staticmethod
    def abort(source: socket.socket, destination: socket.socket) -> None:
        """Wake threads that wait for these sockets. Closing them resets the source's connection, as if the machine had
        died: L1's network would not notify the source of a destination that has stopped reading."""
        with contextlib.suppress(OSError):
            source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            source.shutdown(socket.SHUT_RD)
        with contextlib.suppress(OSError):
            destination.shutdown(socket.SHUT_RDWR)

    def _back(self, a: socket.socket, b: socket.socket) -> None:
        if not self.lie:
            while data := a.recv(CHUNK):
                self._passes.wait()
                b.sendall(data)
            return
        with a.makefile("rb") as stream:
            while head := stream.read(4):
                body = exactly(stream, int.from_bytes(head[2:], "big"))
                if int.from_bytes(head[:2], "big") == REQUEST:
                    self.lie.asked.add((body[13:13 + body[12]], int.from_bytes(body[:8], "big")))
                b.sendall(head + body)

    def _copy(self, a: socket.socket, b: socket.socket) -> None:
        left = self.stop_after
        while data := a.recv(CHUNK if left is None else min(left, CHUNK)):
            self._passes.wait()
            if not self.swallows:
                b.sendall(data)
            if self.rate:
                time.sleep(len(data) / self.rate)
            if left is not None:
                left -= len(data)
                if not left:
                    self.stopped = True
                    break

    def _urgent(self, a: socket.socket, b: socket.socket) -> None:
        with a.makefile("rb") as stream:
            self._send(Pages(stream).all(), b.sendall)

    def _main(self, a: socket.socket, b: socket.socket) -> None:
        def send(data: bytes) -> None:
            if self.kept is not None:
                self.kept += data
            b.sendall(data)

        with a.makefile("rb") as stream:
            if (package := package_of(stream, send)) is not None:
                self._send_package(self.lie.package(package) if self.lie else pack(package), send)
                self._send(Pages(stream).after_the_package(), send)

    def _send_package(self, package: bytes, send: Send) -> None:
        send(package)

    def _send(self, items: Iterable[Page | bytes], send: Send) -> None:
        assert self.lie
        n = 0
        for item in items:
            if isinstance(item, bytes):
                self.lie.pass_on(item, send)
            else:
                self.lie(n, item, send)
                n += 1

    def silence(self) -> None:
        """Pass nothing on, and keep the connections."""
        self._passes.clear()

    def black_hole(self) -> None:
        """Let the kernel drop all data before TCP acknowledges them. Only on this machine: the lab's network
        acknowledges by itself."""
        self.swallows = True
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(nothing))
        for one in itertools.chain(*self.channels):
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def cut(self) -> None:
        self.is_cut = True
        self.listening.close()
        for channel in self.channels:
            self.abort(*channel)
        self._passes.set()


class SlowWire(Wire):
    """Delays its data by delay_us in each direction."""

    def __init__(self, to: int, delay_us: int) -> None:
        self.delay_s = delay_us / 1e6
        super().__init__(to)

    def _copy(self, a: socket.socket, b: socket.socket) -> None:
        under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def arrive() -> None:
            with contextlib.suppress(OSError):
                while (arrival := under_way.get())[1]:
                    time.sleep(max(0, arrival[0] - time.monotonic()))
                    b.sendall(arrival[1])

        arriving = threading.Thread(target=arrive, daemon=True)
        arriving.start()
        try:
            while data := a.recv(CHUNK):
                under_way.put((time.monotonic() + self.delay_s, data))
        finally:
            under_way.put((0, b""))
            arriving.join()

    _back = _copy


class Lie:
    """Passes on all pages but one: number `at`, or the next one after it that has been requested."""

    def __init__(self, at: int = 20) -> None:
        self.at = at
        self.page: Any = None                           # the Page that it has not passed on
        self.asked: set[tuple[bytes, int]] = set()      # name of the RAMBlock, offset

    def __call__(self, n: int, page: Page, send: Send) -> None:
        """n: number of the page."""
        if not self.page and n >= self.at and (page.name, page.address) in self.asked:
            self.page = page
            self.change(page, send)
        else:
            send(page.pack())

    def change(self, page: Page, send: Send) -> None:
        """Send other data in place of the page: here none."""

    def pass_on(self, data: bytes, send: Send) -> None:
        """Send data that are no page."""
        send(data)

    def package(self, package: bytes) -> bytes:
        """The data to send in place of the packaged device state, with its length."""
        return pack(package)


class Outside(Lie):
    def change(self, page: Page, send: Send) -> None:
        send(replace(page, address=1 << 40).pack())


class Short(Lie):
    def change(self, page: Page, send: Send) -> None:
        send(page.pack()[:100])
        raise Close


class Within(Lie):
    """Stops at the page of that number, maybe within a huge page, until a page is requested; then ends the channel."""

    def __call__(self, n: int, page: Page, send: Send) -> None:
        if n < self.at:
            send(page.pack())
            return
        while not self.asked:
            time.sleep(0.01)
        raise Close


class Nothing(Lie):
    def __call__(self, n: int, page: Page, send: Send) -> None:
        pass


class Endless(Lie):
    """Passes on all pages, and no end."""

    def __call__(self, n: int, page: Page, send: Send) -> None:
        send(page.pack())

    def pass_on(self, data: bytes, send: Send) -> None:
        if data != bytes([VM_EOF]):
            send(data)


class Block(Lie):
    """Passes on no page of this RAMBlock."""

    def __init__(self, name: bytes) -> None:
        super().__init__()
        self.name = name

    def __call__(self, n: int, page: Page, send: Send) -> None:
        if page.name != self.name:
            send(page.pack())


class End(Lie):
    """Announces that no page will follow, though pages do."""

    def change(self, page: Page, send: Send) -> None:
        send(END_OF_PAGES)


class Says(Lie):
    """For a main channel: inserts `what` before a section of post-copy, once it is set."""

    what = b""

    def __call__(self, n: int, page: Page, send: Send) -> None:
        send(page.pack())

    def pass_on(self, data: bytes, send: Send) -> None:
        if self.what and data[0] == VM_SECTION_PART:
            send(self.what)
            self.what = b""
        send(data)


class InPackage(Nothing):
    """Inserts `what` into the package, behind LISTEN if the listen thread is to read, too; then sends `behind`."""

    def __init__(self, what: bytes, listening: bool = True, behind: bytes = b"") -> None:
        super().__init__()
        self.what = what
        self.listening = listening
        self.behind = behind

    def package(self, package: bytes) -> bytes:
        at = package.index(LISTEN) + self.listening * len(LISTEN)
        return pack(package[:at] + self.what + package[at:]) + self.behind


class SamePart(Lie):
    """Sends one part of a huge page in place of each part."""

    SIZE = 2 << 20

    def __call__(self, n: int, page: Page, send: Send) -> None:
        if not self.page and n >= self.at and page.address % self.SIZE == 0:
            self.page = page
        if self.page and page.address // self.SIZE == self.page.address // self.SIZE:
            page = self.page
        send(page.pack())


class Twice(Lie):
    """Sends a page again, at once, and later with other contents."""

    def __call__(self, n: int, page: Page, send: Send) -> None:
        super().__call__(n, page, send)
        if self.page and n == self.at + 100:
            send(replace(self.page, body=b"\xee" * PAGE_SIZE).pack())

    def change(self, page: Page, send: Send) -> None:
        send(page.pack())
        send(page.pack())


class Unheard(Wire):
    """Withholds the destination's data until heard is set."""

    def __init__(self, to: int) -> None:
        self.heard = threading.Event()
        super().__init__(to)

    def _back(self, a: socket.socket, b: socket.socket) -> None:
        self.heard.wait()
        super()._back(a, b)
