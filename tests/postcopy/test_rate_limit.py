# SPDX-License-Identifier: GPL-2.0-or-later
"""Limits of the source and its guest: max-postcopy-bandwidth, which applies to pages that were not requested, and the
dirty limit, which ends with the migration."""
import time

import pytest

from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import MIB, NO_WINDOW, Pair, until


def test_page_on_its_way(lab):
    """Without a window, the background sleeps within a huge page; a vCPU that misses that page wakes it."""
    with Pair(lab, memory_mb=48, pattern="samehuge", backend="hugetlb", source_options=NO_WINDOW,
              destination_options=["-S"]) as pair:
        pair.postcopy(bandwidth=32 << 10)

        def slept():
            return pair.source.trace().count(("migration_rate_limit_post", "urgent: 0"))

        before = slept()
        until(lambda: slept() > before + 2, "the background sleeps within a page")
        pair.destination.cmd("cont")
        pair.check_memory()
        pair.finish_fast()
        trace = [f"{name} {text}" for name, text in pair.source.trace()
                 if name in ("postcopy_preempt_hit", "migration_rate_limit_post")]
        hits = [i for i, event in enumerate(trace) if event.startswith("postcopy_preempt_hit ramblock ram ")]
        assert hits, "no vCPU has missed a page in flight"
        # Requests for a page that was already woken do not count; and the background's sleep may end at the same time.
        woken = [i for i in hits if any(event.endswith("urgent: 1") for event in trace[i + 1:i + 3])]
        assert len(woken) >= 0.5 * len(hits), trace


def test_limit_below_a_slice(place):
    """The limit holds though a slice takes longer than the migration thread may sleep, and a new limit acts at once."""
    limit, piece = 64 << 10, 16 << 10
    with Pair(place, mem=8, pattern="disjoint", destination_options=["-S"]) as pair:
        pair.postcopy(bandwidth=limit)

        def sent():
            return pair.source.cmd("query-migrate")["ram"]["postcopy-bytes"]

        time.sleep(1)       # for pages that the vCPUs must touch first
        begin, before = time.monotonic(), sent()
        time.sleep(3)
        took = time.monotonic() - begin
        assert sent() - before < limit * took + 2 * piece, (before, sent())
        begin = time.monotonic()
        pair.fast()
        pair.wait_completed()
        assert time.monotonic() - begin < took
        pair.destination.cmd("cont")
        pair.check_memory()


def test_postcopy_begins_among_huge_pages(lab):
    """Pre-copy, which sleeps within each of 64 huge pages, does not send them all first."""
    with Pair(lab, memory_mb=128, mem=96, zero=0, backend="hugetlb") as pair:
        pair.postcopy(bandwidth=0)
        sent = pair.source.cmd("query-migrate")["ram"]
        assert sent["precopy-bytes"] < 48 * MIB, sent
        pair.finish()


@pytest.mark.slow
def test_dirty_ring(lab, monkeypatch):
    """KVM's other way to report the guest's writes, on both hosts, with fetch channels."""
    monkeypatch.setattr(lab, "qemu_words", ("-accel", "kvm,dirty-ring-size=1024", "-cpu", "max"))
    with LinuxPair(lab, mem=16, fetch=4) as pair:
        for hop in range(2):
            if hop:
                pair.next()
            pair.postcopy(bandwidth=16 * MIB)
            pair.finish_fast()
            pair.check_threads()


@pytest.mark.parametrize("name", ["auto-converge", pytest.param("xbzrle", marks=pytest.mark.slow)])
def test_until_the_switch(place, name):
    """A capability that helps pre-copy does not slow down post-copy, whose guest is stopped on the source."""
    with Pair(place, exits=None, mem=16, fetch=4, capabilities=(name,)) as pair:
        def info():
            return pair.source.cmd("query-migrate")
        pair.start(bandwidth=16 * MIB)
        until(lambda: "cpu-throttle-percentage" in info() or info().get("xbzrle-cache", {}).get("pages"), "it works")
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=MIB)
        pair.source.cmd("migrate-start-postcopy")
        pair.source.wait_status("postcopy-active")
        assert "cpu-throttle-percentage" not in info()
        pair.finish_fast()


@pytest.mark.parametrize("end", ["failed", *(pytest.param(end, marks=pytest.mark.slow)
                                             for end in ("cancelled", "completed", "users"))])
def test_dirty_limit_ends_with_the_migration(lab, end, monkeypatch):
    """The limit of each vCPU ends, but not a limit that the user has set. It needs KVM's dirty ring."""
    monkeypatch.setattr(lab, "qemu_words", ("-accel", "kvm,dirty-ring-size=1024", "-cpu", "max"))
    with Pair(lab, mem=8) as pair:
        source = pair.source

        def limits():
            return [limit["limit-rate"] for limit in source.cmd("query-vcpu-dirty-limit")]

        source.set_capabilities("dirty-limit")
        source.cmd("migrate-set-parameters", vcpu_dirty_limit=1, x_vcpu_dirty_limit_period=100)
        source.cmd("set-vcpu-dirty-limit", dirty_rate=1000)
        if end != "users":
            pair.start(bandwidth=4 * MIB)
            until(lambda: limits() == [1] * pair.cpus, "the guest is throttled")
        if end == "completed":
            source.cmd("migrate-start-postcopy")
            pair.finish_fast()
        elif end == "failed":
            pair.destination.signal("KILL")
            source.wait_status("failed")
        else:
            source.cmd("migrate_cancel")
            until(lambda: source.status() in (None, "cancelled"), "the migration is cancelled")
        until(lambda: limits() == [1000] * pair.cpus * (end == "users"), "no limit of migration's is left", timeout=10)
