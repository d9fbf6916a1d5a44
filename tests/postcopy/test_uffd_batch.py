# SPDX-License-Identifier: GPL-2.0-or-later
"""Faults that the fault thread reads at once."""
import time

import pytest

from tests.lab.pair import INJECT, Pair, until


@pytest.mark.slow
def test_error_within_a_batch(place):
    """One of four faults cannot be served; the others are."""
    with Pair(place, exits="off", source=INJECT, destination=INJECT, mem=16, destination_options=("-S",)) as pair:
        inject = pair.destination.inject
        pair.postcopy(bandwidth=64 << 10)
        inject.arm("postcopy-uffd-read")
        pair.destination.cmd("cont")
        inject.wait_held("postcopy-uffd-read")
        until(lambda: pair.destination.waiting_vcpus() == set(range(pair.cpus)), "all vCPUs wait for pages")
        before = pair.faults()["requests"]
        inject.arm("postcopy-uffd")
        inject.release("postcopy-uffd-read")
        until(lambda: inject.passed("postcopy-uffd"), "the error")
        until(lambda: pair.faults()["requests"] >= before + 3, "the others are asked for", timeout=20)
        time.sleep(1)
        if pair.destination.status() == "postcopy-paused":
            pair.wait_paused()
            pair.recover()
        pair.finish_fast()
