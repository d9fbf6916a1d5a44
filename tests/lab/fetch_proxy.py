# SPDX-License-Identifier: GPL-2.0-or-later
"""A proxy that understands the data of fetch channels: docs/devel/fetch.md."""
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from socket import socket
from typing import Any

from tests.lab.proxy import MAIN, Copy, Send, Wire

HELLO_SIZE = 24
HEADER = struct.Struct(">BBHIQ")     # type, length of the name, 0, length, offset
REQUEST, PAGES, ZERO, END, PING = range(1, 6)


@dataclass
class Frame:
    type: int
    name: bytes     # of the RAMBlock; empty: that of the last frame
    length: int
    offset: int
    body: bytes = b""

    def pack(self) -> bytes:
        head = HEADER.pack(self.type, len(self.name), 0, self.length, self.offset)
        return head + self.name + self.body


def frames(stream: BufferedReader) -> Iterator[Frame]:
    while len(head := stream.read(HEADER.size)) == HEADER.size:
        kind, name_length, _, length, offset = HEADER.unpack(head)
        name = stream.read(name_length)
        yield Frame(kind, name, length, offset, stream.read(length) if kind == PAGES else b"")


class FetchWire(Wire):
    """answers: how many fetch channels get the destination's data, in the order in which they connect."""

    def __init__(self, to: int, answers: int = 16, **options: Any) -> None:
        self.answers = answers
        self.passed = 0         # number of the source's frames
        super().__init__(to, **options)

    def _forward(self, channel: int) -> Copy:
        return self._copy if channel == MAIN else self._fetch

    def _fetch(self, a: socket, b: socket) -> None:
        with a.makefile("rb") as stream:
            b.sendall(stream.read(HELLO_SIZE))
            for frame in frames(stream):
                self.passed += 1
                self.frame(frame, b.sendall)

    def frame(self, frame: Frame, send: Send) -> None:
        send(frame.pack())

    def _back(self, a: socket, b: socket) -> None:
        if self.channels.index((b, a)) <= self.answers:
            super()._back(a, b)
        else:
            while a.recv(HELLO_SIZE):
                pass
