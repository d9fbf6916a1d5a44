# SPDX-License-Identifier: GPL-2.0-or-later
"""Memory devices on the destination: hot-plugged, unplugged, and without memory yet."""
from collections import namedtuple

import pytest

from tests.lab.arches import both_interfaces, listed
from tests.lab.pair import INJECT, MIB, Pair, until
from tests.lab.proxy import Block
from tests.lab.qtest import PCI_DATA, Qtest, eject_memory, unplug_memory
from tests.postcopy.steps import DIMM, PERTURB, assert_refused, far_pair, let_go, receive_all

PCI_SLOT, ROM = 28, "/tmp/option.rom"
VIRTIO_MEM = ("-object", "memory-backend-ram,id=far,size=128M", "-device", "virtio-mem-pci,memdev=far,requested-size=0")
# The ROM is migrated.
OPTION_ROM = ("-device", f"virtio-rng-pci,romfile={ROM}")
# Registers in a root port: PCIe's capability, and the address for those of SHPC.
EXPRESS, SHPC_ADDRESS = 0x54, 0xe0000000
UNRECEIVED = "'{}' cannot be unplugged before its memory has been migrated"


@both_interfaces
@pytest.mark.parametrize("exits", listed("on", "off", quick=["on"]))
def test_unplug(lab, exits):
    """A page of the device was requested: the device stays until all of its memory is received."""
    with far_pair(lab, DIMM, exits=exits, wrapper=PERTURB) as pair:
        destination = pair.destination
        pair.postcopy(pair.wire(pair.listen(), lie=Block(b"far")).uri, bandwidth=4096)
        let_go(pair)
        until(lambda: (pair.faults() or {}).get("oldest", {}).get("ramblock") == "far", "a page is asked for")
        assert_refused(destination, UNRECEIVED.format("dimm"), "device_del", id="dimm")
        eject_memory(lab, "destination")
        assert_refused(destination, "in use", "object-del", id="far")
        assert destination.cmd("query-memory-devices")
        assert pair.faults()["oldest"]["ramblock"] == "far"
        assert destination.status() == "postcopy-active"
        # The new connection passes on all pages.
        pair.pause()
        pair.recover_and_finish()
        unplug_memory(destination)


@both_interfaces
@pytest.mark.parametrize("exits, when", listed(
    ("on", "postcopy"), ("off", "postcopy"), ("on", "precopy"), quick=[("on", "postcopy")]))
def test_plug(lab, exits, when):
    """The device has memory that the source lacks, more than all of the source's: nothing of post-copy stays behind."""
    with Pair(lab, exits=exits, memory_mb="48,slots=1,maxmem=1G", mem=16) as pair:
        destination = pair.destination

        def plug():
            destination.cmd("object-add", qom_type="memory-backend-ram", id="more", size=64 * MIB)
            destination.cmd("device_add", driver="pc-dimm", id="dimm", memdev="more")

        pair.start()
        if when == "precopy":
            plug()
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=64 << 10)
        pair.source.cmd("migrate-start-postcopy")
        destination.wait_event("timing")
        if when == "postcopy":
            plug()
        pair.finish_fast()
        assert destination.cmd("query-memory-devices")
        names = [name for name, _ in destination.trace()]
        assert ("kvm_exit_on_missing_disable" in names) == (exits == "on")
        assert not destination.has_open("[userfaultfd]")


def power_off(qtest):
    """Powers off a slot of PCIe, by its control register."""
    qtest.pci_select(PCI_SLOT, EXPRESS + 0x18)
    qtest.cmd("outw", PCI_DATA, 0x700)


def power_off_by_shpc(qtest):
    """Powers off a slot of the standard hot-plug controller, which is in the bridge's first BAR."""
    qtest.pci_select(PCI_SLOT, 0x10)
    qtest.cmd("outl", PCI_DATA, SHPC_ADDRESS)
    qtest.pci_select(PCI_SLOT, 4)
    qtest.cmd("outw", PCI_DATA, 2)
    qtest.write(SHPC_ADDRESS + 0x14, bytes([0x3f, 1]))


# behind: what is in PCI_SLOT, if not the device itself
Hotplug = namedtuple("Hotplug", "machine behind address eject")
# The slot's first function has no memory.
HOTPLUG = {"acpi": Hotplug("pc", ("-device", f"virtio-rng-pci,id=first,romfile=,multifunction=on,addr={PCI_SLOT:#x}"),
                           f"addr={PCI_SLOT:#x}.1", lambda qtest: qtest.eject_pci(PCI_SLOT)),
           "pcie": Hotplug("q35", ("-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
                                   "-device", f"pcie-root-port,id=root-port,chassis=1,addr={PCI_SLOT:#x}"),
                           "bus=root-port", power_off),
           "shpc": Hotplug("pc", ("-global", "PIIX4_PM.acpi-pci-hotplug-with-bridge-support=off",
                                  "-device", f"pci-bridge,id=bridge,chassis_nr=1,shpc=on,addr={PCI_SLOT:#x}"),
                           "bus=bridge,addr=1", power_off_by_shpc)}


@pytest.mark.parametrize("kind, device", listed(
    ("acpi", OPTION_ROM), ("acpi", VIRTIO_MEM), ("pcie", OPTION_ROM), ("shpc", OPTION_ROM),
    quick=[("acpi", OPTION_ROM)]))
def test_unplug_pci(lab, kind, device):
    """A PCI device stays until its memory is received, even if the guest ejects it without a request."""
    hotplug = HOTPLUG[kind]
    lab.write_file(ROM, bytes(64 << 10))
    options = [*hotplug.behind, *device[:-1], f"{device[-1]},id=pci,{hotplug.address}"]
    with Pair(lab, machine=hotplug.machine, memory_mb="32,slots=1,maxmem=1G", both_options=options,
              destination_options=Qtest.arguments(lab, "destination")) as pair:
        destination = pair.destination
        names = {"pci", "first"} if kind == "acpi" else {"pci"}
        def there():
            return names & {each["name"] for each in destination.cmd("qom-list", path="/machine/peripheral")}
        pair.postcopy(bandwidth=4096)
        until(lambda: destination.status() == "postcopy-active", "postcopy runs")
        for name in ("pci", "bridge") if kind == "shpc" else ("pci",):
            assert_refused(destination, UNRECEIVED.format("pci"), "device_del", id=name)
        with Qtest(lab, "destination") as qtest:
            hotplug.eject(qtest)
            destination.wait_says(UNRECEIVED.format("pci"))
            assert there() == names
            pair.pause()
            pair.recover_and_finish()
            destination.cmd("device_del", id="pci")
            if kind == "acpi":
                hotplug.eject(qtest)
        until(lambda: not there(), "the device is unplugged")


@pytest.mark.parametrize("exits", listed("on", "off", quick=["on"]))
def test_no_memory_for_a_discarded_page(lab, exits):
    """The guest touches memory that virtio-mem has not plugged, and that the source never sends."""
    with far_pair(lab, VIRTIO_MEM, exits=exits, source=INJECT, destination=INJECT, zero=100) as pair:
        inject = pair.destination.inject
        receive_all(pair)
        inject.arm("postcopy-place")
        let_go(pair)
        until(lambda: inject.passed("postcopy-place"), "a page cannot be placed")
        pair.destination.wait_says("offset 0x")
        pair.wait_paused()
        pair.recover_and_finish()
