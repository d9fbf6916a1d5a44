# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU's test protocol, which gives access to the memory and the devices of a guest under KVM.

QEMU's own client, qemu.machine.qtest, waits for the answer to each command; a test here sends a command
that must not be answered yet.
"""
import socket
from collections.abc import Iterable
from typing import Self

from tests.lab.host import Place
from tests.lab.pair import Side, until

PORT = {"source": 4005, "destination": 4006}
PCI_DATA = 0xcfc
# Registers of the pc machine's ACPI: for slots of memory, and for PCI slots
ACPI_MEMORY, ACPI_PCI = 0xa00, 0xae00


class Qtest:
    def __init__(self, lab: Place, side: str = "source") -> None:
        self.socket = socket.create_connection(("127.0.0.1", lab.host_port(lab.port(PORT[side]))))
        self.file = self.socket.makefile()

    @staticmethod
    def arguments(lab: Place, side: str = "source") -> list[str]:
        return ["-qtest", f"tcp:{lab.address}:{lab.port(PORT[side])},server=on,wait=off", "-qtest-log", "none"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, *words: int | str) -> None:
        line = " ".join(hex(w) if isinstance(w, int) else w for w in words)
        self.socket.sendall(line.encode() + b"\n")

    def answer(self) -> list[str]:
        answer = self.file.readline().split()
        assert answer and answer[0] == "OK", answer
        return answer[1:]

    def cmd(self, *words: int | str) -> list[str]:
        self.send(*words)
        return self.answer()

    def pci_select(self, slot: int, register: int) -> None:
        """Direct the next access to port PCI_DATA to a device of the first bus."""
        self.cmd("outl", 0xcf8, 1 << 31 | slot << 11 | register)

    def eject_pci(self, slot: int) -> None:
        """Eject a device of the first PCI bus, as a guest's ACPI does."""
        self.cmd("outl", ACPI_PCI + 0x10, 0)
        self.cmd("outl", ACPI_PCI + 8, 1 << slot)

    def memset(self, address: int, size: int, value: int) -> None:
        self.cmd("memset", address, size, value)

    def read(self, address: int, size: int) -> bytes:
        return bytes.fromhex(self.cmd("read", address, size)[0][2:])

    def write(self, address: int, data: bytes) -> None:
        self.cmd("write", address, len(data), "0x" + data.hex())


def eject_memory(lab: Place, side: str) -> None:
    """Eject a guest's first DIMM, as its ACPI does: select the slot, and eject it."""
    with Qtest(lab, side) as qtest:
        qtest.cmd("outl", ACPI_MEMORY, 0)
        qtest.cmd("outb", ACPI_MEMORY + 0x14, 1 << 3)


def unplug_memory(side: Side) -> None:
    """Request the guest's first DIMM, which is named dimm, and eject it as its ACPI does."""
    side.cmd("device_del", id="dimm")
    eject_memory(side.lab, side.name)
    until(lambda: not side.cmd("query-memory-devices"), "the DIMM is unplugged")


BALLOON_SLOT, BALLOON_IO = 5, 0xc000
BALLOON = ("-device", f"virtio-balloon-pci,addr={BALLOON_SLOT:#x},disable-modern=on")
BALLOON_QUEUE_BYTES = 64 << 10


def inflate_balloon(qtest: Qtest, queue: int, pages: Iterable[int]) -> None:
    """Give pages of 4 KiB back, by their numbers, in one request by BALLOON's legacy interface, for the first time.

    queue: address of BALLOON_QUEUE_BYTES of guest memory, zeros, that is otherwise unused."""
    def out(width: str, register: int, value: int) -> None:
        qtest.cmd(f"out{width}", BALLOON_IO + register, value)

    for register, value in (0x10, BALLOON_IO), (0x04, 0x7):     # BAR 0; input and output, memory, bus master
        qtest.pci_select(BALLOON_SLOT, register)
        qtest.cmd("outl", PCI_DATA, value)
    out("b", 18, 0)             # status: reset
    out("b", 18, 3)             # acknowledge, driver
    out("l", 4, 0)              # no features
    out("w", 14, 0)             # the queue of inflation
    size = int(qtest.cmd("inw", BALLOON_IO + 12)[0], 16)
    out("l", 8, queue >> 12)
    out("b", 18, 7)             # driver ok
    data = b"".join(page.to_bytes(4, "little") for page in pages)
    buffer = queue + (32 << 10)
    assert len(data) <= 32 << 10
    qtest.write(buffer, data)
    # The first descriptor, which is also the first available one
    qtest.write(queue, buffer.to_bytes(8, "little") + len(data).to_bytes(4, "little") + bytes(4))
    available = queue + 16 * size
    qtest.write(available + 2, b"\1\0")
    out("w", 16, 0)             # notify
    used = (available + 4 + 2 * size + 2 + 4095) & ~4095
    for _ in range(1000):
        if qtest.read(used + 2, 2) == b"\1\0":
            return
    raise AssertionError("the balloon does not answer")
