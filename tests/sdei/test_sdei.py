# SPDX-License-Identifier: GPL-2.0-or-later
"""SDEI, served by QEMU to an arm64 guest that checks it itself (tests/guest/aarch64/sdei.c)."""
import contextlib
import shlex

import pytest

from tests.lab import guest
from tests.lab.arches import on_aarch64
from tests.lab.pair import FORK, INJECT, STOCK, Pair, Side, until
from tests.lab.paths import qemu as path_of

ON = ("-global", "arm-cpu.kvm-sdei=on")
CPUS = 5
WAYS = {"precopy": None, "postcopy": ("postcopy-preempt",)}


def payload():
    return {"payload": guest.payload("sdei", "aarch64"), "cpus": CPUS, "memory_mb": 32}


@contextlib.contextmanager
def one(lab, qemu=FORK, words=ON):
    side = Side(lab, "source", qemu, words, payload())
    try:
        side.connect()
        yield side
    finally:
        side.end()


@contextlib.contextmanager
def pair(lab, way, **options):
    """A pair whose guest has ended its checks on the source."""
    both = Pair(lab, capabilities=WAYS[way], **payload(),
                **{"source_options": ON, "destination_options": ON} | options)
    both.capabilities = (*both.capabilities, "return-path")
    with both:
        check(both.source, "ready")
        yield both


def check(side, event):
    """The guest has made checks, without a failure."""
    end = side.wait_event(event)
    report = side.report()
    assert end["checks"] > 0
    assert end["failed"] == 0, report.all("failed") + report.all("order")
    return end


def is_refused(both, reason):
    """The destination reports the reason, and the guest resumes on the source."""
    both.source.cmd("migrate", uri=both.listen())
    until(lambda: both.source.status() == "failed", "the migration fails")
    both.destination.wait_says(reason)
    until(lambda: both.source.cmd("query-status")["running"], "the guest runs on the source")


@on_aarch64("qemu", [FORK, INJECT], quick=[INJECT])
def test_conformance(lab, qemu):
    with one(lab, qemu) as side:
        end = check(side, "ready")
        assert end["test_events"] == (qemu == INJECT)
        assert not end["async_pf"]


@on_aarch64(quick=True)
def test_calls_of_async_page_faults(lab):
    with one(lab, words=(*ON, "-global", "arm-cpu.x-kvm-async-pf=on")) as side:
        assert check(side, "ready")["async_pf"]


@on_aarch64("way", WAYS)
def test_migration(lab, way):
    """Events run, are pending, masked and disabled during the migration."""
    with pair(lab, way, source=INJECT, destination=INJECT) as both:
        getattr(both, way)()
        both.wait_completed()
        check(both.destination, "moved")
        assert not both.source.report().all("moved")


@on_aarch64(quick=True)
def test_stops(lab):
    """One vCPU signals another one continuously: an event in flight at a stop is delivered when the VM runs."""
    with pair(lab, "precopy") as both:
        for _ in range(30):
            both.source.cmd("stop")
            both.source.cmd("cont")
        both.precopy()
        moved = check(both.destination, "moved")
        assert moved["signals"] > 30
        assert moved["injected"] == 0


@on_aarch64(quick=True)
def test_event_of_qemu(lab):
    """QEMU itself raises the event, on both sides."""
    with pair(lab, "precopy", source=INJECT, destination=INJECT) as both:
        for side in both.sides:
            side.inject.arm("sdei-inject")
        both.source.cmd("stop")
        both.source.cmd("cont")
        both.precopy()
        assert check(both.destination, "moved")["injected"] == 2
        assert all(side.inject.passed("sdei-inject") for side in both.sides)


@on_aarch64()
def test_refused(lab):
    """A QEMU without the property refuses the guest, which continues with all its events, and moves to another QEMU."""
    with pair(lab, "precopy", source=INJECT, destination=INJECT, destination_options=()) as both:
        is_refused(both, "CPU property kvm-sdei is on on the source: start the destination with the same")
        both.destination.end()
        both.destination = both.sides[1] = Side(lab, "destination", INJECT, [*ON, "-incoming", "defer"], both.options)
        both.destination.connect()
        both.source.cmd("migrate", uri=both.listen())
        both.source.wait_status("completed")
        check(both.destination, "moved")


@pytest.mark.skipif(FORK == INJECT, reason="a sanitizer's build has the same events on both sides")
@on_aarch64()
def test_other_events(lab):
    """A QEMU without the source's events refuses the guest."""
    with pair(lab, "precopy", source=INJECT) as both:
        is_refused(both, "kvm-sdei: the source has other events than this QEMU: number 1 is 0x40400100 "
                         "there and 0xffffffff here")


@on_aarch64(quick=True)
def test_reset(lab):
    """A reset while handlers run and events are pending removes both."""
    with one(lab, INJECT) as side:
        check(side, "ready")
        side.cmd("set-action", reboot="reset")
        side.cmd("system_reset")
        until(lambda: len(side.report().all("ready")) == 2, "the guest after its reset")
        assert not side.report().all("failed")


@on_aarch64("qemu", [FORK, STOCK], quick=[FORK])
def test_off_by_default(lab, qemu):
    """The guest exits at once, perhaps before QEMU's monitor is connected."""
    side = Side(lab, "source", qemu, (), payload())
    assert side.job.wait().rc == 0
    assert side.report().all("none")


def run(lab, words, inject=""):
    """Run QEMU to its end, without a guest."""
    directory = f"{lab.tmp}/sdei.inject"
    lab.run(f"rm -rf {directory}; mkdir {directory}; {f'touch {directory}/{inject}' if inject else ':'}", check=True)
    argv = [path_of(lab.arch, INJECT), *lab.qemu_words, "-nodefaults", "-display", "none", *words]
    return lab.run(f"QEMU_INJECT={directory} " + shlex.join(argv))


@on_aarch64(quick=True)
def test_kvm_without_a_filter(lab):
    ended = run(lab, ["-machine", "virt", *ON], "sdei-no-filter")
    assert ended.rc == 1
    assert ("kvm-sdei=on: this host's KVM does not support KVM_ARM_VM_SMCCC_FILTER, which Linux has since 6.4"
            in ended.output)


@on_aarch64(quick=True)
def test_device_tree(lab):
    for words in (ON, ()):
        tree = f"{lab.tmp}/sdei.dtb"
        ended = run(lab, ["-machine", f"virt,dumpdtb={tree}", *words])
        assert ended.rc == 0, ended.output
        found = lab.read_file(tree)
        assert (b"arm,sdei-1.0\0" in found) == (words == ON)
        assert (b"firmware\0" in found) == (words == ON)
