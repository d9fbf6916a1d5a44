# SPDX-License-Identifier: GPL-2.0-or-later
"""What lies between source and destination: a proxy that can be slow, break, and lie.

It runs in the test's process. The source, in L1, connects to the host; from there it goes through
L1's port forwarding to the destination.
"""
import contextlib
import itertools
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace

# Flags of a page's header, migration/ram.c
ZERO, PAGE, EOS, CONTINUE = 0x02, 0x08, 0x10, 0x20
PAGE_SIZE = 4096
CHUNK = 16 << 10
GRACE_S = 1
HOST = "10.0.2.2"  # the host, seen from L1

MAIN, URGENT = 0, 1  # the order in which the source connects


@dataclass
class Page:
    address: int
    name: bytes
    body: bytes

    def pack(self):
        """With the name of its RAMBlock in any case."""
        flags = PAGE if len(self.body) > 1 else ZERO
        return ((self.address | flags).to_bytes(8, "big")
                + bytes([len(self.name)]) + self.name + self.body)


class Close(Exception):
    """Raised by a lie: end this channel."""


def pages(stream):
    """The pages of the urgent channel, which carries nothing else but its end."""
    name = b""
    while head := stream.read(8):
        address = int.from_bytes(head, "big")
        if address & EOS:
            yield head
            continue
        if not address & CONTINUE:
            name = stream.read(stream.read(1)[0])
        yield Page(address & -PAGE_SIZE, name, stream.read(PAGE_SIZE if address & PAGE else 1))


class Wire:
    """to: port of the destination on the host; rate: bytes per second of each channel;
    stop_after: end the main channel after so many bytes; lie: a function of (number of the page,
    Page, send) that sends what it likes in place of the urgent pages."""

    def __init__(self, to, rate=None, stop_after=None, lie=None):
        self.to = to
        self.rate = rate
        self.stop_after = stop_after
        self.lie = lie
        self.channels = []
        self.stopped = False
        self.swallows = False   # what the source sends, from here on
        self.is_cut = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.uri = f"tcp:{HOST}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            for channel in itertools.count():
                source, _ = self._listening.accept()
                destination = socket.create_connection(("127.0.0.1", self.to))
                self.channels.append((source, destination))
                forward = self._urgent if self.lie and channel == URGENT else self._copy
                threading.Thread(target=self._channel, args=(forward, source, destination),
                                 daemon=True).start()

    def _channel(self, forward, source, destination):
        ended = threading.Event()
        ways = [threading.Thread(target=self._run, args=(fn, a, b, ended), daemon=True)
                for fn, a, b in ((forward, source, destination), (self._back, destination, source))]
        for way in ways:
            way.start()
        ended.wait()
        # What is under way in the other direction may arrive, unless the channel was cut.
        for way in ways:
            way.join(0 if self.is_cut else GRACE_S)
        self._abort(source, destination)
        for way in ways:
            way.join()
        source.close()
        destination.close()

    @staticmethod
    def _run(fn, a, b, ended):
        with contextlib.suppress(OSError, Close):
            fn(a, b)
        ended.set()

    @staticmethod
    def _abort(source, destination):
        """End what waits for these sockets. To the source, closing them is a reset, as of a machine
        that died: L1's network would not tell it of a destination that has stopped reading."""
        with contextlib.suppress(OSError):
            source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            source.shutdown(socket.SHUT_RD)
        with contextlib.suppress(OSError):
            destination.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _back(a, b):
        while data := a.recv(CHUNK):
            b.sendall(data)

    def _copy(self, a, b):
        left = self.stop_after
        while data := a.recv(CHUNK if left is None else min(left, CHUNK)):
            if not self.swallows:
                b.sendall(data)
            if self.rate:
                time.sleep(len(data) / self.rate)
            if left is not None:
                left -= len(data)
                if not left:
                    self.stopped = True
                    break

    def _urgent(self, a, b):
        n = 0
        with a.makefile("rb") as stream:
            for page in pages(stream):
                if isinstance(page, bytes):
                    b.sendall(page)
                else:
                    self.lie(n, page, b.sendall)
                    n += 1

    def cut(self):
        self.is_cut = True
        self._listening.close()
        for channel in self.channels:
            self._abort(*channel)


class Lie:
    """Says the truth but for one page, `at`."""

    def __init__(self, at=20):
        self.at = at
        self.page = None

    def __call__(self, n, page, send):
        if n == self.at:
            self.page = page
            self.change(page, send)
        else:
            send(page.pack())


class Outside(Lie):
    def change(self, page, send):
        send(replace(page, address=1 << 40).pack())


class Short(Lie):
    def change(self, page, send):
        send(page.pack()[:100])
        raise Close


class Never(Lie):
    def change(self, page, send):
        pass


class Twice(Lie):
    """Sends a page once more, at once and later, with other contents."""

    def __call__(self, n, page, send):
        super().__call__(n, page, send)
        if n == self.at + 100:
            send(replace(self.page, body=b"\xee" * PAGE_SIZE).pack())

    def change(self, page, send):
        send(page.pack())
        send(page.pack())
