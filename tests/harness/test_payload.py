# SPDX-License-Identifier: GPL-2.0-or-later
"""The guest payload under TCG: it boots, its check passes, and its check can fail."""
import contextlib
import socket
import subprocess
import time

import pytest
from qemu.qmp.legacy import QEMUMonitorProtocol

from tests.lab import guest
from tests.lab.paths import FORK

# The fork for arm64 hosts has no TCG.
QEMU = {"x86_64": FORK / "qemu-system-x86_64", "aarch64": "qemu-system-aarch64"}
ARCHS = pytest.mark.parametrize("arch", QEMU)
OPTIONS = {"cpus": 4, "memory_mb": 32, "seed": 7}


class Qemu:
    """A QEMU on this host with the payload in it, and monitors at sockets."""

    def __init__(self, tmp_path, side, extra=(), arch="x86_64", **options):
        self.log = tmp_path / f"{side}.log"
        self.qtest_path = tmp_path / f"{side}.qtest"
        self.gdb_path = tmp_path / f"{side}.gdb"
        self.qmp = QEMUMonitorProtocol(str(tmp_path / f"{side}.qmp"), server=True)
        self.process = subprocess.Popen([
            str(QEMU[arch]), "-accel", "tcg", "-cpu", "max",
            *guest.arguments(side, self.log, arch=arch, **options),
            "-qmp", f"unix:{tmp_path / f'{side}.qmp'}",
            "-qtest", f"unix:{self.qtest_path},server=on,wait=off",
            "-gdb", f"unix:{self.gdb_path},server=on,wait=off", *extra])
        self.qmp.accept()

    def report(self):
        return guest.Report(self.log.read_text())

    def until(self, condition, what, timeout=60):
        end = time.monotonic() + timeout
        while not (result := condition()):
            assert self.process.poll() is None, f"QEMU has ended before {what}"
            assert time.monotonic() < end, f"no {what} within {timeout} s: {self.report().events}"
            time.sleep(0.05)
        return result

    def until_event(self, event):
        return self.until(lambda: self.report().first(event), event)

    def qtest(self, command):
        """A command of QEMU's test protocol, which can write guest memory."""
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(str(self.qtest_path))
            s.sendall(command.encode() + b"\n")
            answer = s.makefile().readline().split()
        assert answer[0] == "OK", answer
        return answer[1:]

    def gdb(self, packet):
        """A packet to the debugger's stub, which can write ROM."""
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(str(self.gdb_path))
            s.sendall(f"${packet}#{sum(packet.encode()) % 256:02x}".encode())
            answer = s.makefile().read(len("+$OK"))
        assert answer == "+$OK", answer

    def quit(self):
        with contextlib.suppress(Exception):
            self.qmp.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    running = []

    def start(side, extra=(), **options):
        running.append(Qemu(tmp_path, side, extra, **options))
        return running[-1]
    yield start
    for qemu in running:
        qemu.quit()


@pytest.mark.parametrize("arch, machine", [
    ("x86_64", "pc"), ("x86_64", "q35"), ("aarch64", "virt,gic-version=3")])
@pytest.mark.parametrize("cpus", [1, 4])
def test_boots_and_checks_its_memory(start, arch, machine, cpus):
    qemu = start("source", arch=arch, machine=machine, **OPTIONS | {"cpus": cpus}, passes=2)
    end = qemu.until_event("end")
    report = qemu.report()
    boot = report.the("boot")
    assert report.intact
    assert boot["cpus"] == cpus
    assert boot["test_pages"] == end["checked_pages"] > 6000
    # Twice on the source, less about 12 per cent; then all pages twice.
    touched = (end["touches"] - 2 * end["checked_pages"]) / (2 * end["checked_pages"])
    assert 0.8 < touched < 0.95
    assert report.first("moved") is None


@pytest.mark.parametrize("arch, pattern", [
    *((arch, pattern) for arch in QEMU for pattern in ("disjoint", "shared", "samehuge", "zerowrite", "sequential")),
    ("x86_64", "smm")])
def test_patterns(start, arch, pattern):
    qemu = start("destination", arch=arch, **OPTIONS, pattern=pattern)
    end = qemu.until_event("end")
    report = qemu.report()
    assert report.first("moved") and report.intact
    touchers = OPTIONS["cpus"] if pattern == "shared" else 1
    assert end["touches"] >= 2 * end["checked_pages"] * touchers
    assert sum(s["count"] for s in report.all("samples")) == end["checked_pages"] * touchers


@ARCHS
def test_more_processors_than_the_host_has(start, arch):
    qemu = start("destination", arch=arch, **OPTIONS | {"cpus": 18}, pattern="shared", mem=8)
    qemu.until_event("end")
    assert qemu.report().intact


@ARCHS
def test_samples_are_latencies(start, tmp_path, arch):
    qemu = start("destination", arch=arch, **OPTIONS)
    qemu.until_event("end")
    report = qemu.report()
    address, size = report.sample_span()
    dump = tmp_path / "memory"
    qemu.qmp.cmd("pmemsave", val=address, size=size, filename=str(dump))
    pass1, pass2 = report.latencies_us(dump.read_bytes(), report.the("boot")["tsc_khz"])
    for cpus in pass1, pass2:
        touches = [t for cpu in cpus for t in cpu]
        assert len(touches) == report.the("boot")["test_pages"]
        # A touch under TCG takes a fraction of a microsecond, and it takes some time.
        assert 0 < sorted(touches)[len(touches) // 2] < 1000


@ARCHS
@pytest.mark.parametrize("parameters, message", [
    ({"pattern": "none"}, "unknown pattern"),
    ({"speed": 1}, "unknown parameter"),
    ({"mem": "much"}, "parameter is not a decimal number"),
    ({"mem": 4096}, "not enough memory for this test"),
])
def test_refuses_wrong_parameters(start, arch, parameters, message):
    qemu = start("destination", arch=arch, **OPTIONS, **parameters)
    assert qemu.until_event("error")["message"] == message
    assert not qemu.report().intact


def moved(start, tmp_path, arch, meddle):
    """Migrate a stopped guest, meddle(source, boot event) before that; the last report."""
    uri = f"unix:{tmp_path}/migration.sock"
    source = start("source", arch=arch, **OPTIONS)
    destination = start("destination", extra=("-incoming", uri), arch=arch, **OPTIONS)
    source.until_event("ready")
    source.qmp.cmd("stop")
    meddle(source, source.report().the("boot"))
    source.qmp.cmd("migrate", uri=uri)
    destination.until(
        lambda: destination.qmp.cmd("query-migrate").get("status") == "completed", "migration")
    destination.qmp.cmd("cont")
    destination.until_event("end")
    assert destination.report().first("moved")
    return destination.report()


@ARCHS
def test_finds_nothing_after_an_honest_migration(start, tmp_path, arch):
    assert moved(start, tmp_path, arch, lambda source, boot: None).intact


@ARCHS
@pytest.mark.parametrize("offset", [0, 8, 2048, 4088])
def test_finds_one_wrong_word(start, tmp_path, arch, offset):
    found = {}

    def corrupt(source, boot):
        # Page by page until one that holds data: a wrong count is wrong in a zero page too,
        # but the counts of zero pages are not interesting.
        for page in range(boot["test_pages"] // 2, boot["test_pages"]):
            found["address"] = boot["test_address"] + page * 4096 + offset
            word = int(source.qtest(f"readq {found['address']:#x}")[0], 16)
            if word:
                break
        found["wrong"] = word ^ 1 << 17
        source.qtest(f"writeq {found['address']:#x} {found['wrong']:#x}")

    report = moved(start, tmp_path, arch, corrupt)
    assert not report.intact
    assert report.the("end")["bad_pages"] == 1
    bad, = report.all("bad")
    assert int(bad["address"], 16) == found["address"]
    # The guest goes on counting in the first and the last word.
    difference = int(bad["found"], 16) - int(bad["expected"], 16)
    assert abs(difference) == 1 << 17


@ARCHS
def test_finds_a_wrong_zero_page(start, tmp_path, arch):
    def corrupt(source, boot):
        for page in range(boot["test_pages"]):
            address = boot["test_address"] + page * 4096
            if int(source.qtest(f"readq {address:#x}")[0], 16) == 0:
                source.qtest(f"writeq {address + 1024:#x} 0x1")
                return
        pytest.fail("no page is zero")

    report = moved(start, tmp_path, arch, corrupt)
    bad, = report.all("bad")
    assert (bad["found"], bad["expected"]) == ("0x1", "0x0")


@ARCHS
def test_finds_a_wrong_rom(start, tmp_path, arch):
    """A byte of the ROM, which a PC sees at the end of 4 GiB and at the end of 1 MiB."""
    address, regions = {"x86_64": (0xffffff00, ["rom", "rom below 1 MiB"]), "aarch64": (0xff00, ["rom"])}[arch]

    def corrupt(source, boot):
        source.gdb(f"M{address:x},1:ff")

    report = moved(start, tmp_path, arch, corrupt)
    assert not report.intact
    assert [b["region"] for b in report.all("bad")] == regions
