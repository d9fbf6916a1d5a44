# SPDX-License-Identifier: GPL-2.0-or-later
"""The destination's monitor answers while its vCPUs wait for pages; and a vCPU that misses a page is not scheduled for
so long that post-copy is over when it continues."""
import contextlib
import socket
import time

import pytest

from tests.lab.arches import both_interfaces, choices, listed, on_both
from tests.lab.pair import INJECT, Pair, until
from tests.lab.paths import PATIENCE
from tests.lab.qtest import Qtest
from tests.postcopy.steps import PERTURB, assert_refused, events, succeeds

KICKS = 20
CANNOT_STOP = "cannot stop before"
PAUSED = "postcopy is paused: recover it first"
# The disk's first write fails.
DISK = ("-blockdev", "blkdebug,node-name=disk,image.driver=null-co,inject-error.0.event=none,"
        "inject-error.0.iotype=write,inject-error.0.once=on",
        "-device", "ide-hd,bus=ide.0,drive=disk,werror=stop")


def stop_cont_and_queries(pair):
    """Test while all vCPUs wait for a stopped source."""
    destination = pair.destination
    counts = pair.until_all_wait()

    assert destination.cmd("query-status")["status"] == "running"
    assert len(destination.cmd("query-cpus-fast")) == 4
    assert destination.status() == "postcopy-active"
    assert f"exits {counts['exits']}, " in destination.hmp("info migrate")
    # These commands run in the vCPUs' threads, which leave their wait.
    assert destination.registers_of_all() == 4
    if pair.lab.arch == "x86_64":
        assert "LVT0" in destination.hmp("info lapic")

    for _ in range(3):
        destination.cmd("stop")
        assert destination.cmd("query-status")["status"] == "paused"
        assert destination.waiting_vcpus() == set()
        destination.cmd("cont")
        assert destination.cmd("query-status")["status"] == "running"
        # The vCPUs return to the same faults, which are not counted again.
        assert pair.until_all_wait()["exits"] == counts["exits"]

    pair.source.signal("CONT")
    pair.finish_fast()


@both_interfaces
@on_both("pattern", [pytest.param("disjoint", marks=pytest.mark.slow), "shared"])
def test_stop_cont_and_queries(lab, pattern):
    with Pair(lab, exits="on", mem=16, pattern=pattern) as pair:
        pair.midst()
        pair.source.signal("STOP")
        stop_cont_and_queries(pair)


def test_exits_of_tcg(place):
    """In the build for tests, TCG's vCPUs take the path of KVM's exits, and leave it when they are kicked."""
    with Pair(place, exits="on", mem=16, pattern="shared", source=INJECT, destination=INJECT,
              destination_options=("-S",)) as pair:
        pair.postcopy()
        pair.source.signal("STOP")
        # Only now: before, its vCPUs may request all memory in less time than the test needs to stop the source.
        pair.destination.cmd("cont")
        stop_cont_and_queries(pair)
        faults = pair.faults()
    # Faults of delivered interrupts and of QEMU's devices
    assert faults["uffd"] < faults["exits"] / 10, faults


@both_interfaces
@on_both(quick=True)
def test_quit(lab):
    with Pair(lab, exits="on", mem=16) as pair:
        pair.midst()
        pair.source.signal("STOP")
        pair.until_all_wait()
        pair.destination.cmd("quit")
        assert pair.destination.job.wait().rc == 0


@pytest.mark.slow
@pytest.mark.parametrize("exits", ["off", "on"])
def test_kicked_while_paused(lab, exits):
    """vCPUs that are kicked out of their wait fault again, which does not count as another fault."""
    with Pair(lab, exits=exits, mem=16) as pair:
        destination = pair.destination
        pair.midst(bandwidth=64 << 10)
        pair.pause()
        counts = pair.until_all_wait()
        for _ in range(KICKS):
            assert destination.registers_of_all() == 4
        pair.until_all_wait()
        assert pair.faults()["requests"] == counts["requests"]
        assert pair.faults()["exits"] == counts["exits"]
        pair.recover_and_finish()
        metered = sum(destination.cmd("query-migrate")["postcopy-latency-dist"])
        # Pages that two threads missed are few; each kick would add four.
        assert metered < pair.faults()["requests"] + KICKS


@pytest.fixture
def asleep(place, monkeypatch):
    """A paused pair whose vCPUs sleep in the kernel, where TCG, unlike KVM on x86, cannot kick them."""
    monkeypatch.setattr(place, "qemu_words", ("-accel", "tcg", "-cpu", "max"))
    more = "-device", "virtio-balloon-pci", "-smp", "maxcpus=3", *DISK
    with Pair(place, mem=8, cpus=2, both_options=more,
              destination_options=Qtest.arguments(place, "destination")) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri, bandwidth=64 << 10)
        wire.cut()
        pair.wait_paused()
        until(lambda: pair.destination.sleeps_in("handle_userfault", "CPU 0/", "CPU 1/"),
              "the vCPUs wait")
        yield pair


def write_to_disk(side):
    """Write a sector as a guest does, by the ports of its first IDE disk, without interrupts."""
    with Qtest(side.lab, side.name) as qtest:
        for port, byte in (0x3f6, 2), (0x1f6, 0xe0), (0x1f2, 1), (0x1f3, 0), (0x1f4, 0), (0x1f5, 0), (0x1f7, 0x30):
            qtest.cmd("outb", port, byte)
        for _ in range(512 // 2):
            qtest.cmd("outw", 0x1f0, 0)


@pytest.mark.parametrize("way", listed("stop", "werror", "system_reset", "gdb", quick=["stop"]))
def test_what_stops_them_while_they_sleep(asleep, way):
    """stop is refused; the others take effect when memory is received. QMP answers meanwhile, and can recover."""
    destination = asleep.destination
    # Without this action, QEMU exits at a reset.
    destination.cmd("set-action", reboot="reset")
    if way == "stop":
        assert_refused(destination, CANNOT_STOP, "stop")
        assert CANNOT_STOP in destination.hmp("stop")
    elif way == "werror":
        write_to_disk(destination)
        until(lambda: "BLOCK_IO_ERROR" in events(destination), "the disk fails")
    elif way == "system_reset":
        destination.cmd("system_reset")
    else:
        uri = f"tcp:{destination.lab.address}:{asleep.port()}"
        destination.hmp(f"gdbserver {uri}")
        debugger = socket.create_connection(("127.0.0.1", asleep.host_port_of(uri)))
    for _ in range(3):
        assert destination.cmd("query-status")["status"] == "running"
        time.sleep(0.5)
    before = events(destination)
    assert "STOP" not in before and "RESET" not in before
    asleep.recover()
    asleep.fast()
    if way == "stop":
        # The next missing page may be late, too.
        until(lambda: succeeds(destination, "stop"), "stop succeeds")
    if way == "system_reset":
        until(lambda: "RESET" in events(destination), "the guest is reset")
        asleep.wait_completed()
    else:
        stopped = "io-error" if way == "werror" else "paused"
        until(lambda: destination.cmd("query-status")["status"] == stopped, "the guest is stopped")
        destination.cmd("cont")
        asleep.finish()
        if way == "gdb":
            debugger.close()


@pytest.mark.parametrize("end", ["quit", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_quit_while_they_sleep(asleep, end):
    if end == "quit":
        asleep.destination.cmd("quit")
    else:
        asleep.destination.signal("TERM")
    assert asleep.destination.job.wait(20 * PATIENCE).rc == 0


def test_what_reads_memory_is_refused(asleep):
    """Such a command would wait for a missing page, in the thread that recovers."""
    destination, file = asleep.destination, f"{asleep.lab.tmp}/memory"
    assert_refused(destination, "guest memory are missing", "dump-guest-memory", paging=False, protocol=f"file:{file}")
    for command in "memsave", "pmemsave":
        assert_refused(destination, PAUSED, command, val=0, size=asleep.options["memory_mb"] << 20, filename=file)
    assert_refused(destination, PAUSED, "screendump", filename=file)
    for line in "x /1024xg 0x400000", "xp /1024xg 0x400000":
        assert PAUSED in destination.hmp(line)
    for command in "savevm x", "loadvm x", "migrate -d tcp:127.0.0.1:1":
        assert "guest memory are missing" in destination.hmp(command)
    asleep.recover_and_finish()


def test_what_does_not_wait_for_them(asleep):
    """A vCPU is hot-plugged, or cannot be; other commands only request an action of the guest, which takes time."""
    destination = asleep.destination
    assert_refused(destination, "socket-id", "device_add", driver="max-x86_64-cpu", socket_id=9, core_id=0, thread_id=0)
    [free] = [cpu for cpu in destination.cmd("query-hotpluggable-cpus") if "qom-path" not in cpu]
    destination.cmd("device_add", driver=free["type"], id="third", **free["props"])
    destination.cmd("balloon", value=16 << 20)
    destination.cmd("system_powerdown")
    assert destination.registers_of_all()
    assert len(destination.cmd("query-cpus-fast")) == 3
    asleep.recover_and_finish()


@pytest.mark.slow
def test_error_within_a_batch(place):
    """The fault thread reads four faults at once, and cannot serve one; it serves the others."""
    with Pair(place, exits="off", source=INJECT, destination=INJECT, mem=16, destination_options=("-S",)) as pair:
        inject = pair.destination.inject
        pair.postcopy(bandwidth=64 << 10)
        inject.arm("postcopy-uffd-read")
        pair.destination.cmd("cont")
        inject.wait_held("postcopy-uffd-read")
        until(lambda: pair.destination.waiting_vcpus() == set(range(pair.cpus)), "all vCPUs wait for pages")
        before = pair.faults()["requests"]
        inject.arm("postcopy-uffd")
        inject.release("postcopy-uffd-read")
        until(lambda: inject.passed("postcopy-uffd"), "the error")
        until(lambda: pair.faults()["requests"] >= before + 3, "the others are asked for", timeout=20)
        time.sleep(1)
        if pair.destination.status() == "postcopy-paused":
            pair.wait_paused()
            pair.recover()
        pair.finish_fast()


@contextlib.contextmanager
def held_vcpu(lab, point, blocktime):
    """A pair with a vCPU of the destination held at the point when all pages are received."""
    capabilities = ("postcopy-preempt", "postcopy-blocktime") if blocktime else ("postcopy-preempt",)
    with Pair(lab, exits="on", source=INJECT, destination=INJECT, capabilities=capabilities,
              mem=16, wrapper=PERTURB) as pair:
        pair.midst(bandwidth=64 << 10)
        pair.destination.inject.arm(point)
        pair.destination.inject.wait_held(point)
        yield pair
        pair.finish()


def may_come(condition):
    """Wait some seconds for the condition, but continue without it: another order is right, too."""
    with contextlib.suppress(AssertionError):
        until(condition, "what may come", timeout=5)


@both_interfaces
@pytest.mark.parametrize("point, blocktime", choices(
    ["postcopy-exit", "postcopy-ask"], [True, False], quick=[("postcopy-ask", True)]))
def test_vcpu_after_the_end(lab, point, blocktime):
    """The page was received without a request."""
    with held_vcpu(lab, point, blocktime) as pair:
        pair.fast()
        may_come(lambda: all(thread.name != "mig/dst/listen" for thread in pair.destination.threads()))
        pair.destination.inject.release(point)


@pytest.mark.slow
def test_vcpu_while_the_return_path_is_closed(lab):
    """The vCPU requests its page."""
    with held_vcpu(lab, "postcopy-ask", False) as pair:
        inject = pair.destination.inject
        inject.arm("rp-close")
        pair.fast()
        inject.wait_held("rp-close")
        inject.arm("rp-message")
        inject.release("postcopy-ask")
        may_come(lambda: inject.held("rp-message"))
        inject.release("rp-close")
        may_come(lambda: all(thread.name != "mig/dst/listen" for thread in pair.destination.threads()))
        inject.release("rp-message")
