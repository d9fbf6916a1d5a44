# SPDX-License-Identifier: GPL-2.0-or-later
"""Exits for pages that are there: swapped out."""
import re

import pytest

import guest
from pair import Pair, until
from wire import MAIN, Endless

TIMES = 150
DIMM = ("-object", "memory-backend-ram,id=far,size=8M", "-device", "pc-dimm,memdev=far")


@pytest.fixture
def swap(lab):
    lab.run("mkswap /dev/ram0 && swapon /dev/ram0", check=True)
    yield
    lab.run("swapoff /dev/ram0", check=True)


def test_swapped_out_again_and_again(lab, swap):
    """The host reclaims the page that the guest executes, while post-copy goes on without other faults."""
    with Pair(lab, exits="on", cpus=1, memory_mb="32,slots=1,maxmem=1G", payload=guest.payload("far"), mem=8,
              source_options=DIMM, destination_options=DIMM) as pair:
        pair.postcopy(pair.wire(pair.listen(), lie=Endless(), lying=MAIN).uri, bandwidth=0)
        destination = pair.destination
        until(lambda: "migration_completion_postcopy_end_after_complete" in dict(pair.source.trace()),
              "the source has sent all")
        destination.wait_event("timing")
        until(lambda: not pair.faults()["awaited"], "all has come")
        page = int(re.search(r"RIP=(\w+)", destination.hmp("info registers"))[1], 16) & -4096
        address = re.search(r" is (0x\w+)", destination.hmp(f"gpa2hva {page:#x}"))[1]
        before = pair.faults()["populated"]
        for _ in range(3):
            lab.run(f"p=$(cat {destination.pidfile}); for i in $(seq {TIMES // 3}); do "
                    f"build/lab/bin/pageout $p {address} 4096; usleep 20000; done", check=True)
            print(pair.faults())
            assert destination.cmd("query-status")["status"] == "running", destination.job.output
        assert pair.faults()["populated"] - before > 0.8 * TIMES
        # The guest goes on, and so does the migration.
        destination.hmp("o/b 0x70 0x40")
        destination.hmp("o/b 0x71 1")
        destination.wait_event("end")
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
        pair.recover()
        pair.finish()
