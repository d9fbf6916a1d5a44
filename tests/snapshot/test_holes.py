# SPDX-License-Identifier: GPL-2.0-or-later
"""Pages that never existed, or exist no more, are neither read nor saved."""
import time

import pytest

from tests.lab.arches import listed
from tests.lab.pair import MIB, STOCK, until
from tests.lab.paths import SANITIZED
from tests.lab.qtest import BALLOON, BALLOON_QUEUE_BYTES, Qtest, inflate_balloon
from tests.lab.snapshot import Machine
from tests.lab.text import search
from tests.snapshot.test_backends import KERNELS

EMPTY_MB = 512
GO = "/tmp/go"


def free_huge_pages(lab):
    return int(search(r"HugePages_Free:\s*(\d+)", lab.run("cat /proc/meminfo").output)[1])


def start_unread(machine):
    """Start a snapshot whose target reads nothing before the file GO exists."""
    machine.lab.run(f"rm -f {GO}")
    machine.start(f"exec:while [ ! -e {GO} ]; do sleep 0.1; done; cat >{machine.file}")
    machine.wait_running()


def test_unit(lab):
    """The unit test with huge pages. A host may have none, and then skips that part."""
    tap = lab.run("build/fork/tests/unit/test-snapshot-holes", check=True).output
    assert "ok 5 /snapshot-holes/hugetlbfs" in tap and "SKIP" not in tap, tap


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["anonymous", "memfd", "hugetlb"])
@pytest.mark.parametrize("value", ["never", "always"])
def test_empty_guest(lab, thp, kind, value):
    """The guest's memory and its file hardly grow, and any QEMU restores it. Its vCPUs share huge pages."""
    thp(value)
    memory_mb = EMPTY_MB // (2 if kind == "hugetlb" else 1)
    with Machine(lab, backend=kind, memory_mb=memory_mb, mem=4, pattern="samehuge") as machine:
        assert kind != "anonymous" or bool(machine.huge_kib()) == (value == "always")
        before_kib, huge = machine.resident_kib(), free_huge_pages(lab)
        info = machine.take()
        grown_kib = machine.resident_kib() - before_kib
        # Besides the guest's memory, QEMU has stacks and a heap, also with huge pages.
        assert kind == "hugetlb" or SANITIZED or grown_kib < memory_mb * 1024 / 100
        assert free_huge_pages(lab) == huge
        assert info["background-snapshot"]["holes"] > (memory_mb - 32) * 256, info
        # Nine bytes for a page of zeros, in every QEMU.
        assert machine.snapshot_bytes() < 24 * MIB + memory_mb * 256 * 9
        machine.restore(STOCK)


@pytest.mark.parametrize("kind, hidden", listed(
    *(("anonymous", hidden) for hidden in KERNELS), ("memfd", ()), quick=[("anonymous", ())]))
def test_a_hole_is_zero_when_it_is_written_later(lab, hide, kind, hidden):
    """A first write during the snapshot is not part of it."""
    hide(*hidden)
    with Machine(lab, backend=kind, memory_mb=128, mem=4, taker=Qtest.arguments(lab)) as machine, \
            Qtest(lab) as qtest:
        start_unread(machine)
        pages = range(64 * MIB, 128 * MIB, MIB)
        for page in pages:
            qtest.send("memset", page, 8192, 0x55)
        if kind == "anonymous" and not hidden:
            for _ in pages:
                qtest.answer()      # The write did not wait.
            lab.run(f"touch {GO}")
        else:
            time.sleep(1)
            lab.run(f"touch {GO}")
            for _ in pages:
                qtest.answer()
        machine.wait()
        assert qtest.read(100 * MIB, 16) == b"\x55" * 16
        machine.restore(keep=True)
        with Qtest(lab, "destination") as restored:
            for page in pages:
                assert restored.read(page, 8192) == bytes(8192)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["anonymous", "memfd"])
def test_ballooned_pages(lab, kind):
    """Pages that the guest has given back are holes; before, the same pages are data."""
    with Machine(lab, backend=kind, memory_mb=64, mem=4, machine="pc",
                 arguments=BALLOON, taker=Qtest.arguments(lab)) as machine, \
            Qtest(lab) as qtest:
        start, size = 32 * MIB, 8 * MIB
        qtest.memset(60 * MIB, BALLOON_QUEUE_BYTES, 0)      # data in both snapshots
        qtest.memset(start, size, 0x55)
        full_holes = machine.take()["background-snapshot"]["holes"]
        full_kib = machine.resident_kib()
        inflate_balloon(qtest, 60 * MIB, range(start >> 12, (start + size) >> 12))
        before_kib = machine.resident_kib()
        assert before_kib < full_kib - size / 1024 * 0.9, "the balloon has given nothing back"
        holes = machine.take()["background-snapshot"]["holes"]
        assert SANITIZED or machine.resident_kib() - before_kib < 640
        # A page of QEMU or the BIOS may have been written between the two.
        assert size >> 12 >= holes - full_holes > (size >> 12) - 16, (full_holes, holes)
        machine.restore(keep=True)
        with Qtest(lab, "destination") as restored:
            assert restored.read(start, size) == bytes(size)


@pytest.mark.slow
def test_unplugged_memory(lab):
    """virtio-mem's unplugged parts must not be touched at all."""
    with Machine(lab, memory_mb=64, mem=4, arguments=[
            "-m", "64M,maxmem=4G", "-object", "memory-backend-ram,id=vmem,size=1G",
            "-device", "virtio-mem-pci,memdev=vmem,requested-size=0"]) as machine:
        before_kib = machine.resident_kib()
        machine.take()
        assert SANITIZED or machine.resident_kib() - before_kib < 640
        assert machine.snapshot_bytes() < 32 * MIB
        machine.restore()


def test_swapped_pages_are_data(lab, swap):
    with Machine(lab, memory_mb=64, mem=8) as machine:
        machine.side.cmd("stop")
        address = search(r" is (0x\w+)", machine.side.hmp("gpa2hva 0"))[1]
        lab.run(f"build/tests/pageout $(cat {machine.side.pidfile}) {address} {64 * MIB}", check=True)
        swapped_kib = int(search(r"VmSwap:\s*(\d+)", machine.proc("status"))[1])
        assert SANITIZED or swapped_kib > 8 << 10
        machine.side.cmd("cont")
        machine.take()
        machine.restore()


@pytest.mark.slow
def test_merged_pages_are_data(lab, ksm):
    """KSM makes one page of many, and forgets that userfaultfd protected them."""
    with Machine(lab, memory_mb=64, mem=4, cpus=1, taker=Qtest.arguments(lab)) as machine, Qtest(lab) as qtest:
        start, size = 32 * MIB, 8 * MIB
        qtest.memset(start, size, 0x55)
        start_unread(machine)
        lab.run(f"echo 1 >{ksm}/run", check=True)
        until(lambda: int(lab.run(f"cat {ksm}/pages_sharing").output) > size // 4096 * 0.9, "pages are merged")
        lab.run(f"touch {GO}")
        machine.wait()
        machine.restore(keep=True)
        with Qtest(lab, "destination") as restored:
            assert restored.read(start, size) == b"\x55" * size
