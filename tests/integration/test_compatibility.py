# SPDX-License-Identifier: GPL-2.0-or-later
"""The fork migrates to and from the QEMU that it is made from, and Debian's newest.
build/reports/compatibility.md has the results."""
import contextlib

import pytest

from tests.lab import backends, compatibility, other_qemu, tls
from tests.lab.arches import choices, on_aarch64
from tests.lab.other_qemu import PEER
from tests.lab.pair import FORK, STOCK, Pair

WITH_STOCK = {"stock-to-fork": (STOCK, FORK), "fork-to-stock": (FORK, STOCK)}
WAYS = WITH_STOCK | {"peer-to-fork": (PEER, FORK), "fork-to-peer": (FORK, PEER)}
MACHINES = ("pc-i440fx-10.0", "pc-q35-10.0")
CHANNELS = ("preempt", "one-channel")
VIRT = "virt-10.0,gic-version=3"


@contextlib.contextmanager
def pair_of(lab, way, machine, what, **options):
    source, destination = WAYS[way]
    if PEER in (source, destination):
        other_qemu.put(lab)
    with (compatibility.told(lab, source, destination, machine, what),
          Pair(lab, source=source, destination=destination, machine=machine, mem=8, fetch="auto", **options) as pair):
        yield pair


def precopy(lab, way, machine):
    with pair_of(lab, way, machine, "pre-copy", capabilities=None) as pair:
        pair.precopy()
        pair.finish()


def postcopy(lab, way, channels, machine):
    with pair_of(lab, way, machine, f"post-copy, {channels}", **backends.CHANNELS[channels]) as pair:
        pair.postcopy()
        pair.finish()
        if WAYS[way][1] == FORK:
            faults = pair.faults()
            # QEMU 10.0 mistakes a page in flight for one of another block (02-postcopy-fixes/0002): on arm64, all vCPUs
            # may wait for pvtime's only page until all others are received.
            late = machine == VIRT and WAYS[way][0] != FORK
            assert faults["exits"] + (faults["populated"] if late else 0) > 20, faults


# Only make check-all runs Debian's newest, which has to be fetched, the second machine, and post-copy without preempt.
QUICK = [("stock-to-fork", MACHINES[0]), ("fork-to-stock", MACHINES[0])]


@pytest.mark.parametrize("way, machine", choices(WAYS, MACHINES, quick=QUICK))
def test_precopy(lab, way, machine):
    precopy(lab, way, machine)


@on_aarch64("way", WITH_STOCK)
def test_precopy_on_aarch64(lab, way):
    precopy(lab, way, VIRT)


@pytest.mark.parametrize("way, machine, channels", choices(
    WAYS, MACHINES, CHANNELS, quick=[(*of, "preempt") for of in QUICK]))
def test_postcopy(lab, way, machine, channels):
    postcopy(lab, way, channels, machine)


@on_aarch64("way, channels", zip(WITH_STOCK, CHANNELS, strict=True))
def test_postcopy_on_aarch64(lab, way, channels):
    postcopy(lab, way, channels, VIRT)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_multifd(lab, way):
    """Pre-copy by four connections."""
    with pair_of(lab, way, MACHINES[0], "multifd, TLS", capabilities=None, tls=tls.directory(lab)) as pair:
        pair.use_multifd(4)
        pair.precopy()
        pair.finish()


@pytest.mark.slow
@pytest.mark.parametrize("channels, encrypted", [("preempt", True), ("one-channel", False)],
                         ids=["preempt-tls", "one-channel"])
@pytest.mark.parametrize("way", WAYS)
def test_recovery(lab, way, channels, encrypted):
    """Post-copy that loses its connection, and is recovered."""
    with pair_of(lab, way, MACHINES[0], f"recovery, {channels}" + ", TLS" * encrypted,
                 **backends.CHANNELS[channels], tls=tls.directory(lab) if encrypted else None) as pair:
        pair.broken_and_recovered()


@pytest.mark.slow
@pytest.mark.parametrize("channels, encrypted", [("preempt", False), ("one-channel", True)],
                         ids=["preempt", "one-channel-tls"])
@pytest.mark.parametrize("way", ["peer-to-fork", "fork-to-peer"])
def test_postcopy_behind_multifd(lab, way, channels, encrypted):
    """QEMU 10.0 refuses post-copy with multifd."""
    with pair_of(lab, way, MACHINES[0], f"multifd and post-copy, {channels}" + ", TLS" * encrypted,
                 **backends.CHANNELS[channels], tls=tls.directory(lab) if encrypted else None) as pair:
        pair.use_multifd(4)
        pair.precopy_bandwidth = 8 << 20
        pair.broken_and_recovered()
