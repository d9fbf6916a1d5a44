# SPDX-License-Identifier: GPL-2.0-or-later
"""The destination's monitor answers while its vCPUs wait for pages."""
import socket
import time

import pytest
from qemu.qmp import ExecuteError

from tests.lab.arches import both_interfaces, listed, on_both
from tests.lab.pair import INJECT, Pair, until
from tests.lab.paths import PATIENCE
from tests.lab.qtest import Qtest

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
    assert destination.job.running

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
        faults = pair.faults()
        print(f"{metered} metered, {faults}")
        # Pages that two threads missed are few; each kick would add four.
        assert metered < faults["requests"] + KICKS


@pytest.fixture
def asleep(place):
    """A paused pair whose vCPUs sleep in the kernel, where TCG, unlike KVM on x86, cannot kick them."""
    words = place.qemu_words
    place.qemu_words = ("-accel", "tcg", "-cpu", "max")
    try:
        more = "-device", "virtio-balloon-pci", "-smp", "maxcpus=3", *DISK
        with Pair(place, mem=8, cpus=2, source_options=more,
                  destination_options=(*more, *Qtest.arguments(place, "destination"))) as pair:
            wire = pair.wire(pair.listen())
            pair.midst(wire.uri, bandwidth=64 << 10)
            wire.cut()
            pair.wait_paused()
            until(lambda: pair.destination.sleeps_in("handle_userfault", *map(pair.destination.vcpu, range(2))),
                  "the vCPUs wait")
            yield pair
    finally:
        place.qemu_words = words


def events(side):
    return [event["event"] for event in side.qmp.get_events()]


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
        with pytest.raises(ExecuteError, match=CANNOT_STOP):
            destination.cmd("stop")
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
        until(lambda: not refused(destination), "the guest is stopped")
        assert destination.cmd("query-status")["status"] == "paused"
        destination.cmd("cont")
        asleep.finish()
    elif way == "system_reset":
        until(lambda: "RESET" in events(destination), "the guest is reset")
        asleep.wait_completed()
    else:
        stopped = "io-error" if way == "werror" else "paused"
        until(lambda: destination.cmd("query-status")["status"] == stopped, "the guest is stopped")
        destination.cmd("cont")
        asleep.finish()
        if way == "gdb":
            debugger.close()


def refused(side):
    """Whether stop is refused; the next missing page may be late, too."""
    try:
        side.cmd("stop")
    except ExecuteError:
        return True
    return False


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
    with pytest.raises(ExecuteError, match="guest memory are missing"):
        destination.cmd("dump-guest-memory", paging=False, protocol=f"file:{file}")
    for command in "memsave", "pmemsave":
        with pytest.raises(ExecuteError, match=PAUSED):
            destination.cmd(command, val=0, size=asleep.options["memory_mb"] << 20, filename=file)
    with pytest.raises(ExecuteError, match=PAUSED):
        destination.cmd("screendump", filename=file)
    for line in "x /1024xg 0x400000", "xp /1024xg 0x400000":
        assert PAUSED in destination.hmp(line)
    for command in "savevm x", "loadvm x", "migrate -d tcp:127.0.0.1:1":
        assert "guest memory are missing" in destination.hmp(command)
    asleep.recover_and_finish()


def test_what_does_not_wait_for_them(asleep):
    """A vCPU is hot-plugged, or cannot be; other commands only request an action of the guest, which takes time."""
    destination = asleep.destination
    with pytest.raises(ExecuteError, match="socket-id"):
        destination.cmd("device_add", driver="max-x86_64-cpu", socket_id=9, core_id=0, thread_id=0)
    [free] = [cpu for cpu in destination.cmd("query-hotpluggable-cpus") if "qom-path" not in cpu]
    destination.cmd("device_add", driver=free["type"], id="third", **free["props"])
    destination.cmd("balloon", value=16 << 20)
    destination.cmd("system_powerdown")
    assert destination.registers_of_all()
    assert len(destination.cmd("query-cpus-fast")) == 3
    asleep.recover_and_finish()
