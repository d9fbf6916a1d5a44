# SPDX-License-Identifier: GPL-2.0-or-later
"""vCPUs that are kicked out of their wait fault again: that is no other fault."""
import pytest

from tests.lab.pair import Pair

KICKS = 20


@pytest.mark.slow
@pytest.mark.parametrize("exits", ["off", "on"])
def test_kicked_while_paused(lab, exits):
    with Pair(lab, exits=exits, mem=16) as pair:
        destination = pair.destination
        pair.postcopy(bandwidth=64 << 10)
        destination.wait_event("timing")
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
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
