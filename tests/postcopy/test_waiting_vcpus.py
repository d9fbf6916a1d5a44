# SPDX-License-Identifier: GPL-2.0-or-later
"""The destination's monitor answers while its vCPUs wait for pages."""
import pytest

from tests.lab.arches import both_interfaces, on_both
from tests.lab.pair import Pair

KICKS = 20


@both_interfaces
@on_both("pattern", [pytest.param("disjoint", marks=pytest.mark.slow), "shared"])
def test_stop_cont_and_queries(lab, pattern):
    with Pair(lab, exits="on", pattern=pattern, mem=16) as pair:
        destination = pair.destination
        pair.midst()
        # A source that does not answer.
        pair.source.signal("STOP")
        counts = pair.until_all_wait()

        assert destination.cmd("query-status")["status"] == "running"
        assert len(destination.cmd("query-cpus-fast")) == 4
        assert destination.status() == "postcopy-active"
        assert f"exits {counts['exits']}, " in destination.hmp("info migrate")
        # These are done by the vCPUs' threads, which come out of the wait for them.
        assert destination.registers_of_all() == 4
        if lab.arch == "x86_64":
            assert "LVT0" in destination.hmp("info lapic")
        assert destination.job.running

        for _ in range(3):
            destination.cmd("stop")
            assert destination.cmd("query-status")["status"] == "paused"
            assert destination.waiting_vcpus() == set()
            destination.cmd("cont")
            assert destination.cmd("query-status")["status"] == "running"
            # They come back to the same faults, which are not counted again.
            assert pair.until_all_wait()["exits"] == counts["exits"]

        pair.source.signal("CONT")
        pair.finish_fast()


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
    """vCPUs that are kicked out of their wait fault again: that is no other fault."""
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
