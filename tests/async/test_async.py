# SPDX-License-Identifier: GPL-2.0-or-later
"""Async page faults from vCPU exits, taken by a Linux guest: on x86-64 an unmodified one; on arm64 the lab's, which
has the guest's side. On arm64 also: options that QEMU refuses, and its service for a guest without them."""
import time
from dataclasses import replace

import pytest

from tests.lab import linux_guest
from tests.lab.arches import both_interfaces, choices, on_aarch64, on_both
from tests.lab.backends import CHANNELS
from tests.lab.linux_guest import ASYNC_PF
from tests.lab.linux_pair import LOAD, LinuxPair, LinuxSide, all_delivered, finish, guest_with, until_announced
from tests.lab.pair import FORK, MIB, STOCK, until
from tests.lab.paths import SANITIZED
from tests.sdei.test_sdei import is_refused

slow = pytest.mark.slow
ON = ASYNC_PF["aarch64"]
SDEI, ASYNC = ON[:2], ON[2:]


@both_interfaces
@on_both("cpus, backend, channels", choices(
    (1, 2, 4), ("anonymous", "memfd", "hugetlb"), ("preempt", "one-channel"), quick=[(1, "anonymous", "preempt")]))
def test_linux_takes_them(lab, cpus, backend, channels):
    with guest_with(lab, cpus=cpus, backend=backend, **CHANNELS[channels]) as pair:
        # The kernel misses most of 80 huge pages: the background must not send them before tasks miss some. With a
        # sanitizer, a guest misses so few pages a second that the background would send all of them first.
        pair.postcopy(bandwidth=(2 if backend == "hugetlb" else 8) * MIB // (8 if SANITIZED else 1))
        until_announced(pair)
        finish(pair)
        counts = all_delivered(pair)
        assert counts["forgotten"] == 0, counts
        assert f"announced {counts['announced']}, " in pair.destination.hmp("info migrate")
        # KVM handles the guest's writes to MSRs again.
        assert "postcopy_async_drained" in dict(pair.destination.trace())
        # On a channel shared with the background, more requests would delay those behind them.
        around = channels == "preempt" and backend != "hugetlb"
        assert ("postcopy_fault_around" in dict(pair.destination.trace())) == around
        assert bool(pair.faults()["ahead"]) == around


@slow
@on_both("exits", ["on", "off"])
def test_without(lab, exits):
    with guest_with(lab, exits=exits) as pair:
        pair.destination.cmd("migrate-set-parameters", postcopy_async_pf="off")
        assert "postcopy-async-pf: off" in pair.destination.hmp("info migrate_parameters")
        pair.postcopy(bandwidth=8 * MIB)
        if exits == "on":
            pair.until_faults()
            until(lambda: pair.faults()["exits"] > 50, "vCPUs leave KVM for missing pages")
        else:
            time.sleep(2)
        finish(pair)
        assert pair.async_counts() is None
        if exits == "on":
            # QEMU notifies arm64's guest to wake all tasks, from any source, and then that no token is left
            assert not any(name in ("kvm_async_pf_send", "kvm_arm_async_pf_taken")
                           and text.split()[3] not in ("0xffffffff", "0x0")
                           for name, text in pair.destination.trace())


def hold(pair, uri=None):
    """Migrate to the point where tasks wait for pages that the source does not send."""
    pair.postcopy(uri)
    pair.until_reports()
    return pair.until_outstanding()


@slow
@on_both()
def test_stop_and_cont(lab):
    with guest_with(lab, cpus=2) as pair:
        hold(pair)
        for _ in range(5):
            pair.destination.cmd("stop")
            pair.destination.cmd("cont")
            assert pair.destination.registers_of_all() == 2
        pair.source.signal("CONT")
        finish(pair)
        assert all_delivered(pair)["forgotten"] == 0


@slow
@on_both()
def test_reset(lab):
    """After a reset, the guest that boots has no tokens of the time before."""
    with guest_with(lab, cpus=2, reboot=True) as pair:
        hold(pair)
        pair.destination.cmd("stop")
        # QEMU writes the BIOS to memory, for which pages must be received
        pair.source.signal("CONT")
        pair.destination.cmd("system_reset")
        assert all_delivered(pair)["forgotten"] > 0
        pair.destination.cmd("cont")
        pair.fast()
        pair.destination.wait_status("completed")
        until(lambda: pair.destination.report().boots, "the guest has booted again", timeout=90)
        pair.check_threads()
        pair.check_logs()
        all_delivered(pair)


@slow
@on_both()
def test_recovery(lab):
    with guest_with(lab, cpus=2) as pair:
        wire = pair.wire(pair.listen())
        hold(pair, wire.uri)
        wire.cut()
        pair.source.signal("CONT")
        pair.wait_paused()
        assert pair.async_counts()["outstanding"] > 0
        pair.recover()
        finish(pair)
        assert all_delivered(pair)["forgotten"] == 0


@slow
@on_both()
def test_quit(lab):
    with guest_with(lab, cpus=2) as pair:
        hold(pair)
        pair.destination.cmd("quit")
        assert pair.destination.job.wait().rc == 0


def complete_stopped(pair):
    """Receive all memory while the guest, whose tasks wait, is stopped."""
    hold(pair)
    pair.destination.cmd("stop")
    pair.source.signal("CONT")
    pair.fast()
    pair.destination.wait_status("completed")


def move_on(pair):
    """Migrate the stopped guest to another QEMU."""
    pair.next()
    pair.source.cmd("migrate-set-parameters", max_bandwidth=0)
    pair.source.cmd("migrate", uri=pair.listen())
    pair.destination.wait_status("completed")


def go_on(pair):
    pair.destination.cmd("cont")
    pair.check_threads()
    pair.check_memory()


@slow
@on_both()
def test_second_migration_while_tasks_wait(lab):
    """The guest moves on after it was notified of missing pages, and before it was notified that they were placed. On
    the third host KVM, or on arm64 QEMU, notifies it to wake all tasks."""
    with guest_with(lab, cpus=2) as pair:
        complete_stopped(pair)
        counts = pair.async_counts()
        assert counts["outstanding"] > 0 and counts["delivered"] < counts["announced"], counts
        move_on(pair)
        go_on(pair)


@slow
def test_on_to_a_qemu_that_knows_nothing_of_it(lab):
    """The KVM of stock QEMU wakes the tasks, and so does the KVM of the fork after that."""
    with guest_with(lab, cpus=2) as pair:
        complete_stopped(pair)
        pair.exits = None       # stock QEMU lacks the parameter
        for qemu in STOCK, FORK:
            pair.plans = [replace(plan, qemu=qemu) for plan in pair.plans]
            move_on(pair)
        go_on(pair)


@slow
@on_both("way", ["postcopy", "precopy"], quick=True)
def test_told_after_it_has_moved(lab, way):
    """A guest that was moved once must wake all its tasks; then it is notified of missing pages again."""
    with guest_with(lab, cpus=2) as pair:
        getattr(pair, way)()
        finish(pair)
        pair.until_reports(2)
        if lab.arch == "aarch64":
            taken = [text for name, text in pair.destination.trace() if name == "kvm_arm_async_pf_taken"]
            assert sum("token 0xffffffff" in text for text in taken) == 2, taken
        pair.next()
        pair.postcopy(bandwidth=8 * MIB)
        until_announced(pair)
        finish(pair)
        all_delivered(pair)


@slow
@on_both()
def test_processors_go_off_and_on(lab):
    """Linux disables async page faults when it takes a processor off, and enables them again with the processor."""
    enable = {"x86_64": "kvm_async_pf_enable", "aarch64": "kvm_arm_async_pf_call"}[lab.arch]
    with guest_with(lab, cpus=2, offline=1) as pair:
        pair.postcopy(bandwidth=4 * MIB)
        until(lambda: sum(name == enable and "function 3" not in text for name, text in pair.destination.trace()) > 4,
              "a processor goes off and on", timeout=90)
        finish(pair)
        all_delivered(pair)
        lines = pair.destination.report().lines
        assert lines[-1]["offs"] > lines[0]["offs"]


@slow
def test_kexec(lab):
    """Linux starts another Linux in post-copy, which enables async page faults while its memory is missing."""
    words = [word for file in linux_guest.files()
             for word in ("-drive", f"file={file},format=raw,if=virtio,readonly=on")]
    # The background sends a buffer's worth each 100 ms, whatever its limit. Pages that the new kernel and its initrd
    # overwrite are missing, too: fetch channels bring them within seconds.
    with guest_with(lab, cpus=2, memory_mb=512, fetch=4, kexec=20000, source_options=words,
                    destination_options=words) as pair:
        until(lambda: pair.source.report().boots, "Linux is ready", timeout=90)
        pair.postcopy(bandwidth=1024)
        until_announced(pair)
        assert not pair.destination.report().boots, "too late: it is another one already"
        until(lambda: pair.destination.report().boots, "the other one has booted", timeout=180)
        written = [text for name, text in pair.destination.trace() if name == "kvm_async_pf_enable"]
        # A guest whose memory is complete is not notified of any page.
        assert len(written) == 4, f"all memory had come before the other one enabled them: {written}"
        for cpu in range(2):
            off, on = (int(text.split()[3], 0) for text in written if text.startswith(f"cpu {cpu} "))
            assert not off and on & 1, written
        pair.fast()
        pair.destination.wait_status("completed")
        pair.check_threads()
        pair.check_logs()
        all_delivered(pair)


@slow
@pytest.mark.parametrize("end", ["finish", "quit"])
def test_processor_is_unplugged(lab, end):
    """Tasks wait for pages that they missed on a processor that is gone when they are placed, or when QEMU exits."""
    second = ("-device", "max-x86_64-cpu,id=second,socket-id=0,core-id=1,thread-id=0")
    with guest_with(lab, cpus="1,maxcpus=2", source_options=second, destination_options=second) as pair:
        hold(pair)
        pair.destination.cmd("device_del", id="second")
        pair.source.signal("CONT")
        until(lambda: any(e["event"] == "DEVICE_DELETED" for e in pair.destination.qmp.get_events()),
              "the guest ejects its second processor", timeout=90)
        if end == "quit":
            pair.destination.cmd("quit")
            assert not pair.destination.job.wait().rc
            return
        finish(pair)
        all_delivered(pair)
        assert len(pair.destination.cmd("query-cpus-fast")) == 1


def answers(pair):
    """(answers, of these later than 10 ms, the longest in ms) while the source withholds a page for two seconds from a
    processor in the kernel. Repeats, as the host may be busy with other work."""
    for _ in range(6):
        pair.source.signal("STOP")
        time.sleep(0.5)
        first = pair.destination.report().lines[-1]
        time.sleep(2)
        pair.source.signal("CONT")

        def reported(since: int = first["answers"]) -> bool:
            """The report that first counts an answer precedes the report with its duration."""
            return sum(line["answers"] > since for line in pair.destination.report().lines) > 1
        until(reported, "answers are reported")
        lines = [line for line in pair.destination.report().lines if line["ms"] > first["ms"]]
        n, late, ms = (lines[-1]["answers"] - first["answers"], lines[-1]["answers_late"] - first["answers_late"],
                       max(line["answer_max"] for line in lines) / 1000)
        print(f"{n} answers, {late} later than 10 ms, the longest {ms} ms")
        yield n, late, ms


@slow
@on_both("way", ["async", "exits"])
def test_a_processor_that_waits_answers_others(lab, way):
    """The source withholds a page of a processor in the kernel, which cannot get a token, but can be interrupted."""
    with LinuxPair(lab, exits="on", cpus=2, mem=64, writers=0, computers=0, copiers=1, interval=100) as pair:
        if way == "exits":
            pair.destination.cmd("migrate-set-parameters", postcopy_async_pf="off")
        pair.postcopy()
        pair.until_reports(20)
        if way == "exits":
            assert any(ms > 1500 for n, late, ms in answers(pair))
        else:
            # Without a withheld page, some answers take 10 to 30 ms in the lab on a busy host: more than a tenth
            # where compilers keep it busy.
            assert any(n > 50 and late < n // 2 and ms < 200 for n, late, ms in answers(pair))
            assert pair.async_counts()["halted"] > 0
        pair.fast()
        pair.wait_completed()
        pair.check_threads()
        pair.check_logs()


@slow
def test_apic_id_above_254(lab):
    """Without interrupt remapping, no MSI can have this ID as its destination."""
    words = ("-device", "intel-iommu,intremap=on,eim=on", "-device",
             "max-x86_64-cpu,socket-id=299,core-id=0,thread-id=0")
    with guest_with(lab, cpus="1,maxcpus=300,sockets=300", memory_mb=512, machine="q35,kernel-irqchip=split",
                    source_options=words, destination_options=words) as pair:
        pair.postcopy(bandwidth=4 * MIB)
        until(lambda: any(name == "kvm_async_pf_send" and text.split()[1] == "299"
                          for name, text in pair.destination.trace()), "the second processor is notified of a page")
        finish(pair)
        all_delivered(pair)


@on_aarch64("words, machine, reason", [
    (ASYNC, None, "x-kvm-async-pf=on needs kvm-sdei=on"),
    (ON, "virt,gic-version=2,kernel-irqchip=off", "x-kvm-async-pf=on needs a GIC in the kernel"),
], quick=True)
def test_cannot_be_had(lab, words, machine, reason):
    ended = LinuxSide(lab, "source", FORK, words, {"machine": machine}).job.wait()
    assert ended.rc == 1
    assert reason in ended.output


@on_aarch64("words, reason", [
    (SDEI, "x-kvm-async-pf"),
    ((), "kvm-sdei"),
], quick=[((), "kvm-sdei")])
def test_the_other_side_is_without(lab, words, reason):
    with guest_with(lab, destination_options=words) as pair:
        pair.source.wait_ready()
        is_refused(pair, f"CPU property {reason} is on on the source: start the destination with the same")


@on_aarch64("has", ["nothing", "sdei"])
def test_guest_without(lab, has):
    """The guest is not notified of missing pages, but its vCPU serves interrupts while it waits."""
    words = SDEI if has == "sdei" else ()
    with guest_with(lab, source_options=words, destination_options=words) as pair:
        pair.postcopy(bandwidth=8 * MIB)
        pair.until_faults()
        counts = until(lambda: (counts := pair.async_counts())["halted"] > 5 and counts, "the vCPU is suspended")
        assert counts["refused-without"] > 0, counts
        finish(pair)
        assert pair.async_counts()["announced"] == 0


@on_aarch64("source, destination", [(FORK, STOCK), (STOCK, FORK)])
def test_stock(lab, source, destination):
    """The properties are off: the stream is that of stock QEMU."""
    with LinuxPair(lab, source=source, destination=destination, **LOAD) as pair:
        pair.postcopy()
        finish(pair)
