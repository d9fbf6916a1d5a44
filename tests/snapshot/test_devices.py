# SPDX-License-Identifier: GPL-2.0-or-later
"""A snapshot with flash, disks, and devices that write to guest memory by themselves; of a paused guest."""
import base64
import re
import select
import struct
import time

import pytest
from qemu.qmp import ExecuteError

from tests.lab.arches import on_both
from tests.lab.guest import MACHINE, payload
from tests.lab.linux_pair import LinuxSide
from tests.lab.pair import FORK, INJECT, event_us, until
from tests.lab.qtest import Qtest, eject_memory, unplug_memory
from tests.lab.snapshot import Machine
from tests.lab.vhost_user import serve
from tests.snapshot.test_cancel import start_held

# Addresses: on x86 in the guest's firmware; on arm64 in the second flash, of 64 MiB
FLASH = {"x86_64": 0xffff4000, "aarch64": 0x04000000}
PROGRAM, READ_ARRAY = 0x40, 0xff

PVPANIC, PANICKED = 0x505, 1
DIMM = ("-object", "memory-backend-ram,id=more,size=8M", "-device", "pc-dimm,id=dimm,memdev=more")
SLOT = 5

# A disk's boot sector: counts in memory, and writes the sector with the counter to the disk, indefinitely.
COUNTER = 0x8000
READY = b'{"event": "ready"}\n'
BOOT_SECTOR = b"".join((
    b"\x31\xc0\x8e\xd8\x8e\xc0\xfc",                            # ds = es = 0
    b"\xbe\x40\x7c\xb9" + struct.pack("<H", len(READY)),        # si = text, cx = length
    b"\xba\xe9\x00\xf3\x6e",                                    # outsb to port 0xe9
    b"\x66\xff\x06" + struct.pack("<H", COUNTER),               # loop: incl COUNTER
    b"\xb8\x01\x03\xbb" + struct.pack("<H", COUNTER),           # write one sector from es:COUNTER
    b"\xb9\x02\x00\xba\x80\x00\xcd\x13",                        # to sector 2, of disk 0x80
    b"\xeb\xeb",                                                # jmp loop
)).ljust(0x40, b"\x90") + READY
BOOT_SECTOR = BOOT_SECTOR.ljust(510, b"\0") + b"\x55\xaa"


@on_both()
def test_flash(place):
    """The snapshot has the flash's contents at its instant, although the flash is written before it is saved."""
    arch, flash = place.arch, FLASH[place.arch]
    image, unit = payload(arch=arch), 0
    if arch == "aarch64":
        image, unit = f"{place.tmp}/flash", 1
        place.run(f"rm -f {image}; truncate -s 64M {image}", check=True)
    drive = f"if=pflash,unit={unit},format=raw,snapshot=on,file={image}"
    with Machine(place, INJECT, mem=4, machine=MACHINE[arch], payload=payload(arch=arch),
                 arguments=["-drive", drive], taker=Qtest.arguments(place, "source")) as machine, Qtest(place) as qtest:
        side = machine.side
        [was] = qtest.read(flash, 1)
        # Programming flash changes KVM's memory slots, for which vCPUs have to leave KVM: none may wait for a page.
        side.cmd("stop")
        start_held(machine, "snapshot-iterate")
        qtest.cmd("writeb", flash, PROGRAM)
        qtest.send("writeb", flash, was ^ 0xff)
        until(lambda: side.main_thread_waits() or select.select([qtest.socket], [], [], 0)[0],
              "QEMU waits for the page, or has written to it")
        side.inject.release("snapshot-iterate")
        qtest.answer()
        qtest.cmd("writeb", flash, READ_ARRAY)
        assert qtest.read(flash, 1) == bytes([was ^ 0xff])
        machine.wait()
        machine.restore(keep=True, status="paused")
        with Qtest(place, "destination") as restored:
            assert restored.read(flash, 1) == bytes([was])


def test_flush_is_not_in_the_pause(place):
    """The pause is shorter than a flush of the disk, which still has to be made, takes afterwards."""
    with Machine(place, mem=4, taker=["-blockdev", "null-co,node-name=slow,latency-ns=2000000000"]) as machine:
        machine.side.hmp('qemu-io slow "write 0 4k"')   # so that there is data to flush
        machine.take()
        at = {event["event"]: event_us(event) / 1e6 for event in machine.side.qmp.get_events()}
        start = time.monotonic()
        machine.side.hmp("qemu-io slow flush")
        assert at["RESUME"] - at["STOP"] < time.monotonic() - start


@pytest.mark.parametrize("told", ["event", "status"])
def test_disks_and_memory_of_one_instant(place, told):
    """The guest, which was stopped for its disk, resumes as soon as possible: memory is of that instant, too."""
    disk, copy = f"{place.tmp}/disk", f"{place.tmp}/copy"
    place.run(f"echo {base64.b64encode(BOOT_SECTOR).decode()} | base64 -d >{disk} && truncate -s 1M {disk}; "
              f"rm -f {disk}.later", check=True)

    def blockdev(path):
        return ["-blockdev", f"raw,node-name=disk,file.driver=file,file.filename={path}"]

    def counter(side):
        return struct.unpack("<I", side.memory(COUNTER, 4))[0]

    with Machine(place, INJECT, cpus=1, payload="bios-256k.bin", arguments=["-device", "ide-hd,drive=disk"],
                 taker=blockdev(disk)) as machine:
        side = machine.side
        until(lambda: counter(side) > 99, "the guest counts")

        def heard():
            status = side.status()      # earlier events have been received by its answer
            events = [event["event"] for event in side.qmp.get_events()]
            return "BACKGROUND_SNAPSHOT_PROTECTED" in events if told == "event" else status in ("active", "completed")

        side.cmd("stop")
        side.cmd("transaction", actions=[{"type": "blockdev-snapshot-sync", "data": {
            "node-name": "disk", "snapshot-file": f"{disk}.later", "snapshot-node-name": "later"}}])
        stopped = counter(side)
        start_held(machine, "snapshot-stop")
        assert not heard(), "memory can still change"
        side.inject.release("snapshot-stop")
        until(heard, f"told by the {told}", pause=0.01)
        side.cmd("cont")
        machine.wait()
        until(lambda: counter(side) > stopped + 9, "the guest resumes")
        place.run(f"cp {disk} {copy}", check=True)
        restored = machine.load(FORK, arguments=blockdev(copy))
        until(lambda: restored.cmd("query-status")["status"] != "inmigrate", "the guest is restored")
        [on_disk] = struct.unpack("<I", place.read_file(disk)[512:516])
        assert counter(restored) - on_disk in (0, 1)
        restored.cmd("cont")
        until(lambda: counter(restored) > stopped + 9, "the restored guest resumes")


class LinuxMachine(Machine):
    side_type = LinuxSide


def test_virtio_of_linux(place):
    """A port of virtio-serial is in use, and the guest has never set up the queue of virtio-rng, whose driver it lacks:
    both guests go on."""
    with LinuxMachine(place, memory_mb=160, cpus=2, mem=8, writers=1, computers=1, interval=10,
                      arguments=["-device", "virtio-rng-pci"]) as machine:
        def lines():
            return len(machine.side.report().lines)

        until(lines, "the guest reports")
        machine.start()
        before = lines()
        machine.wait()
        assert lines() > before, "the port was not used while the snapshot was taken"
        until(machine.load().checked, "the restored guest reports, and has checked its memory")
        before = lines()
        until(lambda: lines() > before, "the guest runs")
        machine.side.check_log()


def taken_without(place, device, name):
    """The error names a device that writes to memory, and after its unplug a snapshot can be taken."""
    device[-1] += f",id=writer,addr={SLOT}"
    with Machine(place, mem=4, backend="memfd", taker=[*device, *Qtest.arguments(place, "source")]) as machine:
        with pytest.raises(ExecuteError, match=f"{name} .*: unplug it, or save") as error:
            machine.start()
        assert str(error.value) in machine.side.cmd("query-migrate")["blocked-reasons"]
        machine.side.cmd("device_del", id="writer")
        with Qtest(place) as qtest:
            qtest.eject_pci(SLOT)
        machine.take()


def test_vhost_user(place):
    path = f"{place.tmp}/backend"
    place.run(f"rm -f {path}* && truncate -s 1M {path}.disk", check=True)
    job = serve(place, path, f"{path}.disk")
    try:
        taken_without(place, ["-chardev", f"socket,id=disk,path={path}", "-device", "vhost-user-blk-pci,chardev=disk"],
                      "vhost-user backend of chardev 'disk'")
    finally:
        job.kill()


def test_ivshmem(place):
    taken_without(place, ["-object", "memory-backend-ram,id=shared,share=on,size=1M",
                          "-device", "ivshmem-plain,memdev=shared,master=on"], "peers of device 'writer'")


def test_nvme_disk_while_it_is_taken(place):
    """QEMU's own NVMe driver finds no such device; but during a snapshot, QEMU refuses it before the search."""
    with Machine(place, INJECT, mem=4) as machine:
        side = machine.side

        def error():
            with pytest.raises(ExecuteError) as error:
                side.cmd("blockdev-add", driver="nvme", node_name="disk", device="ffff:ff:1f.7", namespace=1)
            return str(error.value)

        looked = error()
        start_held(machine, "snapshot-iterate")
        assert re.search("in progress.*NVMe device 'ffff:ff:1f.7' of block node 'disk' writes to", error())
        side.inject.release("snapshot-iterate")
        machine.wait()
        assert error() == looked
        machine.assert_whole()


# A guest that does not run, and one that gives memory back

def status(machine):
    return machine.side.cmd("query-status")["status"]


def test_panicked(place):
    """The guest stays panicked, in the snapshot too."""
    with Machine(place, mem=4, arguments=["-device", "pvpanic", "-action", "panic=pause"]) as machine:
        machine.side.hmp(f"o/b {PVPANIC:#x} {PANICKED}")
        until(lambda: status(machine) == "guest-panicked", "the guest panics")
        machine.take()
        assert status(machine) == "guest-panicked"
        machine.restore(status="guest-panicked")
        machine.side.cmd("cont")
        machine.assert_whole()


def test_stopped_while_it_is_taken(place):
    """Only the user starts a stopped guest, not the begin of the snapshot."""
    with Machine(place, qemu=INJECT, mem=4) as machine:
        machine.side.cmd("stop")
        start_held(machine, "snapshot-iterate")
        machine.side.cmd("cont")
        machine.side.inject.release("snapshot-iterate")
        machine.wait()
        assert status(machine) == "running"
        machine.restore(status="paused")
        machine.assert_whole()


def test_ejected_memory(place):
    """The guest was requested before to give memory back, and does so during the snapshot: it stays until the end."""
    with Machine(place, qemu=INJECT, mem=4, memory_mb="64,slots=1,maxmem=1G", arguments=DIMM,
                 taker=Qtest.arguments(place, "source")) as machine:
        side = machine.side
        side.cmd("device_del", id="dimm")
        start_held(machine, "snapshot-iterate")
        eject_memory(place, "source")
        assert side.cmd("query-memory-devices")
        side.inject.release("snapshot-iterate")
        machine.wait()
        machine.restore()
        unplug_memory(side)
        side.cmd("object-del", id="more")
        machine.assert_goes_on()
