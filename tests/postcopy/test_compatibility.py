# SPDX-License-Identifier: GPL-2.0-or-later
"""The fork and the QEMU that it is made from migrate to each other."""
from itertools import product

import pytest

from tests.lab.arches import on_aarch64
from tests.lab.pair import FORK, STOCK, Pair

WAYS = {"stock-to-fork": (STOCK, FORK), "fork-to-stock": (FORK, STOCK), "stock-to-stock": (STOCK, STOCK)}
MACHINES = ("pc-i440fx-10.0", "pc-q35-10.0")
CHANNELS = {"preempt": ("postcopy-preempt",), "one-channel": ()}
VIRT = "virt-10.0,gic-version=3"


def precopy(lab, way, machine):
    source, destination = WAYS[way]
    with Pair(lab, source=source, destination=destination, machine=machine, capabilities=None,
              mem=8) as pair:
        pair.precopy()
        pair.finish()


def postcopy(lab, way, channels, machine):
    source, destination = WAYS[way]
    with Pair(lab, source=source, destination=destination, machine=machine,
              capabilities=CHANNELS[channels], mem=8) as pair:
        pair.postcopy()
        pair.finish()
        if destination == FORK:
            assert pair.faults()["exits"] > 20


def quick(way, machine, channels="preempt"):
    """Stock QEMU alone is for make check-slow, and so is the second machine without preempt."""
    return way != "stock-to-stock" and (machine == MACHINES[0] or channels == "preempt")


def choices(*of):
    return [pytest.param(*choice, marks=() if quick(*choice) else pytest.mark.slow) for choice in product(*of)]


@pytest.mark.parametrize("way, machine", choices(WAYS, MACHINES))
def test_precopy(lab, way, machine):
    precopy(lab, way, machine)


@on_aarch64("way", WAYS)
def test_precopy_on_aarch64(lab, way):
    precopy(lab, way, VIRT)


@pytest.mark.parametrize("way, machine, channels", choices(WAYS, MACHINES, CHANNELS))
def test_postcopy(lab, way, machine, channels):
    postcopy(lab, way, channels, machine)


@on_aarch64("way, channels", product(WAYS, CHANNELS),
            quick=[("stock-to-fork", "preempt"), ("fork-to-stock", "preempt")])
def test_postcopy_on_aarch64(lab, way, channels):
    postcopy(lab, way, channels, VIRT)
