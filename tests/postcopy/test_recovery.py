# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy that loses its connection while vCPUs wait for pages, and is recovered."""
import time

import pytest

from tests.lab import tls
from tests.lab.arches import both_interfaces, listed, on_both
from tests.lab.backends import BACKENDS, CHANNELS, guest_on
from tests.lab.pair import INJECT, MIB, NO_WINDOW, Pair, until
from tests.lab.proxy import MAIN, URGENT, Wire, Within
from tests.postcopy.steps import until_all_sent

slow = pytest.mark.slow


def pause(pair, wire):
    pair.source.cmd("migrate-pause")


def reset(pair, wire):
    wire.cut()


def silence(pair, wire):
    """The connection passes no data, without an error; the administrator pauses both sides."""
    wire.silence()
    pair.until_all_wait()
    for side in pair.sides:
        assert side.status() == "postcopy-active"
        side.cmd("migrate-pause")


@both_interfaces
@on_both("trouble, exits, channels", listed(
    (reset, "on", "preempt"), (reset, "off", "one-channel"), (silence, "on", "one-channel"),
    (silence, "off", "preempt"), (pause, "on", "preempt"), (pause, "off", "one-channel"),
    quick=[(reset, "on", "preempt"), (pause, "off", "one-channel")]))
def test_recovery(lab, trouble, exits, channels):
    with Pair(lab, exits=exits, pattern="shared", mem=16, **CHANNELS[channels]) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri)
        trouble(pair, wire)
        pair.wait_paused()
        counts = pair.until_all_wait()
        assert pair.destination.cmd("query-status")["status"] == "running"
        if exits == "on":
            # vCPUs that wait for the recovery still serve other requests.
            assert pair.destination.registers_of_all() == 4
            assert pair.faults()["exits"] == counts["exits"]
        pair.recover()
        pair.until_requests(counts["requests"])
        pair.finish_fast()
        if exits == "on":
            assert "postcopy_fault_ask_again" in dict(pair.destination.trace())


@both_interfaces
@on_both("backend, exits, channels", listed(
    ("memfd", "on", "preempt"), ("memfd", "off", "one-channel"), ("hugetlb", "on", "one-channel"),
    ("hugetlb", "off", "preempt"), ("hugetlb-private", "on", "preempt"), ("hugetlb-private", "off", "one-channel"),
    quick=[("hugetlb", "on", "one-channel")]))
def test_recovery_within_a_page(place, backend, exits, channels):
    """The connection breaks when a part of a huge page was received, and vCPUs wait."""
    with Pair(place, exits=exits, **CHANNELS[channels], **guest_on(backend)) as pair:
        # Within the 512 parts of a huge page, after the ROMs' pages or not
        wire = pair.wire(pair.listen(), lie=Within(at=300), lying=MAIN)
        pair.postcopy(wire.uri, bandwidth=0)
        pair.wait_paused()
        pair.recover_and_finish()


@slow
@on_both()
def test_recovery_fails_and_is_tried_again(lab):
    """The connection breaks in the handshake; then no source connects, and the destination listens anew."""
    with Pair(lab, exits="on", pattern="shared", mem=16) as pair:
        pair.midst()
        pair.pause()

        def breaks(sent_bytes):
            wire = pair.wire(pair.listen("migrate-recover"), stop_after=sent_bytes)
            pair.source.cmd("migrate", uri=wire.uri, resume=True)
            until(lambda: wire.stopped, "the connection has broken")
            pair.wait_paused()

        breaks(1)
        breaks(100)
        pair.listen("migrate-recover")
        pair.recover_and_finish()


@on_both("trouble", listed("break", "pause", quick=["break"]))
def test_recovery_when_all_was_sent(lab, trouble):
    """The source has nothing left to send, and waits for the destination, which lacks pages."""
    # With a window, it would wait for answers before
    with Pair(lab, exits="on", pattern="shared", mem=16, source_options=NO_WINDOW) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri)
        wire.swallows = True
        pair.fast()
        until_all_sent(pair)
        if trouble == "pause":
            pair.source.cmd("migrate-pause")
        else:
            wire.cut()
        pair.wait_paused()
        pair.recover_and_finish()


@slow
def test_no_memory_for_a_page(lab):
    """The destination's host runs out of huge pages, and gets some more."""
    pool = "/proc/sys/vm/nr_hugepages"
    had = lab.run(f"cat {pool}", check=True).output
    try:
        # Private, since shared huge pages are allocated before they are received.
        with Pair(lab, exits="on", backend=BACKENDS["hugetlb-private"] + ",reserve=off",
                  pattern="samehuge", memory_mb=64, mem=48) as pair:
            pair.midst(pair.wire(pair.listen(), rate=4 * MIB).uri, bandwidth=64 * MIB)
            used = int(lab.run("awk '/HugePages_Total/ {t=$2} /HugePages_Free/ {print t-$2}' "
                               "/proc/meminfo", check=True).output)
            lab.run(f"echo {used + 2} >{pool}", check=True)
            pair.wait_paused()
            pair.destination.wait_says("Cannot allocate memory")
            lab.run(f"echo {had.strip()} >{pool}", check=True)
            pair.recover_and_finish()
    finally:
        lab.run(f"echo {had.strip()} >{pool}", check=True)


MONITOR = 4200     # of the destination, in L1


@pytest.mark.parametrize("channels, encrypted, trouble", listed(
    ("preempt", True, "cut"), ("fetch", False, "pause"), ("preempt", False, "pause"),
    ("one-channel", True, "pause"), ("fetch", True, "cut"), quick=[("fetch", False, "pause")]))
def test_recovery_while_the_main_thread_waits(lab, channels, encrypted, trouble):
    """QEMU's main thread reads a missing page: out-of-band commands recover."""
    with Pair(lab, exits="on", pattern="shared", mem=16, tls=tls.directory(lab) if encrypted else None,
              destination_options=("-monitor", f"tcp:127.0.0.1:{MONITOR},server=on,wait=off"),
              **CHANNELS[channels]) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri)
        wire.swallows = True
        # The end of the memory is sent last, but for pages that the guest has touched.
        boot = pair.source.report().the("boot")
        end = boot["test_address"] + (boot["test_pages"] << 12)
        pages = [end - n * 4096 for n in range(1, 101)]
        words = "".join(f"xp /1gx {page:#x}\\n" for page in pages)
        reader = lab.job(f"(printf '{words}'; sleep 1000) | nc 127.0.0.1 {MONITOR}")
        until(pair.destination.main_thread_waits, "the main thread waits for a page")
        if trouble == "cut":
            wire.cut()
        else:
            assert not pair.destination.cmd_out_of_band("migrate-pause")
        pair.source.wait_status("postcopy-paused")
        port = pair.port()
        until(lambda: not pair.destination.cmd_out_of_band("migrate-recover", uri=f"tcp:{lab.address}:{port}"),
              "the destination is paused, and listens")
        pair.source.cmd("migrate", uri=pair.uri_of(port), resume=True)
        pair.wait_recovered()
        pair.finish_fast()
        until(lambda: f"{pages[-1]:016x}: 0x" in reader.output, "all pages have been read")
        reader.kill()


@slow
def test_recovery_within_a_requested_page(lab):
    """The source has sent a part of a requested huge page: it sends the page again from the beginning."""
    with Pair(lab, source=INJECT, exits="on", capabilities=(), cpus=1, **guest_on("hugetlb")) as pair:
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=8 * MIB)
        pair.start()
        # The only vCPU can have requested no other page.
        pair.source.inject.arm("save-within-page")
        pair.source.cmd("migrate-start-postcopy")
        pair.wait_paused()
        assert pair.source.inject.passed("save-within-page")
        pair.recover_and_finish()


@slow
def test_pages_that_do_not_come(place):
    """The destination warns of them, but not of pages of an outage while a recovery requests them again."""
    with Pair(place, exits=None, destination=INJECT, mem=16, pattern="shared") as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri)
        pair.source.signal("STOP")
        pair.destination.wait_says("are awaited")
        wire.cut()
        pair.source.signal("CONT")
        pair.wait_paused()
        time.sleep(11)      # the time before a warning
        pair.destination.inject.arm("postcopy-ask")
        pair.source.cmd("migrate", uri=pair.listen("migrate-recover"), resume=True)
        pair.destination.inject.wait_held("postcopy-ask")
        time.sleep(2)
        assert pair.destination.job.output.count("are awaited") == 1
        pair.destination.inject.release("postcopy-ask")
        pair.wait_recovered()
        pair.finish_fast()


class ReadsNoUrgentPages(Wire):
    """Reads nothing on the source's first preempt channel."""

    def _forward(self, channel):
        return self._nothing if channel == URGENT else self._copy

    def _nothing(self, a, b):
        while not self.is_cut:
            time.sleep(0.1)


def test_destination_is_paused_while_it_sends(lab):
    """migrate-pause interrupts a thread that sends page requests, with the lock of the return path, to a peer that does
    not read."""
    with Pair(lab, exits="on", source=INJECT, destination=INJECT, pattern="shared", mem=16) as pair:
        pair.midst()
        pair.destination.inject.arm("rp-message")
        pair.destination.inject.wait_held("rp-message")
        pair.destination.cmd("migrate-pause")
        pair.source.wait_status("postcopy-paused")
        pair.destination.inject.release("rp-message")
        pair.wait_paused()
        pair.recover_and_finish()


def test_source_is_paused_while_it_sends(lab):
    """Huge pages on the preempt channel, with the lock of the dirty bitmap, so that the background stops, too. Two fit
    into the sockets' buffers. A vCPU that moves first waits for the others, and misses no page."""
    with Pair(lab, exits="on", backend="hugetlb", pattern="disjoint", memory_mb=64, mem=48) as pair:
        wire = pair.wire_of(ReadsNoUrgentPages, pair.listen())
        pair.postcopy(wire.uri, bandwidth=8 * MIB)
        pair.until_faults()
        pair.until_stuck()
        pair.source.cmd("migrate-pause")
        pair.source.wait_status("postcopy-paused")
        wire.cut()
        pair.wait_paused()
        pair.recover_and_finish()
