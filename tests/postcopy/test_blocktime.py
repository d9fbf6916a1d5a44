# SPDX-License-Identifier: GPL-2.0-or-later
"""The waiting times of the guest and its vCPUs, in milliseconds: downtime, and the capability postcopy-blocktime."""
import time

import pytest

from tests.lab.backends import CHANNELS
from tests.lab.pair import INJECT, Pair, until

CAPABILITIES = ("postcopy-preempt", "postcopy-blocktime")
WAIT_S = 2
HELD = ("-S",)     # the destination does not run before "cont"


def blocktime(pair):
    info = pair.destination.cmd("query-migrate")
    print(info["postcopy-blocktime"], info["postcopy-vcpu-blocktime"])
    return info["postcopy-blocktime"], info["postcopy-vcpu-blocktime"]


def stop_source(pair):
    """Stop the source before the destination runs. Returns the faults after a wait of WAIT_S."""
    pair.postcopy(bandwidth=64 << 10)
    pair.source.signal("STOP")
    pair.destination.cmd("cont")
    faults = pair.until_all_wait()
    time.sleep(WAIT_S)
    return faults


def test_downtime_below_a_millisecond(place):
    """The source may measure a downtime of 0, which must not become the time until the end."""
    for _ in range(5):
        with Pair(place, mem=4, cpus=1, traced=False, **CHANNELS["one-channel"]) as pair:
            pair.postcopy(bandwidth=64 << 10)
            pair.until_faults()
            time.sleep(0.5)
            pair.finish_fast()
            assert pair.source.cmd("query-migrate")["downtime"] < 500


@pytest.mark.slow
@pytest.mark.parametrize("exits, kick", [("on", False), ("on", True), ("off", False)])
def test_all_wait(place, exits, kick):
    """All vCPUs wait for a stopped source; kick: while they wait, the vCPUs also serve other requests."""
    with Pair(place, exits=exits, capabilities=CAPABILITIES, mem=16, destination_options=HELD) as pair:
        begin = time.monotonic()
        stop_source(pair)
        if kick:
            assert pair.destination.registers_of_all() == 4
        pair.source.signal("CONT")
        pair.finish_fast()
        total, vcpus = blocktime(pair)
        longest = 1000 * (time.monotonic() - begin)
        assert len(vcpus) == 4
        assert all(900 * WAIT_S < vcpu < longest for vcpu in vcpus)
        # All vCPUs wait at the same time
        assert 900 * WAIT_S < total <= min(vcpus)


@pytest.mark.slow
def test_next_page_is_missed_first(place):
    """A vCPU misses its next page before the thread that has placed the previous page marks the end of that wait."""
    with Pair(place, exits="off", cpus=1, destination=INJECT, capabilities=CAPABILITIES, mem=16,
              destination_options=HELD) as pair:
        before = stop_source(pair)["uffd"]
        pair.destination.inject.arm("postcopy-placed")
        pair.source.signal("CONT")
        pair.destination.inject.wait_held("postcopy-placed")
        until(lambda: pair.faults()["uffd"] > before, "the next page is missed")
        pair.destination.inject.release("postcopy-placed")
        pair.finish_fast()
        total, (vcpu,) = blocktime(pair)
        assert 900 * WAIT_S < total <= vcpu


@pytest.mark.slow
def test_plugged_cpus(lab):
    """Three of four vCPUs are not in -smp's count."""
    words = ["-smp", "1,sockets=4,maxcpus=4",
             *(w for i in (1, 2, 3) for w in ("-device", f"max-x86_64-cpu,socket-id={i},core-id=0,thread-id=0"))]
    with Pair(lab, exits="on", capabilities=CAPABILITIES, cpus=1, mem=16, both_options=words) as pair:
        pair.postcopy()
        pair.destination.wait_status("completed")
        pair.finish()
        assert pair.source.report().the("boot")["cpus"] == 4
        _, vcpus = blocktime(pair)
        assert len(vcpus) == 4 and all(vcpus)
