# SPDX-License-Identifier: GPL-2.0-or-later
"""Async page faults from vCPU exits, taken by a Linux guest: on x86-64 an unmodified one; on arm64 the lab's, which
has the guest's side."""
import time
from dataclasses import replace

import pytest

from tests.lab import linux_guest
from tests.lab.arches import both_interfaces, choices, on_both
from tests.lab.async_guest import all_delivered, finish, guest_with, until_announced
from tests.lab.backends import CHANNELS
from tests.lab.linux_guest import ASYNC_PF
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import FORK, MIB, STOCK, until
from tests.lab.paths import SANITIZED

slow = pytest.mark.slow


@both_interfaces
@on_both("cpus, backend, channels", choices(
    (1, 2, 4), ("anonymous", "memfd", "hugetlb"), ("preempt", "one-channel"), quick=[(1, "anonymous", "preempt")]))
def test_linux_takes_them(lab, cpus, backend, channels):
    with guest_with(lab, cpus=cpus, backend=backend, **CHANNELS[channels]) as pair:
        # The kernel misses most of 80 huge pages: the background must not send them before tasks miss some
        takes_them(pair, 2 * MIB if backend == "hugetlb" else 8 * MIB)
        # On a channel shared with the background, more requests would delay those behind them.
        around = channels == "preempt" and backend != "hugetlb"
        assert ("postcopy_fault_around" in dict(pair.destination.trace())) == around
        assert bool(pair.faults()["ahead"]) == around


def takes_them(pair, bandwidth=8 * MIB):
    # With a sanitizer, a guest misses so few pages a second that the background would send all of them first
    pair.postcopy(bandwidth=bandwidth // 8 if SANITIZED else bandwidth)
    until_announced(pair)
    finish(pair)
    counts = all_delivered(pair)
    assert counts["forgotten"] == 0, counts
    assert f"announced {counts['announced']}, " in pair.destination.hmp("info migrate")
    # KVM handles the guest's writes to MSRs again.
    assert "postcopy_async_drained" in dict(pair.destination.trace())


@slow
def test_split_irqchip(lab):
    with guest_with(lab, cpus=2, machine="pc,kernel-irqchip=split") as pair:
        takes_them(pair)


@slow
@on_both("way", ["exits", "off", STOCK])
def test_without(lab, way):
    qemu = STOCK if way == STOCK else FORK
    exits = {"exits": "on", "off": "off", STOCK: None}[way]
    on = () if way == STOCK else ASYNC_PF[lab.arch]
    with guest_with(lab, exits=exits, source=qemu, destination=qemu, source_options=on,
                    destination_options=on) as pair:
        if way != STOCK:
            pair.destination.cmd("migrate-set-parameters", postcopy_async_pf="off")
            assert "postcopy-async-pf: off" in pair.destination.hmp("info migrate_parameters")
        pair.postcopy(bandwidth=8 * MIB)
        if way == "exits":
            pair.until_faults()
            until(lambda: pair.faults()["exits"] > 50, "vCPUs leave KVM for missing pages")
        else:
            time.sleep(2)
        finish(pair)
        assert pair.async_counts() is None
        if way == "exits":
            # QEMU notifies arm64's guest to wake all tasks, from any source, and then that no token is left
            assert not any(name in ("kvm_async_pf_send", "kvm_arm_async_pf_taken")
                           and text.split()[3] not in ("0xffffffff", "0x0")
                           for name, text in pair.destination.trace())


def held(lab, **options):
    """A guest on the destination, with tasks that wait for pages that the source does not send."""
    return guest_with(lab, **{"cpus": 2} | options)


def hold(pair, uri=None):
    pair.postcopy(uri)
    pair.until_reports()
    return pair.until_outstanding()


@slow
@on_both()
def test_stop_and_cont(lab):
    with held(lab) as pair:
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
    with held(lab, reboot=True) as pair:
        hold(pair)
        pair.destination.cmd("stop")
        # QEMU writes the BIOS to memory, for which pages must be received
        pair.source.signal("CONT")
        pair.destination.cmd("system_reset")
        counts = until(lambda: not (counts := pair.async_counts())["outstanding"] and counts,
                       "the tokens are forgotten")
        assert counts["forgotten"] > 0, counts
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
    with held(lab) as pair:
        hold(pair, pair.through_proxy(pair.listen()))
        pair.cut()
        pair.source.signal("CONT")
        pair.wait_paused()
        assert pair.async_counts()["outstanding"] > 0
        pair.recover()
        finish(pair)
        assert all_delivered(pair)["forgotten"] == 0


@slow
@on_both()
def test_quit(lab):
    with held(lab) as pair:
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
    with held(lab) as pair:
        complete_stopped(pair)
        counts = pair.async_counts()
        assert counts["outstanding"] > 0 and counts["delivered"] < counts["announced"], counts
        move_on(pair)
        go_on(pair)


@slow
def test_on_to_a_qemu_that_knows_nothing_of_it(lab):
    """The KVM of stock QEMU wakes the tasks, and so does the KVM of the fork after that."""
    with held(lab) as pair:
        complete_stopped(pair)
        pair.exits = None       # stock QEMU lacks the parameter
        for qemu in STOCK, FORK:
            pair.plans = [replace(plan, qemu=qemu) for plan in pair.plans]
            move_on(pair)
        go_on(pair)


@slow
@on_both()
def test_three_in_a_row(lab):
    with guest_with(lab, cpus=2) as pair:
        for n in range(3):
            if n:
                pair.next()
            pair.postcopy(bandwidth=16 * MIB)
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
    with held(lab, memory_mb=512, fetch=4, kexec=20000, source_options=words, destination_options=words) as pair:
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
    with held(lab, cpus="1,maxcpus=2", source_options=second, destination_options=second) as pair:
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


def answers(pair, seconds):
    """(answers, of these later than 10 ms, the longest in ms) while the source withholds a page, for so many seconds,
    from a processor in the kernel. Repeats, as the host may be busy with other work."""
    for _ in range(6):
        pair.source.signal("STOP")
        time.sleep(0.5)
        first = pair.destination.report().lines[-1]
        time.sleep(seconds)
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
@on_both("way", ["async", "exits", STOCK])
def test_a_processor_that_waits_answers_others(lab, way):
    """The source withholds a page of a processor in the kernel, which cannot get a token, but can be interrupted."""
    qemu = STOCK if way == STOCK else FORK
    with LinuxPair(lab, exits=None if way == STOCK else "on", cpus=2, source=qemu, destination=qemu, mem=64,
                   writers=0, computers=0, copiers=1, interval=100) as pair:
        if way == "exits":
            pair.destination.cmd("migrate-set-parameters", postcopy_async_pf="off")
        pair.postcopy()
        pair.until_reports(20)
        if way == "exits" or (way == STOCK and lab.arch == "aarch64"):
            # arm64's KVM has neither async page faults nor their halts
            assert any(ms > 1500 for n, late, ms in answers(pair, 2))
        else:
            # Without a withheld page, some answers take 10 to 30 ms in the lab on a busy host: more than a tenth
            # where compilers keep it busy.
            assert any(n > 50 and late < n // 2 and ms < 200 for n, late, ms in answers(pair, 2))
        if way == "async":
            counts = pair.async_counts()
            assert counts["halted"] > 0, counts
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
