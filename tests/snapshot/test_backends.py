# SPDX-License-Identifier: GPL-2.0-or-later
"""Snapshots of a guest that writes continuously are of one instant, with any kind of memory."""

import pytest

from tests.lab.arches import listed
from tests.lab.backends import BACKENDS
from tests.lab.pair import FORK, INJECT, STOCK
from tests.lab.snapshot import Machine

# Hidden interfaces of the kernel, and QEMU's method for anonymous memory without them.
KERNELS = {
    (): "skip-empty",
    ("pagemap",): "protect-empty",
    ("pagemap", "unpopulated"): "populate-read",
    ("pagemap", "unpopulated", "populate"): "read",
}
OLDEST = list(KERNELS)[-1]


@pytest.mark.parametrize("kind, hidden", listed(
    *((kind, ()) for kind in BACKENDS if kind not in ("shm", "hugetlb-file")),
    *(("anonymous", hidden) for hidden in KERNELS if hidden), ("memfd", OLDEST), ("hugetlb", OLDEST),
    quick=[("anonymous", ())]))
def test_memory_is_of_one_instant(lab, hide, kind, hidden):
    """For files, marks in empty entries and lseek() are older than the hidden interfaces."""
    hide(*hidden)
    with Machine(lab, backend=kind, mem=8) as machine:
        info = machine.take_while_written()["background-snapshot"]
        assert info["setup-anonymous"] == KERNELS[hidden] and info["setup-file"] == "protect-empty"
        if kind == "anonymous" and hidden:
            assert info["holes"] == 0, info
        else:
            # 48 of 64 MiB and 12 % of the rest; privately mapped files cannot be queried.
            assert "private" in kind or info["holes"] > 11000, info
        machine.restore(STOCK if kind == "anonymous" else FORK)
        machine.assert_goes_on()
        assert not machine.protected()


def test_huge_pages_that_nobody_writes_stay_huge(lab, thp):
    thp("always")
    with Machine(lab, mem=32) as machine:
        machine.side.cmd("stop")
        before_kib = machine.huge_kib()
        assert before_kib > 32 << 10
        machine.take()
        assert machine.huge_kib() > before_kib - (4 << 10)
        assert machine.side.cmd("query-status")["status"] == "paused"
        machine.side.cmd("cont")
        machine.assert_goes_on()


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
