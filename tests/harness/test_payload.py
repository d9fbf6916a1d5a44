# SPDX-License-Identifier: GPL-2.0-or-later
"""The guest payload under TCG: it boots, its check passes, and its check can fail."""
import contextlib
import socket
import statistics

import pytest

from tests.lab.host import Host
from tests.lab.pair import FORK, Side
from tests.lab.qtest import Qtest

pytestmark = pytest.mark.slow
BOTH = ("x86_64", "aarch64")
ARCHS = pytest.mark.parametrize("arch", BOTH)
OPTIONS = {"cpus": 4, "memory_mb": 32, "seed": 7}


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:
        hosts: dict[str, Host] = {}

        def start(name, arch="x86_64", extra=(), **options):
            if arch not in hosts:
                hosts[arch] = stack.enter_context(Host("tcg", arch=arch))
            side = Side(hosts[arch], name, FORK, [*Qtest.arguments(hosts[arch], name), *extra], options, traced=False)
            stack.callback(side.end)
            side.connect()
            return side
        yield start


def gdb(path, packet):
    """Sends a packet to the debugger's stub, which can write ROM."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(f"${packet}#{sum(packet.encode()) % 256:02x}".encode())
        answer = s.makefile().read(len("+$OK"))
    assert answer == "+$OK", answer


@pytest.mark.parametrize("arch, machine", [
    ("x86_64", "pc"), ("x86_64", "q35"), ("aarch64", "virt,gic-version=3")])
@pytest.mark.parametrize("cpus", [1, 4])
def test_boots_and_checks_its_memory(start, arch, machine, cpus):
    qemu = start("source", arch=arch, machine=machine, **OPTIONS | {"cpus": cpus}, passes=2)
    end = qemu.wait_event("end")
    report = qemu.report()
    boot = report.the("boot")
    assert report.intact
    assert boot["cpus"] == cpus
    assert boot["test_pages"] == end["checked_pages"] > 6000
    # Twice on the source, less about 12 per cent; then all pages twice.
    touched = (end["touches"] - 2 * end["checked_pages"]) / (2 * end["checked_pages"])
    assert 0.8 < touched < 0.95
    assert report.first("moved") is None


@pytest.mark.parametrize("arch, pattern, cpus", [
    *((arch, pattern, 4) for arch in BOTH for pattern in ("disjoint", "shared", "samehuge", "zerowrite", "sequential")),
    # More vCPUs than the host has processors
    *((arch, "shared", 18) for arch in BOTH), ("x86_64", "smm", 4)])
def test_patterns(start, arch, pattern, cpus):
    qemu = start("destination", arch=arch, **OPTIONS | {"cpus": cpus}, pattern=pattern)
    end = qemu.wait_event("end")
    report = qemu.report()
    assert report.first("moved") and report.intact
    touchers = cpus if pattern == "shared" else 1
    assert end["touches"] >= 2 * end["checked_pages"] * touchers
    assert sum(s["count"] for s in report.all("samples")) == end["checked_pages"] * touchers
    if pattern == "disjoint":
        for cpus in report.latencies_us(qemu.memory, report.the("boot")["tsc_khz"]):
            # A touch takes some time, under TCG a fraction of a microsecond.
            assert 0 < statistics.median(t for cpu in cpus for t in cpu) < 1000


@ARCHS
@pytest.mark.parametrize("parameters, message", [
    ({"speed": 1}, "unknown parameter"),
    ({"mem": "much"}, "parameter is not a decimal number"),
    ({"mem": 4096}, "not enough memory for this test"),
])
def test_refuses_wrong_parameters(start, arch, parameters, message):
    qemu = start("destination", arch=arch, **OPTIONS, **parameters)
    with pytest.raises(AssertionError, match=message):
        qemu.wait_event("end")


def moved(start, arch, meddle, extra=()):
    """Migrate a stopped guest, meddle(source, boot event) before that; the last report."""
    source = start("source", arch, extra, **OPTIONS)
    uri = f"unix:{source.lab.tmp}/migration.sock"
    destination = start("destination", arch, ("-incoming", uri), **OPTIONS)
    source.wait_event("ready")
    source.cmd("stop")
    meddle(source, source.report().the("boot"))
    source.cmd("migrate", uri=uri)
    destination.wait_status("completed")
    destination.cmd("cont")
    destination.wait_event("end")
    assert destination.report().first("moved")
    return destination.report()


@ARCHS
@pytest.mark.parametrize("offset, zero", [(0, False), (2048, False), (4088, False), (1024, True)])
def test_finds_one_wrong_word(start, arch, offset, zero):
    """The wrong word is in a page of data, or in a page of zeros."""
    found = {}

    def corrupt(source, boot):
        with Qtest(source.lab) as qtest:
            def word(address):
                return int(qtest.cmd("readq", address)[0], 16)
            pages = range(boot["test_address"], boot["test_address"] + boot["test_pages"] * 4096, 4096)
            found["address"] = next(page for page in pages if (word(page) == 0) == zero) + offset
            qtest.cmd("writeq", found["address"], word(found["address"]) ^ 1 << 17)

    report = moved(start, arch, corrupt)
    assert not report.intact
    assert report.the("end")["bad_pages"] == 1
    bad, = report.all("bad")
    assert int(bad["address"], 16) == found["address"]
    # The guest counts on in the first and the last word.
    difference = int(bad["found"], 16) - int(bad["expected"], 16)
    assert abs(difference) == 1 << 17


@ARCHS
def test_finds_a_wrong_rom(start, tmp_path, arch):
    """A byte of the ROM, which a PC sees at the end of 4 GiB and at the end of 1 MiB."""
    address, regions = {"x86_64": (0xffffff00, ["rom", "rom below 1 MiB"]), "aarch64": (0xff00, ["rom"])}[arch]

    def corrupt(source, boot):
        gdb(path, f"M{address:x},1:ff")

    path = str(tmp_path / "gdb")
    report = moved(start, arch, corrupt, ("-gdb", f"unix:{path},server=on,wait=off"))
    assert not report.intact
    assert [b["region"] for b in report.all("bad")] == regions
