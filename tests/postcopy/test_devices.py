# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy while QEMU's main thread loads devices, which access the guest's memory; and a destination that fails
before it runs the guest, with exit-on-error=false: it stays, and reports the reason."""
import socket
from dataclasses import replace

import pytest

from tests.lab import other_qemu
from tests.lab.arches import choices
from tests.lab.backends import CHANNELS
from tests.lab.failures import Ended, Failures
from tests.lab.missing_at_load import loading
from tests.lab.pair import INJECT, Pair, until
from tests.lab.proxy import MAIN, URGENT, VM_EOF, InPackage, Nothing

PING, LOADED = (bytes.fromhex(f"08 0002 0004 {value:08x}") for value in (5, 3))


def ends(place, end, channels, wrapper=()):
    lying = URGENT if channels == "preempt" else MAIN
    with loading(place, Nothing(), lying=lying, wrapper=wrapper, **CHANNELS[channels]) as (pair, wire):
        if end == "killed":
            pair.source.signal("KILL")
        else:
            wire.cut()
        until(lambda: not pair.destination.job.running, "the destination ends", timeout=20)
        result = pair.destination.job.wait()
        assert result.rc == 1
        assert "load of migration failed" in result.output or "loadvm failed" in result.output


@pytest.mark.parametrize("end, channels", choices(
    ["killed", "reset"], ["one-channel", "preempt"], quick=[("killed", "one-channel")]))
def test_source_ends_while_devices_are_loaded(place, end, channels):
    """virtio reads its ring, which will never be received: the destination exits."""
    ends(place, end, channels)


@pytest.mark.slow
def test_both_threads_exit(lab):
    """With glibc 2.41 or later, one of the two threads that find an error waits for the other one in exit()."""
    other_qemu.put(lab)
    for _ in range(10):
        ends(lab, "killed", "one-channel", wrapper=other_qemu.LIBRARIES)


class BadAtLast(Nothing):
    """Sends no page; sends one outside of the block if bad is set."""

    bad = False

    def __call__(self, n, page, send):
        if self.bad:
            send(replace(page, address=1 << 40).pack())


def test_error_while_devices_are_loaded(lab):
    """The thread that receives memory finds an error, with the connection intact: the guest has not run there, and
    resumes on the source by itself, though the main thread has read its ring as zeros by then."""
    lie = BadAtLast()
    with loading(lab, lie) as (pair, _):
        lie.bad = True
        until(lambda: not pair.destination.job.running, "the destination ends")
        pair.destination.wait_says("has failed while the devices were loaded")
        pair.source.wait_status("failed")
        until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on")
        assert Failures(pair).ended() == Ended.SOURCE


def test_end_before_the_devices_are_loaded(place):
    """The thread that receives memory has read the end when the main thread misses a page, which is never sent."""
    # That thread answers so many PINGs first.
    lie = InPackage(100_000 * PING, behind=bytes([VM_EOF]))
    with loading(place, lie, until_waits=False) as (pair, _):
        until(lambda: not pair.destination.job.running, "the destination ends")
        pair.destination.wait_says("has ended the stream without the page")
        # Behind so many answers, its last message may be lost: then migrate_cancel returns the guest.
        assert Failures(pair).ended() == Ended.SOURCE


def held_in_package(pair, lie):
    """Hold the destination's main thread at its first answer once post-copy is requested; return the wire."""
    wire = pair.wire(pair.listen(), lie=lie, lying=MAIN)
    pair.start(wire.uri)
    pair.destination.inject.arm("rp-message")
    pair.source.cmd("migrate-start-postcopy")
    pair.destination.inject.wait_held("rp-message")
    return wire


@pytest.mark.slow
def test_package_fails_behind_the_answer(place):
    """The main thread has answered that the devices are loaded, and cannot load the rest, while the listen thread
    pauses and closes the file that both have read. AddressSanitizer reports a later access to it."""
    with Pair(place, destination=INJECT, mem=16) as pair:
        inject = pair.destination.inject
        wire = held_in_package(pair, InPackage(LOADED + 100_000 * PING))
        while ("source_return_path_thread_pong", "0x3") not in pair.source.trace():
            inject.hold_next("rp-message")
        wire.cut()
        until(lambda: pair.destination.sleeps_in("futex", "mig/dst/listen"), "the listen thread waits for the lock")
        inject.release("rp-message")
        until(lambda: not pair.destination.job.running, "the destination ends")
        pair.destination.wait_says("received with no return path")
        pair.source.wait_status("postcopy-paused")


class Silent(Nothing):
    """Withholds all data behind the packaged device state."""

    def pass_on(self, data, send):
        pass


@pytest.mark.slow
def test_urgent_channel_breaks_behind_the_devices(place):
    """The main thread has answered that the devices are loaded, so that the guest cannot resume on the source: it runs
    the guest, though the preempt channel, which the listen thread is to recover, is broken by then."""
    with Pair(place, destination=INJECT, pattern="shared", mem=16) as pair:
        inject = pair.destination.inject
        wire = held_in_package(pair, Silent())
        # The first PONGs precede the packaged device state, within which the channel's thread is started.
        while not any(thread.name == "mig/dst/preempt" for thread in pair.destination.threads()):
            inject.hold_next("rp-message")
        pair.source.signal("STOP")
        wire.channels[URGENT][1].shutdown(socket.SHUT_RDWR)
        # The channel's thread would notify others, under the lock of the held thread.
        until(lambda: pair.destination.sleeps_in("futex", "mig/dst/preempt"), "the channel breaks")
        inject.release("rp-message")
        until(lambda: pair.destination.cmd("query-status")["running"], "the guest runs on the destination")
        pair.source.signal("CONT")
        pair.wait_paused()
        pair.recover_and_finish()


def asked_to_stay(pair):
    """As Pair.listen()."""
    port = pair.port()
    pair.destination.cmd("migrate-incoming", uri=f"tcp:{pair.lab.address}:{port}", exit_on_error=False)
    return pair.uri_of(port)


def assert_stays(pair):
    """The destination has failed and reports that; nothing of post-copy is left there."""
    pair.destination.wait_status("failed")
    assert "load of migration failed" in pair.destination.cmd("query-migrate")["error-desc"]
    until(lambda: not pair.destination.has_open("[userfaultfd]"), "memory is not missing any more")
    until(lambda: "mig/dst/listen" not in [thread.name for thread in pair.destination.threads()], "the thread ends")
    assert not pair.destination.cmd("query-status")["running"]
    pair.destination.cmd("quit")
    assert pair.destination.job.wait().rc == 0


def test_destination_stays_if_it_is_asked_to(place):
    """The source resumes the guest at once, though it has memory for hours to send."""
    with Pair(place, mem=8, source_options=("-device", "pvpanic-pci")) as pair:
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=1 << 10)
        pair.start(asked_to_stay(pair))
        pair.source.cmd("migrate-start-postcopy")
        pair.source.wait_status("failed")
        until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on")
        assert_stays(pair)


def test_destination_stays_if_its_source_ends(place, monkeypatch):
    """The source exits while the destination's main thread waits for a page of the devices."""
    monkeypatch.setattr(Pair, "listen", asked_to_stay)
    with loading(place, Nothing()) as (pair, _):
        pair.source.signal("KILL")
        assert_stays(pair)
