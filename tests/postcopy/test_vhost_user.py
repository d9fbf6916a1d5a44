# SPDX-License-Identifier: GPL-2.0-or-later
"""A vhost-user backend in post-copy: a process of its own that reads and writes the guest's memory.
It passes its userfaultfd to QEMU, which serves its faults and wakes it."""
import os
import socket
import struct
import threading
from pathlib import Path

import pytest
from qemu.qmp import ExecuteError

from tests.lab.backends import CHANNELS
from tests.lab.host import Host
from tests.lab.pair import FORK, Pair, listens, until
from tests.lab.qtest import PCI_DATA, PORT, Qtest
from tests.lab.vhost_user import DiskPair
from tests.postcopy.steps import assert_refused

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("exits, channels, memory", [
    ("on", "preempt", "memfd"), ("off", "one-channel", "memfd"), ("on", "fetch", "memfd"),
    ("on", "preempt", "hugetlb")])
def test_backend(lab, exits, channels, memory):
    """QEMU serves the faults of the backend and of the guest at the same time, each in its own way."""
    with DiskPair(lab, exits=exits, backend=memory, cpus=2, **CHANNELS[channels]) as pair:
        pair.postcopy()
        # A huge page is missed once.
        pair.until_backend_faults(1 if memory == "hugetlb" else 20)
        assert pair.destination.status() == "postcopy-active"
        counts = pair.faults()
        assert (counts["exits"] > 0) == (exits == "on"), counts
        pair.finish_fast()
        pair.check_disk()


@slow
def test_from_a_file(lab):
    """The backend of a guest that is resumed from a file also misses pages."""
    with DiskPair(lab, exits="on", cpus=2, capabilities=None,
                  destination_options=["-global", "migration.restore-background=off"]) as pair:
        pair.source.wait_ready()
        until(lambda: pair.transfers(pair.source), "the guest uses its disk")
        pair.source.set_capabilities("mapped-ram")
        pair.source.cmd("migrate", uri=f"file:{pair.file}.ram")
        pair.source.wait_status("completed")
        pair.destination.set_capabilities("mapped-ram", "postcopy-ram")
        pair.destination.cmd("migrate-incoming", uri=f"file:{pair.file}.ram")
        pair.until_backend_faults(20)
        pair.destination.cmd("migrate-set-parameters", restore_background=True)
        pair.destination.wait_status("completed")
        pair.check_disk()
        lab.run(f"rm {pair.file}.ram", check=True)


@slow
def test_recovery(lab):
    """The connection breaks while the backend waits for a page, which recovery requests again."""
    with DiskPair(lab, exits="on", cpus=2) as pair:
        wire = pair.wire(pair.listen())
        pair.postcopy(wire.uri)
        pair.until_backend_faults(50)
        pair.until_backend_waits()
        wire.cut()
        pair.source.signal("CONT")
        pair.wait_paused()
        seen = pair.transfers()
        assert pair.backend_waits()
        pair.recover()
        until(lambda: pair.transfers() > seen + 10, "the guest uses its disk")
        pair.finish_fast()
        assert "postcopy_fault_ask_again" in dict(pair.destination.trace())
        pair.check_disk()


@slow
def test_stop_and_go_on(lab):
    """The device stops with the guest, and starts anew in post-copy."""
    with DiskPair(lab, exits="on", cpus=2) as pair:
        pair.postcopy()
        for n in range(1, 4):
            pair.until_backend_faults(10 * n)
            pair.destination.cmd("stop")
            pair.destination.cmd("cont")
        seen = pair.transfers()
        until(lambda: pair.transfers() > seen + 10, "the guest uses its disk")
        assert pair.destination.status() == "postcopy-active"
        pair.finish_fast()
        pair.check_disk()


@slow
def test_backend_dies(lab):
    """The backend is killed while it waits for a page. The migration and the guest continue, without the disk."""
    with DiskPair(lab, exits="on", cpus=2) as pair:
        pair.postcopy()
        pair.until_backend_faults(50)
        pair.until_backend_waits()
        pair.signal_backend("KILL")
        pair.source.signal("CONT")
        pair.destination.wait_says("ring restore failed")
        pair.until_reports(len(pair.destination.report().lines) + 1)
        seen, faults = pair.transfers(), pair.backend_faults()
        pair.until_reports(len(pair.destination.report().lines) + 10)
        pair.finish_fast()
        said = [line for line in pair.destination.job.output.splitlines() if "-trace" not in line]
        assert len(said) < 20, said
        # The answer to one request may be missing yet.
        assert pair.transfers() <= seen + 1 and pair.backend_faults() == faults


@slow
def test_backend_dies_at_the_end(lab):
    """The backend is killed after QEMU has notified it of the end of post-copy, and before it has answered."""
    with DiskPair(lab, exits="on", cpus=2) as pair:
        pair.postcopy()
        pair.until_backend_faults(10)
        pair.signal_backend("STOP")
        pair.fast()
        until(lambda: "vhost_user_postcopy_end_entry" in dict(pair.destination.trace()), "the backend is notified")
        pair.signal_backend("KILL")
        pair.finish()
        pair.until_reports(len(pair.destination.report().lines) + 10)
        pair.destination.wait_says("Failed to receive reply to postcopy_end")


@slow
@pytest.mark.parametrize("way", ["post-copy", "pre-copy"])
def test_backend_of_the_source_dies(lab, way):
    """Requests of the guest are lost with the backend: the guest must stay where the next backend finds them."""
    with DiskPair(lab, exits="on", cpus=2) as pair:
        pair.start()
        pair.signal_backend("KILL", "source")
        if way == "post-copy":
            pair.source.cmd("migrate-start-postcopy")
        else:
            pair.source.cmd("migrate-set-parameters", max_bandwidth=0, downtime_limit=20000)
        pair.source.wait_status("failed")
        pair.source.wait_says("the backend of disk has disconnected")
        until(lambda: pair.source.cmd("query-status")["running"], "the guest resumes")
        seen = pair.transfers(pair.source)
        pair.start_backend(lab, "source")
        until(lambda: pair.transfers(pair.source) > seen + 10, "the guest uses its disk")


SET_VRING_CALL = 13
# Answers to GET_FEATURES (VERSION_1, PROTOCOL_FEATURES), GET_VRING_BASE, GET_PROTOCOL_FEATURES
ANSWERS = {1: struct.pack("<Q", 1 << 32 | 1 << 30), 11: bytes(8), 15: bytes(8)}
SLOT, MSIX = 5, 0x11
TABLE, COMMON, QUEUE, MESSAGE = 0xe0000000, 0xe0100000, 0x10000, 0x20000


class Backend:
    """Serves no request, and keeps the notifiers by which it is to call; words: for its side in QEMU."""

    def __init__(self, tmp_path: Path) -> None:
        self.calls: list[int] = []
        self.words = ("-chardev", f"socket,id=fs,path={tmp_path}/backend")
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(f"{tmp_path}/backend")
        self.listening.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        connection, _ = self.listening.accept()
        while True:
            header, descriptors, _, _ = socket.recv_fds(connection, 12, 8)
            if not header:
                break
            request, _, size = struct.unpack("<III", header)
            data = connection.recv(size, socket.MSG_WAITALL) if size else b""
            if request == SET_VRING_CALL and data[0] == 0:
                self.calls += descriptors
            if request in ANSWERS:
                connection.sendall(struct.pack("<III", request, 5, 8) + ANSWERS[request])


def test_backend_that_comes_in_postcopy(tmp_path):
    """The backend would see zeros in missing pages: its device can only be added once all pages are received."""
    with Host("tcg") as host, Pair(host, backend="memfd", exits=None, mem=8,
                                   destination_options=Backend(tmp_path).words) as pair:
        device = {"driver": "vhost-user-fs-pci", "chardev": "fs", "tag": "fs", "id": "fs"}
        pair.midst()
        assert_refused(pair.destination, "behind chardev 'fs' cannot start before postcopy has received", "device_add",
                       **device)
        pair.finish_fast()
        pair.destination.cmd("device_add", **device)


def test_backend_without_page_faults(tmp_path):
    """The error names the backend."""
    words = (*Backend(tmp_path).words, "-device", "vhost-user-fs-pci,chardev=fs,tag=fs")
    with (Host("tcg") as host, Pair(host, backend="memfd", capabilities=None, destination_options=words) as pair,
          pytest.raises(ExecuteError, match="behind chardev 'fs' is not capable of postcopy")):
        pair.destination.set_capabilities("postcopy-ram")


def test_late_call(tmp_path):
    """The guest unmasks its interrupt; the backend, which has not read that message yet, calls its earlier notifier."""
    backend = Backend(tmp_path)
    with Host("tcg") as host:
        job = host.job(f"exec {host.qemu(FORK)} -accel qtest -machine pc,memory-backend=ram -m 16 -nodefaults "
                       "-display none -object memory-backend-memfd,id=ram,size=16M,share=on "
                       + " ".join((*backend.words, *Qtest.arguments(host)))
                       + f" -device vhost-user-fs-pci,addr={SLOT},chardev=fs,tag=fs")
        until(lambda: listens(host, host.port(PORT["source"])) or not job.running, "QEMU listens")
        assert job.running, job.output
        with Qtest(host) as qtest:
            def pci(register, value):
                qtest.pci_select(SLOT, register)
                qtest.cmd("outl", PCI_DATA, value)

            def pci_byte(register):
                qtest.pci_select(SLOT, register & 0xfc)
                return int(qtest.cmd("inl", PCI_DATA)[0], 16) >> 8 * (register & 3) & 0xff

            # BARs 1 and 4; memory, bus master; MSI-X
            for register, value in (0x14, TABLE), (0x20, COMMON), (0x24, 0), (0x04, 6):
                pci(register, value)
            capability = pci_byte(0x34)
            while pci_byte(capability) != MSIX:
                capability = pci_byte(capability + 1)
            pci(capability, 1 << 31)
            for offset, value in (0, MESSAGE), (4, 0), (8, 1), (12, 0):
                qtest.cmd("writel", TABLE + offset, value)
            # A driver, which takes VERSION_1; queue 0: size, vector, addresses; it is ready
            for size, offset, value in (("b", 0x14, 3), ("l", 8, 1), ("l", 0xc, 1), ("b", 0x14, 11),
                                        ("w", 0x16, 0), ("w", 0x18, 8), ("w", 0x1a, 0), ("l", 0x20, QUEUE),
                                        ("l", 0x28, QUEUE + 0x1000), ("l", 0x30, QUEUE + 0x2000), ("w", 0x1c, 1),
                                        ("b", 0x14, 15)):
                qtest.cmd(f"write{size}", COMMON + offset, value)

            def mask(value):
                before = len(backend.calls)
                qtest.cmd("writel", TABLE + 12, value)
                until(lambda: len(backend.calls) > before, "the backend has its call notifier")

            def interrupted():
                return qtest.read(MESSAGE, 1) == bytes([1])

            until(lambda: backend.calls, "the backend has its call notifier")
            mask(1)
            late = backend.calls[-1]
            mask(0)
            assert not interrupted()
            os.write(late, struct.pack("<Q", 1))
            until(interrupted, "the guest is interrupted", timeout=5)
        job.kill()
