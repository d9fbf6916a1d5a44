# SPDX-License-Identifier: GPL-2.0-or-later
"""After the switch, before the destination has loaded the devices: the guest can resume on the source."""
import socket
import threading
import time

import pytest

from tests.lab.backends import CHANNELS
from tests.lab.failures import Ended, Failures
from tests.lab.missing_at_load import loading
from tests.lab.pair import FORK, INJECT, MIB, NO_WINDOW, STOCK, Pair, until
from tests.lab.proxy import Close, Lie
from tests.postcopy.steps import assert_refused, held_at

REMEDY = "migrate_cancel resumes the guest here"
REFUSED = "Postcopy migration in progress, cannot cancel."


def until_split(pair):
    """The destination has exited, and the source is paused."""
    held_at(pair).cut()
    pair.source.wait_status("postcopy-paused")
    until(lambda: not pair.destination.job.running, "the destination ends")


@pytest.mark.parametrize("end, channels, destination", [
    ("cut", "preempt", FORK),
    ("killed", "one-channel", FORK),
    pytest.param("cut", "one-channel", STOCK, marks=pytest.mark.slow),
])
def test_cut_within_the_devices(place, end, channels, destination):
    """Only the administrator can find out that the destination does not run the guest, and resume it on the source."""
    with Pair(place, mem=8, destination=destination, **CHANNELS[channels]) as pair:
        wire = held_at(pair)
        faults = Failures(pair)
        assert_refused(pair.source, "cannot cancel unless it is paused", "migrate_cancel")
        faults.act("cut" if end == "cut" else "kill-destination", wire)
        pair.source.wait_status("postcopy-paused")
        assert REMEDY in pair.source.cmd("query-migrate")["error-desc"]
        assert not pair.source.cmd("query-status")["running"]
        if end == "killed":
            pair.source.cmd("migrate", uri=pair.uri_of(pair.port()), resume=True)
            said = until(lambda: "refused" in (desc := pair.source.cmd("query-migrate")["error-desc"]) and desc,
                         "the recovery fails")
            assert REMEDY in said
            pair.source.wait_status("postcopy-paused")
        assert faults.ended() == Ended.SOURCE


def test_guest_at_a_breakpoint(place):
    """It stays in the hands of the debugger."""
    with Pair(place, mem=8) as pair:
        pair.source.wait_ready()
        port = pair.port()
        pair.source.hmp(f"gdbserver tcp:{place.address}:{port}")
        with socket.create_connection(("127.0.0.1", place.host_port(port))) as gdb:
            gdb.sendall(b"+$s#73")      # one step
            until(lambda: pair.source.cmd("query-status")["status"] == "debug", "the guest has made a step")
            pair.postcopy()
            pair.fast()
            pair.wait_completed()
            assert pair.destination.cmd("query-status")["status"] == "debug"
            pair.destination.cmd("cont")
            pair.check_memory()


def test_memory_is_placed_until_the_destination_ends(place):
    """The destination cannot load the devices, and the thread that receives memory continues until the exit: QEMU must
    not write to missing memory, which would be a fault for that very thread."""
    with Pair(place, destination=INJECT, mem=16, source_options=("-device", "pvpanic-pci")) as pair:
        def written():
            return int(pair.lab.run(f"grep -c 'ram_load_loop ' {pair.destination.trace_log}").output)

        pair.start()
        # So that the destination has nothing to discard, and to answer, before
        pair.source.cmd("stop")
        pair.destination.qmp.cmd("trace-event-set-state", name="ram_load_loop", enable=True)
        inject = pair.destination.inject
        inject.arm("rp-message")
        pair.source.cmd("migrate-start-postcopy")
        # Before the packaged device state; then one thread sends SHUT, and the other one, which waits for it, PONG.
        inject.wait_held("rp-message")
        before = written()
        inject.hold_next("rp-message")
        until(lambda: any(pair.destination.sleeps_in("futex", *names) for names in ((), ("mig/dst/listen",))),
              "the other thread waits")
        inject.release("rp-message")
        assert pair.destination.job.wait().rc == 1
        assert written() == before
        until(lambda: pair.source.cmd("query-status")["status"] == "paused", "the guest is as it was")


def test_not_once_the_destination_may_run_it(place):
    with Pair(place, mem=8) as pair:
        wire = held_at(pair, "listen")
        until(lambda: pair.destination.cmd("query-status")["running"], "the guest runs on the destination")
        # Without this answer, the administrator would decide
        until(lambda: ("source_return_path_thread_pong", "0x3") in pair.source.trace(), "the source has the PONG")
        pair.source.cmd("migrate-pause")
        wire.cut()
        pair.wait_paused()
        assert_refused(pair.source, REFUSED, "migrate_cancel")
        pair.recover()
        assert_refused(pair.source, REFUSED, "migrate_cancel")
        pair.finish_fast()


class Full(Lie):
    """Passes on nothing until deliver is set, then only the packaged device state."""

    def __init__(self):
        super().__init__()
        self.deliver, self.end = threading.Event(), threading.Event()

    def package(self, package):
        self.deliver.wait()
        return super().package(package)

    def pass_on(self, data, send):
        self.end.wait()
        raise Close


@pytest.mark.parametrize("words", [pytest.param(NO_WINDOW, id="no-window"),
                                   # Filling the connection slice by slice takes a minute.
                                   pytest.param((), id="window", marks=pytest.mark.slow)])
def test_page_is_requested_when_the_guest_returns(place, words):
    """The source cannot send any more, so that the page stays requested. The next migration does not hurry because of
    it: it would use a processor, and find its bandwidth used up each time."""
    lie = Full()
    with loading(place, lie, until_waits=False, mem=48, memory_mb=64, source_options=words) as (pair, wire):
        def waits():
            pair.source.wait_status("active")
            used = pair.source.cpu_seconds("mig/src/main")
            time.sleep(3)
            used = pair.source.cpu_seconds("mig/src/main") - used
            assert pair.source.status() == "active"
            assert used < 0.5
            pair.source.cmd("migrate-set-parameters", max_bandwidth=128 * MIB)

        pair.fast()
        pair.until_stuck()
        lie.deliver.set()
        until(lambda: pair.source.cmd("query-migrate")["ram"]["postcopy-requests"], "a page is requested")
        pair.destination.signal("KILL")
        wire.cut()
        lie.end.set()
        pair.source.wait_status("postcopy-paused")
        faults = Failures(pair)
        assert faults.returned()
        faults.check_by_another(MIB, waits)


def test_not_with_released_memory(place):
    """Memory that release-ram has discarded on the source is lost."""
    with Pair(place, capabilities=("postcopy-preempt", "release-ram"), mem=8) as pair:
        until_split(pair)
        assert_refused(pair.source, REFUSED, "migrate_cancel")


def test_a_source_that_quits_runs_nothing(place):
    with Pair(place, mem=8) as pair:
        until_split(pair)
        events = pair.source.report().events
        pair.source.cmd("quit")
        assert pair.source.job.wait().rc == 0
        assert pair.source.report().events == events
