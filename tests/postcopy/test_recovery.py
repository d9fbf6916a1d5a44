# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy that loses its connection while vCPUs wait for pages, and is recovered."""
import time

import pytest

from tests.lab import tls
from tests.lab.arches import both_interfaces, choices, listed, on_both
from tests.lab.backends import BACKENDS, CHANNELS, guest_on
from tests.lab.pair import INJECT, MIB, NO_WINDOW, Pair, until
from tests.lab.proxy import MAIN, Within

slow = pytest.mark.slow


def pause(pair):
    """The administrator pauses the migration."""
    pair.source.cmd("migrate-pause")


def reset(pair):
    """The connection breaks."""
    pair.cut()


def silence(pair):
    """The connection passes no data, without an error; the administrator pauses both sides."""
    pair.black_hole()
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
        pair.midst(pair.through_proxy(pair.listen()))
        trouble(pair)
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


def breaks_again(pair, after):
    """A recovery whose connection breaks after this number of bytes."""
    wire = pair.wire(pair.listen("migrate-recover"), stop_after=after)
    pair.source.cmd("migrate", uri=wire.uri, resume=True)
    until(lambda: wire.stopped, "the connection has broken")
    pair.wait_paused()


@slow
@on_both()
def test_recovery_fails_and_is_tried_again(lab):
    """The connection breaks in the handshake; then no source connects, and the destination listens anew."""
    with Pair(lab, exits="on", pattern="shared", mem=16) as pair:
        pair.midst()
        pair.pause()
        breaks_again(pair, 1)
        breaks_again(pair, 100)
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
        until(lambda: "migration_completion_postcopy_end_after_complete" in dict(pair.source.trace()),
              "the source has sent all")
        if trouble == "pause":
            pair.source.cmd("migrate-pause")
        else:
            wire.cut()
        pair.wait_paused()
        pair.recover()
        pair.finish()


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
            pair.recover()
            pair.finish()
    finally:
        lab.run(f"echo {had.strip()} >{pool}", check=True)


@pytest.mark.parametrize("backend, channels", choices(
    ["anonymous", "hugetlb"], CHANNELS, quick=[("anonymous", "fetch")]))
def test_tls(lab, backend, channels):
    """An encrypted connection is broken and recovered."""
    with Pair(lab, exits="on", tls=tls.directory(lab), **CHANNELS[channels], **guest_on(backend)) as pair:
        pair.broken_and_recovered()


MONITOR = 4200     # of the destination, in L1


@pytest.mark.parametrize("channels, encrypted, trouble", [
    pytest.param("preempt", True, "cut", marks=slow),
    ("fetch", False, "pause"),
    pytest.param("preempt", False, "pause", marks=slow),
    pytest.param("one-channel", True, "pause", marks=slow),
    pytest.param("fetch", True, "cut", marks=slow),
])
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
@on_both()
def test_recovery_while_the_guest_is_stopped(lab):
    with Pair(lab, exits="on", pattern="shared", mem=16) as pair:
        pair.midst()
        pair.pause()
        pair.until_all_wait()
        pair.destination.cmd("stop")
        pair.recover()
        pair.destination.cmd("cont")
        pair.finish_fast()


@pytest.mark.slow
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
        pair.recover()
        pair.finish()


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
