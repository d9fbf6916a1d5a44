# SPDX-License-Identifier: GPL-2.0-or-later
"""The fork and the QEMU that it is made from migrate to each other."""
import pytest

from pair import FORK, STOCK, Pair

WAYS = {"stock-to-fork": (STOCK, FORK), "fork-to-stock": (FORK, STOCK), "stock-to-stock": (STOCK, STOCK)}
MACHINES = ("pc-i440fx-10.0", "pc-q35-10.0")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("way", WAYS)
def test_precopy(lab, way, machine):
    source, destination = WAYS[way]
    with Pair(lab, source=source, destination=destination, machine=machine, capabilities=None,
              mem=8) as pair:
        pair.precopy()
        pair.finish()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("preempt", [True, False], ids=["preempt", "one-channel"])
@pytest.mark.parametrize("way", WAYS)
def test_postcopy(lab, way, preempt, machine):
    source, destination = WAYS[way]
    with Pair(lab, source=source, destination=destination, machine=machine,
              capabilities=("postcopy-preempt",) if preempt else (), mem=8) as pair:
        pair.postcopy()
        pair.finish()
        if destination == FORK:
            assert pair.faults()["exits"] > 20
