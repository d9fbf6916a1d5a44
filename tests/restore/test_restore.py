# SPDX-License-Identifier: GPL-2.0-or-later
"""A guest runs while its memory is in a file: which pages are read, and the guest's state when the file
cannot be read."""
import re
import struct

import pytest
from qemu.qmp.qmp_client import ExecuteError

from tests.lab import other_qemu
from tests.lab.arches import listed, on_both
from tests.lab.backends import BACKENDS, guest_on
from tests.lab.missing_at_load import SLOT, set_queue
from tests.lab.other_qemu import PEER
from tests.lab.pair import FORK, INJECT, STOCK, until
from tests.lab.snapshot import Machine
from tests.lab.text import search
from tests.postcopy.steps import assert_refused

LAZY = ("mapped-ram", "postcopy-ram")
QUICK = ("anonymous", "memfd", "hugetlb-file")
DIMM = ("-object", "memory-backend-ram,id=more,size=8M", "-device", "pc-dimm,id=dimm,memdev=more")
# Only pages that the guest touches are read.
NO_REST = ("-global", "migration.restore-background=off")


def from_file(lab, **options):
    return Machine(lab, capabilities=["mapped-ram"], **{"mem": 8, "memory_mb": 64} | options)


def loaded(machine, capabilities=LAZY, qemu=FORK):
    """A QEMU that can run the guest from the file, and reads only pages that the guest touches."""
    side = machine.load(qemu, capabilities=capabilities, arguments=NO_REST)
    until(lambda: side.status() == "postcopy-active", "the guest can run")
    return side


def finish(side):
    """Let the guest run to its end, and check it; returns query-migrate."""
    if until(lambda: status if (status := side.cmd("query-status")["status"]) != "inmigrate" else None,
             "the guest is there") == "paused":
        side.cmd("cont")
    side.wait_event("end")
    assert side.report().intact, side.report().all("bad")
    side.cmd("migrate-set-parameters", restore_background=True)
    until(lambda: side.status() == "completed", "all of the file has been read")
    info = side.cmd("query-migrate")
    assert info["postcopy-faults"]["awaited"] == 0 and "postcopy-file" not in info
    return info


def switches(side, cpu):
    """How often the vCPU's thread has slept."""
    return int(search(r"^voluntary_ctxt_switches:\s+(\d+)",
                      side.lab.run(f"grep -h -A99 'CPU {cpu}/' /proc/$(cat {side.pidfile})/task/*/status",
                                   check=True).output)[1])


@on_both("kind", listed(*BACKENDS, quick=QUICK), quick=["anonymous"])
def test_memory(lab, kind):
    """By exits, with any kind of memory."""
    with from_file(lab, **guest_on(kind, "disjoint")) as machine:
        machine.save()
        machine.side.end()
        faults = finish(machine.load(capabilities=LAZY, arguments=NO_REST))["postcopy-faults"]
        assert faults["exits"] > 8, faults


def test_each_vcpu_reads_for_itself(lab):
    """The vCPU sleeps for no page, and no other thread works for it."""
    with from_file(lab, mem=32, cpus=1) as machine:
        machine.save()
        side = loaded(machine)
        before = switches(side, 0)
        faults = finish(side)["postcopy-faults"]
        assert faults["exits"] > 1000 and faults["uffd"] < faults["exits"] / 20
        assert switches(side, 0) - before < faults["exits"] / 20


@pytest.mark.parametrize("writer", [STOCK, PEER])
def test_files_of_others(place, writer):
    """The guest was saved stopped, and stays stopped; some devices are larger than a buffer."""
    if writer == PEER:
        other_qemu.put(place)
    with from_file(place, qemu=writer, machine="pc-i440fx-10.0", arguments=["-device", "virtio-serial"]) as machine:
        machine.save()
        side = machine.load(capabilities=LAZY)
        until(lambda: side.status() == "completed", "all of the file has been read")
        assert side.cmd("query-status")["status"] == "paused"
        finish(side)


@pytest.mark.parametrize("what", ["/dev/fdset/1", "offset"])
def test_other_names(place, what):
    with from_file(place) as machine:
        uri = f"file:{machine.file},offset=0x10000" if what == "offset" else f"file:{what}"
        machine.save(uri if what == "offset" else "")
        side = machine.start_destination(FORK, ["-add-fd", "fd=9,set=1"],
                                         ("sh", "-c", f'exec 9<{machine.file}; exec "$0" "$@"'))
        side.set_capabilities(*LAZY)
        side.cmd("migrate-incoming", uri=uri)
        finish(side)


def test_memory_that_is_not_plugged(place):
    """Unplugged memory of virtio-mem is neither read nor placed."""
    with from_file(place, memory_mb="64M,maxmem=4G",
                   arguments=["-object", "memory-backend-ram,id=plugged,size=1G",
                              "-device", "virtio-mem-pci,memdev=plugged"]) as machine:
        machine.save()
        machine.side.end()
        machine.side = machine.load(capabilities=LAZY)
        finish(machine.side)
        assert machine.resident_kib() < 512 << 10


def test_huge_pages(lab):
    """Untouched memory is placed in huge pages, as if all had been read first."""
    with from_file(lab, mem=32, memory_mb=128) as machine:
        machine.save()
        machine.side = machine.load(capabilities=LAZY)
        until(lambda: machine.side.status() == "completed", "all of the file has been read")
        assert machine.huge_kib() > 24 << 10
        finish(machine.side)


def test_running_guest(place):
    """A background snapshot of a running guest. Most of its memory is a hole, which is neither read nor filled."""
    with from_file(place, memory_mb=1024) as machine:
        machine.take()
        side = machine.load(capabilities=LAZY)
        until(lambda: side.status() == "completed", "all of the file has been read")
        machine.side.end()
        machine.side = side
        assert machine.resident_kib() < 512 << 10
        finish(side)


def refused(machine, words, capabilities=LAZY, arguments=()):
    with pytest.raises(ExecuteError, match=words):
        machine.load(capabilities=capabilities, arguments=arguments)
    side = machine.sides[-1]
    assert side.cmd("query-status")["status"] == "inmigrate"
    side.end()


def test_what_it_has_no_use_for(place):
    with from_file(place) as machine:
        machine.save()
        refused(machine, "no use for postcopy-preempt: switch it off", (*LAZY, "postcopy-preempt"))
        refused(machine, "no use for multifd: switch it off", (*LAZY, "multifd"))
        refused(machine, "no use for postcopy-fetch-channels",
                arguments=["-global", "migration.postcopy-fetch-channels=2"])
        machine.side.cmd("cont")
        machine.side.set_capabilities("postcopy-ram")
        assert_refused(machine.side, "switch postcopy-ram off to save", "migrate", uri=f"file:{machine.file}")


def fails(machine, words, capabilities=LAZY):
    """The guest does not run, and QEMU reports the reason."""
    side = machine.load(capabilities=capabilities, arguments=["-S"])
    until(lambda: words in side.job.output, words, timeout=30)
    until(lambda: not side.job.running, "QEMU has ended")


# In the header of pc.ram: a version and three numbers
@pytest.mark.parametrize(("offset", "value", "words"), [
    (4, 0, "pages of 0 bytes in the file"), (4, 8192, "pages of 8192 bytes in the file"),
    (20, 1 << 62, "has been truncated"), (20, 3, "bad alignment"), (12, 1 << 62, "reading dirty bitmap"),
])
def test_crafted_header(place, offset, value, words):
    with from_file(place) as machine:
        machine.save()
        machine.side.end()
        octal = "".join(rf"\{byte:03o}" for byte in struct.pack(">Q", value))
        at = place.run(f"grep -abo pc.ram {machine.file} | head -1", check=True).output
        header = int(at.split(":")[0]) + len("pc.ram") + 8
        place.run(f"printf '{octal}' | dd of={machine.file} conv=notrunc bs=1 seek={header + offset}", check=True)
        fails(machine, words)


@pytest.mark.parametrize(("capabilities", "words"), [
    (LAZY, "it has been truncated"), (("mapped-ram", "multifd"), "the file is truncated")], ids=["lazy", "multifd"])
def test_truncated_file(place, capabilities, words):
    with from_file(place) as machine:
        machine.save()
        place.run(f"truncate -s 8M {machine.file}", check=True)
        fails(machine, words, capabilities)


def test_bitmaps_that_nobody_wrote(place):
    """QEMU 10.0's background snapshots contain pages, but their bitmaps are empty."""
    with from_file(place, qemu=STOCK) as machine:
        machine.take()
        fails(machine, "bitmaps name none")


def test_unreadable_page_of_a_device(place):
    """The main thread loads the device, and misses its queue: the guest must not run with zeros there."""
    with from_file(place, mem=16, zero=0, arguments=["-device", f"virtio-rng-pci,addr={SLOT:#x},disable-modern=on"]) \
            as machine:
        boot = machine.side.wait_event("boot")
        set_queue(machine.side, boot["test_address"] >> 12)
        machine.save()
        side = machine.load(INJECT, LAZY, NO_REST)
        finish(side)
        side.end()
        side = machine.start_destination(INJECT, ["-S"])
        side.set_capabilities(*LAZY)
        side.inject.arm("postcopy-file-read")
        side.cmd("migrate-incoming", uri=f"file:{machine.file}")
        result = side.job.wait(60)
        assert result.rc == 1
        assert re.search("cannot read .*devices have been loaded with pages that cannot be read", result.output, re.S)


def test_recovery(place):
    """The file was truncated. By out-of-band commands, since QEMU's main thread may wait for a page."""
    with from_file(place, mem=32) as machine:
        machine.save()
        file, good, other = (machine.file + name for name in ("", ".good", ".other"))
        place.run(f"cp --sparse=always {file} {good}; cp {file} {other}; "
                  f"dd if=/dev/zero of={other} bs=64K count=16 conv=notrunc", check=True)
        side = loaded(machine, ("events", *LAZY))
        place.run(f"truncate -s 4096 {file}", check=True)
        side.cmd("cont")
        until(lambda: side.status() == "postcopy-paused", "the guest has missed a page")
        info = side.cmd("query-migrate")
        assert search(rf"continues after migrate-recover.*cannot read {file} at \d+ \(0x[0-9a-f]+ of pc.ram\)",
                      info["error-desc"])
        assert info["postcopy-file"]["remaining"] > 0
        assert side.cmd("query-status")["status"] == "running"
        # The same file, still truncated; another guest's file
        for wrong in file, other:
            assert not side.cmd_out_of_band("migrate-recover", uri=f"file:{wrong}")
            side.wait_says("postcopy stays paused: this is not the file")
            assert side.status() == "postcopy-paused"
        assert not side.cmd_out_of_band("migrate-recover", uri=f"file:{good}")
        assert "error-desc" not in finish(side)
        place.run(f"rm {good} {other}", check=True)


def test_paused_by_hand(place):
    """Until a recovery, no page is read."""
    with from_file(place, mem=32) as machine:
        machine.save()
        side = loaded(machine)
        assert not side.cmd_out_of_band("migrate-pause")
        assert "migrate-pause" in side.cmd("query-migrate")["error-desc"]
        remaining = side.cmd("query-migrate")["postcopy-file"]["remaining"]
        side.cmd("cont")
        until(lambda: side.cmd("query-migrate")["postcopy-faults"]["awaited"], "the guest misses a page")
        assert side.cmd("query-migrate")["postcopy-file"]["remaining"] == remaining
        side.cmd("migrate-recover", uri=f"file:{machine.file}")
        finish(side)


def test_recovery_before_the_pause_is_noticed(place):
    """The thread of the rest, which requests pages again, reads a page from the pause until after the recovery."""
    with from_file(place, mem=32) as machine:
        machine.save()
        side = loaded(machine, qemu=INJECT)
        side.inject.arm("postcopy-file-rest")
        side.cmd("migrate-set-parameters", restore_background=True)
        side.inject.wait_held("postcopy-file-rest")
        # The page that the guest misses must not be near the one that is read after the recovery
        side.inject.hold_next("postcopy-file-rest")
        side.inject.hold_next("postcopy-file-rest")
        side.cmd("migrate-set-parameters", restore_background=False)
        side.cmd("migrate-pause")
        side.cmd("cont")
        until(lambda: side.cmd("query-migrate")["postcopy-faults"]["awaited"], "the guest misses a page")
        side.cmd("migrate-recover", uri=f"file:{machine.file}")
        side.inject.release("postcopy-file-rest")
        finish(side)


def test_before_all_has_come(place):
    """As on a destination: the guest cannot be saved or migrated, or memory unplugged; and its file is protected."""
    with from_file(place, memory_mb="64M,slots=1,maxmem=1G", arguments=DIMM) as machine:
        machine.save()
        side = loaded(machine)
        total = side.cmd("query-migrate")["postcopy-file"]["total"]
        assert_refused(side, "guest memory are missing", "migrate", uri=f"file:{machine.file}.other")
        side.add_disk()
        assert "guest memory are missing" in side.run_job("snapshot-save", tag="new", vmstate="disk", devices=["disk"])
        assert_refused(side, "cannot be unplugged before its memory has been migrated", "device_del", id="dimm")
        # Another snapshot would truncate the file
        machine.side.cmd("cont")
        assert_refused(machine.side, "A guest runs from this file", "migrate", uri=f"file:{machine.file}")
        assert machine.snapshot_bytes() > total
        side.cmd("stop")
        finish(side)
        machine.take()          # all has been read
        side.end()
        side = loaded(machine)
        side.cmd("quit")
        assert side.job.wait(60).rc == 0


def test_rest_stays_in_the_file(place):
    """Threads for the purpose read touched pages that the page cache lacks."""
    with from_file(place, mem=32) as machine:
        machine.save()
        place.run(f"sync {machine.file}; dd if={machine.file} iflag=nocache count=0", check=True)
        side = loaded(machine)
        side.cmd("cont")
        side.wait_event("end")
        file = side.cmd("query-migrate")["postcopy-file"]
        assert file["uncached"] > 8
        assert 0 < file["remaining"] < file["total"] and file["filename"] == machine.file
        side.cmd("migrate-set-parameters", max_postcopy_bandwidth=1 << 20)
        side.cmd("migrate-set-parameters", restore_background=True)
        until(lambda: side.cmd("query-migrate")["postcopy-file"]["remaining"] < file["remaining"], "the rest is read")
        assert side.status() == "postcopy-active", "at 1 MiB/s"
        side.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)
        finish(side)


def pages_of(place, path):
    version, *lines = place.run(f"cat {path}", check=True).output.splitlines()
    assert version == "QEMU working set 1"
    return {(words[2], int(words[0], 16) + i) for line in lines if len(words := line.split()) == 3
            for i in range(int(words[1], 16))}


def test_working_set(place):
    """Missed pages are read first the next time, and stay in the set; invalid lines in it are harmless."""
    path = f"{place.tmp}/set"
    arguments = (*NO_REST, "-global", f"migration.restore-working-set={path}")
    with from_file(place, mem=32) as machine:
        machine.save()
        place.run(f"rm -f {path}")

        def missed(says=""):
            side = machine.load(capabilities=LAZY, arguments=arguments)
            requests = finish(side)["postcopy-faults"]["requests"]
            side.wait_says(says)
            side.end()
            return requests

        assert missed() / 2 > missed()
        first = pages_of(place, path)
        place.run(f"echo 'ffffffffffffff 10 pc.ram' >> {path}; echo '0 10 no.such' >> {path}; "
                  f"echo rubbish >> {path}", check=True)
        missed()
        assert pages_of(place, path) >= first
        place.run(f"echo a disk > {path}", check=True)
        missed("not a working set: it stays")
        assert place.run(f"cat {path}").output == "a disk\n"
        place.run(f"echo QEMU working set 0 > {path}", check=True)
        missed("not a working set of this version")
