# SPDX-License-Identifier: GPL-2.0-or-later
"""A source, or a network, that sends wrong data, or not all of them: QEMU can recover, and always reports it."""
import contextlib
import time

import pytest

from tests.lab.arches import choices, listed
from tests.lab.backends import guest_on
from tests.lab.failures import Ended, Failures
from tests.lab.pair import MIB, Pair, until
from tests.lab.proxy import MAIN, URGENT, Close, End, InPackage, Lie, Outside, SamePart, Says, Short, Twice, Wire

# Different memory and different ways of waiting
cases = pytest.mark.parametrize("exits, backend", choices(
    ["on", "off"], ["anonymous", "memfd"], quick=[("on", "memfd")]))


@contextlib.contextmanager
def lied_to(place, lie, exits, backend):
    """A pair whose post-copy has begun, with a Lie on the preempt channel."""
    with Pair(place, exits=exits, **guest_on(backend)) as pair:
        pair.postcopy(pair.wire(pair.listen(), lie=lie).uri, bandwidth=64 << 10)
        pair.until_faults()
        yield pair
        # All other data are right.
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=16 * MIB)
        pair.finish()


@pytest.mark.slow
@cases
def test_twice(place, exits, backend):
    """A page is sent again with other contents, when the guest may have changed it."""
    with lied_to(place, Twice(), exits, backend) as pair:
        until(lambda: pair.faults()["duplicates"] >= 2, "both pages that come once more")


@cases
@pytest.mark.parametrize("kind", listed(Outside, Short, quick=[Outside]))
def test_not_a_page(place, exits, backend, kind):
    """A page outside of the block, or a part of one."""
    with lied_to(place, kind(), exits, backend) as pair:
        pair.wait_paused()
        if kind == Outside:
            pair.destination.wait_says("Illegal RAM offset")
        pair.recover()


def until_awaited(pair, lie):
    """Wait until the page that the Lie has not passed on is the oldest one that is requested; returns its report."""
    return until(lambda: lie.page and (oldest := (pair.faults() or {}).get("oldest")) and oldest["wait-ms"] > 1000
                 and oldest["offset"] == lie.page.address and oldest, "a page that does not come")


@pytest.mark.parametrize("exits, backend, trouble", choices(
    ["on", "off"], ["anonymous", "memfd"], ["source", "destination", "reset"], quick=[("on", "memfd", "reset")]))
def test_never(place, exits, backend, trouble):
    """A requested page is missing: QEMU reports it, and can be paused on either side, and recovered."""
    lie = Lie()
    with lied_to(place, lie, exits, backend) as pair:
        awaited = until_awaited(pair, lie)
        assert awaited["ramblock"] == lie.page.name.decode()
        warning = f"offset 0x{lie.page.address:x} of {lie.page.name.decode()}"
        pair.destination.wait_says(warning)
        pair.destination.wait_says("migrate-pause")
        assert f"offset 0x{lie.page.address:x}" in pair.destination.hmp("info migrate")
        # Post-copy does not end, not even when the source has sent all.
        pair.fast()
        until(lambda: ("qemu_loadvm_state_section", "0") in pair.destination.trace(), "the destination has read VM_EOF")
        for side in pair.sides:
            assert side.status() == "postcopy-active"
        assert pair.faults()["awaited"] > 0
        if trouble == "reset":
            pair.wires[0].cut()
        else:
            (pair.source if trouble == "source" else pair.destination).cmd("migrate-pause")
        pair.wait_paused()
        pair.recover()


@pytest.mark.slow
@pytest.mark.parametrize("exits", ["on", "off"])
def test_never_before_the_end(place, exits):
    """Pages of one channel are sent in order: a destination that has read the end without the page is paused."""
    lie = Lie()
    with Pair(place, exits=exits, pattern="shared", mem=16, capabilities=()) as pair:
        pair.postcopy(pair.wire(pair.listen(), lie=lie, lying=MAIN).uri, bandwidth=256 << 10)
        until_awaited(pair, lie)
        pair.fast()
        pair.wait_paused()
        pair.destination.wait_says(f"without the page at offset 0x{lie.page.address:x}")
        assert pair.faults()["awaited"] > 0
        pair.recover_and_finish()


@pytest.mark.slow
@cases
def test_end_of_urgent_pages(place, exits, backend):
    """The end is sent too early, in place of a page. After recovery, requested pages are received as before."""
    lie = End()
    with lied_to(place, lie, exits, backend) as pair:
        until(lambda: lie.page, "the lie")
        pair.pause()
        before = pair.faults()["requests"]
        pair.recover()
        # Without the preempt channel, each vCPU would wait for its first page until the background sends it.
        until(lambda: pair.faults()["requests"] > before + 64, "pages come that are asked for")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["hugetlb", "hugetlb-private"])
def test_same_part_of_a_huge_page(place, backend):
    """A part is sent as often as the page has parts: that is not the page."""
    lie = SamePart(0)
    with lied_to(place, lie, "on", backend) as pair:
        until(lambda: lie.page, "a page that begins with its first part")
        pair.wait_paused()
        pair.destination.wait_says(f"offset 0x{lie.page.address:x}")
        pair.recover()


# QEMU_VM_COMMAND with MIG_CMD_POSTCOPY_LISTEN, _ADVISE and _PACKAGED; QEMU_VM_SECTION_FULL of section 1
@pytest.mark.parametrize("what", [
    pytest.param("08 0004 0000", id="LISTEN"),
    pytest.param("08 0003 0010" + 16 * "00", id="ADVISE", marks=pytest.mark.slow),
    pytest.param("08 0007 0004 00000001 ff", id="PACKAGED", marks=pytest.mark.slow),
    pytest.param("04 00000001", id="device", marks=pytest.mark.slow),
])
def test_what_comes_before_postcopy(place, what):
    """The guest runs, and its source sends commands that are invalid now, or outside of the packaged device state."""
    lie = Says()
    with Pair(place, pattern="shared", mem=16) as pair:
        pair.midst(pair.wire(pair.listen(), lie=lie, lying=MAIN).uri)
        lie.what = bytes.fromhex(what)
        pair.wait_paused()
        pair.destination.wait_says("received in postcopy")
        pair.recover_and_finish()


# QEMU_VM_COMMAND with MIG_CMD_PACKAGED, _RECV_BITMAP and _POSTCOPY_RESUME; QEMU_VM_SECTION_FULL and _PART of RAM
@pytest.mark.parametrize("what, listening", [
    pytest.param("08 0007 0004 00000001", True, id="PACKAGED"),
    pytest.param("08 0007 0004 00000001", False, id="PACKAGED-first", marks=pytest.mark.slow),
    pytest.param("08 000a 0007 06 70632e72616d", True, id="RECV_BITMAP", marks=pytest.mark.slow),
    pytest.param("08 0009 0000", True, id="RESUME", marks=pytest.mark.slow),
    pytest.param("04 00001000 03 72616d 00000000 00000004", True, id="RAM", marks=pytest.mark.slow),
    pytest.param("02 00000001 0000000000000010", True, id="part", marks=pytest.mark.slow),
])
def test_what_is_no_device(lab, what, listening):
    """The data are in the packaged device state. The guest resumes on the source. In the lab only: a source that is as
    fast as the host has sent all memory by then, and the connection's reset can overtake the destination's SHUT."""
    lie = InPackage(bytes.fromhex(what), listening)
    with Pair(lab, pattern="shared", mem=16, capabilities=()) as pair:
        pair.start(pair.wire(pair.listen(), lie=lie, lying=MAIN).uri)
        pair.source.cmd("migrate-start-postcopy")
        until(lambda: not pair.destination.job.running, "the destination ends", timeout=20)
        pair.destination.wait_says("received in the packaged device state")
        pair.source.wait_status("failed")
        assert Failures(pair).ended() == Ended.SOURCE


@pytest.mark.parametrize("end", ["quit", pytest.param("reset", marks=pytest.mark.slow)])
def test_no_urgent_channel(place, end):
    """The preempt channel is never opened. The destination waits without using a processor, and can still exit."""
    with Pair(place, mem=16) as pair:
        wire = pair.wire(pair.listen(), refused=URGENT)
        pair.postcopy(wire.uri)
        until(lambda: "loadvm_handle_cmd_packaged_received" in dict(pair.destination.trace()), "the package")
        time.sleep(1)
        used, begin = pair.destination.cpu_seconds(), time.monotonic()
        time.sleep(3)
        used, took = pair.destination.cpu_seconds() - used, time.monotonic() - begin
        # A busy loop would use all of it.
        assert used < 0.5 * took
        if end == "reset":
            wire.cut()
            pair.destination.wait_says("has not opened the preempt channel")
        else:
            pair.destination.cmd("quit")
        until(lambda: not pair.destination.job.running, "the destination ends")


RESUME = bytes.fromhex("08 0009 0000")              # QEMU_VM_COMMAND, MIG_CMD_POSTCOPY_RESUME
RESUME_ACK = bytes.fromhex("0006 0004 00000001")    # MIG_RP_MSG_RESUME_ACK, 4 bytes, MIGRATION_RESUME_ACK_VALUE


class NoResume(Wire):
    """Breaks at the source's RESUME, which is not passed on."""

    def _copy(self, a, b):
        seen = b""
        while data := a.recv(4096):
            seen = seen[-len(RESUME):] + data
            if RESUME in seen:
                self.stopped = True
                raise Close
            b.sendall(data)


class EarlyAck(Wire):
    """Acknowledges RESUME before the source sends it, in place of the answer that the source waits for."""

    def _back(self, a, b):
        a.recv(4096)
        b.sendall(RESUME_ACK)
        while a.recv(4096):
            pass


def test_early_resume_ack(place):
    """An earlier RESUME was sent on a connection that has broken since."""
    def recover(kind):
        wire = pair.wire_of(kind, pair.listen("migrate-recover"))
        pair.source.cmd("migrate", uri=wire.uri, resume=True)
        return wire

    with Pair(place, capabilities=(), pattern="shared", mem=16) as pair:
        pair.midst()
        pair.pause()
        wire = recover(NoResume)
        until(lambda: wire.stopped, "RESUME")
        pair.wait_paused()
        wire = recover(EarlyAck)
        assert pair.source.wait_status("postcopy-paused", "postcopy-active") == "postcopy-paused"
        assert "unexpected resume_ack" in pair.source.cmd("query-migrate")["error-desc"]
        wire.cut()
        pair.wait_paused()
        pair.recover_and_finish()
