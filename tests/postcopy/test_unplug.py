# SPDX-License-Identifier: GPL-2.0-or-later
"""Memory devices on the destination: one that is unplugged, and one that has no memory yet."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab import guest
from tests.lab.pair import INJECT, Pair, until
from tests.lab.wire import MAIN, Block, Endless

SIZE_MB = 8
DIMM = ("-object", f"memory-backend-ram,id=far,size={SIZE_MB}M", "-device", "pc-dimm,id=dimm,memdev=far")
PCI_SLOT, ROM = 30, "/tmp/option.rom"
PCI = f"id=pci,addr={PCI_SLOT:x}"
VIRTIO_MEM = ("-object", "memory-backend-ram,id=far,size=128M",
              "-device", f"virtio-mem-pci,{PCI},memdev=far,requested-size=0")
# The ROM is migrated.
OPTION_ROM = ("-device", f"virtio-rng-pci,{PCI},romfile={ROM}")
UNRECEIVED = "'{}' cannot be unplugged before postcopy has received its memory"
# What is freed does not look as it did.
PERTURB = ("env", "MALLOC_PERTURB_=165")


def far_pair(lab, device, cpus=1, **options):
    return Pair(lab, memory_mb="32,slots=1,maxmem=1G", cpus=cpus, payload=guest.payload("far"), mem=SIZE_MB,
                source_options=device, destination_options=device, **options)


def let_go(pair):
    """The guest touches the device's memory."""
    until(lambda: pair.destination.cmd("query-status")["status"] == "running", "the guest runs")
    pair.destination.hmp("o/b 0x70 0x40")
    pair.destination.hmp("o/b 0x71 1")


def eject(side):
    """What the guest's ACPI does: select the slot, and eject it."""
    side.hmp("o/w 0xa00 0")
    side.hmp("o/b 0xa14 8")


@pytest.mark.parametrize("exits", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_unplug(lab, exits):
    """A page of the device has been asked for: the device stays until all of it has come."""
    with far_pair(lab, DIMM, exits=exits, wrapper=PERTURB) as pair:
        destination = pair.destination
        pair.postcopy(pair.wire(pair.listen(), lie=Block(b"far")).uri, bandwidth=4096)
        let_go(pair)
        until(lambda: (pair.faults() or {}).get("oldest", {}).get("ramblock") == "far", "a page is asked for")
        with pytest.raises(ExecuteError, match=UNRECEIVED.format("dimm")):
            destination.cmd("device_del", id="dimm")
        eject(destination)
        with pytest.raises(ExecuteError, match="in use"):
            destination.cmd("object-del", id="far")
        assert destination.cmd("query-memory-devices")
        assert pair.faults()["oldest"]["ramblock"] == "far"
        assert destination.status() == "postcopy-active"
        # By a connection that does not lie.
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
        pair.recover_and_finish()
        destination.cmd("device_del", id="dimm")
        eject(destination)
        until(lambda: not destination.cmd("query-memory-devices"), "the device is unplugged")


def eject_pci(side):
    """The same for PCI: select the bus, and eject the device. Returns what QEMU says."""
    side.hmp("o/w 0xae10 0")
    return side.hmp(f"o/w 0xae08 {1 << PCI_SLOT:#x}")


@pytest.mark.parametrize("device", [pytest.param(OPTION_ROM, id="option-rom"),
                                    pytest.param(VIRTIO_MEM, id="virtio-mem", marks=pytest.mark.slow)])
def test_unplug_pci(lab, device):
    """A PCI device stays until its memory has come, also if the guest ejects it unasked."""
    lab.write_file(ROM, bytes(64 << 10))
    with Pair(lab, memory_mb="32,slots=1,maxmem=1G", source_options=device,
              destination_options=device) as pair:
        destination = pair.destination
        def there():
            return "pci" in (each["name"] for each in destination.cmd("qom-list", path="/machine/peripheral"))
        pair.postcopy(bandwidth=4096)
        until(lambda: destination.status() == "postcopy-active", "postcopy runs")
        with pytest.raises(ExecuteError, match=UNRECEIVED.format("pci")):
            destination.cmd("device_del", id="pci")
        assert UNRECEIVED.format("pci") in eject_pci(destination)
        assert there()
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
        pair.recover_and_finish()
        destination.cmd("device_del", id="pci")
        eject_pci(destination)
        until(lambda: not there(), "the device is unplugged")


@pytest.mark.parametrize("exits", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_no_memory_for_a_discarded_page(lab, exits):
    """The guest touches memory that virtio-mem has not plugged, of which the source sends nothing."""
    with far_pair(lab, VIRTIO_MEM, exits=exits, source=INJECT, destination=INJECT, zero=100) as pair:
        inject = pair.destination.inject
        pair.postcopy(pair.wire(pair.listen(), lie=Endless(), lying=MAIN).uri, bandwidth=0)
        until(lambda: "migration_completion_postcopy_end_after_complete" in dict(pair.source.trace()),
              "the source has sent all")
        pair.destination.wait_event("timing")
        until(lambda: not pair.faults()["awaited"], "all has come")
        inject.arm("postcopy-place")
        let_go(pair)
        until(lambda: inject.passed("postcopy-place"), "a page cannot be placed")
        pair.destination.wait_says("offset 0x")
        pair.wait_paused()
        pair.recover_and_finish()
