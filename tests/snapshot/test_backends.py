# SPDX-License-Identifier: GPL-2.0-or-later
"""Snapshots of a guest that writes continuously are of one instant, with any kind of memory."""

import pytest

from tests.lab.arches import listed
from tests.lab.backends import BACKENDS
from tests.lab.pair import FORK, INJECT, STOCK
from tests.lab.snapshot import Machine
from tests.lab.text import search

QUICK = ("anonymous",)


@pytest.mark.parametrize("kind", listed(
    *(kind for kind in BACKENDS if kind not in ("shm", "hugetlb-file")), quick=QUICK))
def test_memory_is_of_one_instant(lab, kind):
    with Machine(lab, backend=kind, mem=8) as machine:
        info = machine.take_while_written()["background-snapshot"]
        assert info["setup-anonymous"] == "skip-empty" and info["setup-file"] == "protect-empty"
        # 48 of 64 MiB and 12 % of the rest; privately mapped files cannot be queried.
        assert "private" in kind or info["holes"] > 11000, info
        machine.restore(STOCK if kind in QUICK else FORK)
        machine.assert_goes_on()
        assert not machine.protected()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["shared", "samehuge"])
@pytest.mark.parametrize("value", ["always", "never"])
def test_transparent_huge_pages(lab, thp, value, pattern):
    thp(value)
    with Machine(lab, mem=8, pattern=pattern) as machine:
        huge = "AnonHugePages:         0 kB" not in machine.proc("smaps_rollup")
        assert huge == (value == "always")
        info = machine.take()["background-snapshot"]
        assert info["holes"] > 0, info
        machine.restore()


def test_huge_pages_that_nobody_writes_stay_huge(lab, thp):
    thp("always")
    with Machine(lab, mem=32) as machine:
        def huge_kib():
            return int(search(r"^AnonHugePages: +(\d+)", machine.proc("smaps_rollup"))[1])
        machine.side.cmd("stop")
        before_kib = huge_kib()
        assert before_kib > 32 << 10
        machine.take()
        assert huge_kib() > before_kib - (4 << 10)
        assert machine.side.cmd("query-status")["status"] == "paused"
        machine.side.cmd("cont")
        machine.assert_goes_on()


# Hidden interfaces, and QEMU's method for anonymous memory without them.
KERNELS = {
    (): "skip-empty",
    ("pagemap",): "protect-empty",
    ("pagemap", "unpopulated"): "populate-read",
    ("pagemap", "unpopulated", "populate"): "read",
}


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [pytest.param(hidden, id=choice) for hidden, choice in KERNELS.items() if hidden])
def test_older_kernels(lab, hide, hidden):
    hide(*hidden)
    with Machine(lab, mem=8) as machine:
        info = machine.take()["background-snapshot"]
        assert info["setup-anonymous"] == KERNELS[hidden] and info["holes"] == 0, info
        machine.restore()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memfd", "hugetlb"])
def test_files_on_older_kernels(lab, hide, kind):
    """Marks in empty entries and lseek() are older than the hidden interfaces."""
    hide("pagemap", "unpopulated", "populate")
    with Machine(lab, backend=kind, mem=8) as machine:
        info = machine.take()["background-snapshot"]
        assert info["setup-file"] == "protect-empty" and info["holes"] > 11000, info
        machine.restore()


def test_without_proc(lab):
    with Machine(lab, mem=8, wrapper=["unshare", "-m", "sh", "-c", 'umount -l /proc; exec "$@"', "-"]) \
            as machine:
        info = machine.take()["background-snapshot"]
        assert info["setup-anonymous"] == "protect-empty" and info["holes"] == 0, info
        machine.restore()


def test_mapped_ram(place):
    """In a mapped-ram file, holes take no space at all."""
    with Machine(place, mem=8, memory_mb=256, capabilities=["mapped-ram"]) as machine:
        machine.take()
        assert int(place.run(f"du -k {machine.file}", check=True).output.split()[0]) < 24 << 10
        machine.restore(STOCK, ["mapped-ram"])


def test_mapped_ram_beside_another_device(place):
    """Memory and its bitmap are saved when another device makes QEMU query all devices again."""
    with Machine(place, INJECT, mem=4, capabilities=["mapped-ram"]) as machine:
        machine.side.inject.arm("snapshot-iterate-again")
        machine.take()
        assert machine.side.inject.passed("snapshot-iterate-again")
        machine.restore(capabilities=["mapped-ram"])


@pytest.mark.slow
def test_thirty_snapshots(place):
    """Snapshots of the same guest in a row, at moments that it does not notice."""
    with Machine(place, memory_mb=32, mem=8, pattern="shared") as machine:
        for _ in range(30):
            machine.take_while_written()
            machine.restore()
