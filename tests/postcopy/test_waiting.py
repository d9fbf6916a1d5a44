# SPDX-License-Identifier: GPL-2.0-or-later
"""The destination's monitor answers while its vCPUs wait for pages."""
import re

import pytest

from pair import Pair


def waiting_vcpus(trace):
    """vCPUs whose last event is an exit for a missing page."""
    last = {}
    for name, text in trace:
        if name in ("postcopy_fault_exit", "postcopy_fault_exit_end"):
            last[int(re.match(r"cpu (\d+)", text)[1])] = name
    return {cpu for cpu, name in last.items() if name == "postcopy_fault_exit"}


@pytest.mark.parametrize("pattern", ["disjoint", "shared"])
def test_stop_cont_and_queries(lab, pattern):
    with Pair(lab, exits="on", pattern=pattern, mem=16) as pair:
        destination = pair.destination
        pair.postcopy()
        # A source that does not answer.
        pair.source.signal("STOP")
        counts = pair.until_all_wait()
        assert waiting_vcpus(destination.trace()) == {0, 1, 2, 3}

        assert destination.cmd("query-status")["status"] == "running"
        assert len(destination.cmd("query-cpus-fast")) == 4
        assert destination.status() == "postcopy-active"
        assert f"exits {counts['exits']}, " in destination.hmp("info migrate")
        # These are done by the vCPUs' threads, which come out of the wait for them.
        assert destination.hmp("info registers -a").count("RIP=") == 4
        assert "LVT0" in destination.hmp("info lapic")
        assert destination.job.running

        for _ in range(3):
            destination.cmd("stop")
            assert destination.cmd("query-status")["status"] == "paused"
            assert waiting_vcpus(destination.trace()) == set()
            destination.cmd("cont")
            assert destination.cmd("query-status")["status"] == "running"
            # They come back to the same faults, which are not counted again.
            assert pair.until_all_wait() == counts
            assert waiting_vcpus(destination.trace()) == {0, 1, 2, 3}

        pair.source.signal("CONT")
        pair.finish()


def test_quit(lab):
    with Pair(lab, exits="on", mem=16) as pair:
        pair.postcopy()
        pair.source.signal("STOP")
        pair.until_all_wait()
        pair.destination.cmd("quit")
        assert pair.destination.job.wait(20).rc == 0
