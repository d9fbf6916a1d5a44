# SPDX-License-Identifier: GPL-2.0-or-later
"""tests/bench/demand-paging.c in the lab: the threads that serve its faults, and options that it refuses."""
import json

import pytest

from tests.lab import kvm_interface

pytestmark = pytest.mark.slow
PROGRAM = "build/tests/demand-paging"
PAGES = 512     # of two vCPUs with 1 MiB each


@pytest.mark.parametrize("options, exits", [("", False), ("-m -w", True), ("-w -p", True), ("-w -t", True)])
def test_who_serves_faults(lab, options, exits):
    with kvm_interface.offered(lab, *kvm_interface.ALL):
        figures = json.loads(lab.run(f"{PROGRAM} -v 2 -b 1 {options}", check=True).output)
    assert (figures["exits_count"], figures["uffd_events_count"]) == ((PAGES, 0) if exits else (0, PAGES))
    assert figures["bad_pages_count"] == 0
    assert exits or figures["voluntary_switches_per_fault_count"] > 0.5
    assert 0 < figures["latency_p50_us"] <= figures["latency_p100_us"]


def test_refused(lab):
    with kvm_interface.offered(lab):
        exits, bitmap = lab.run(f"{PROGRAM} -w"), lab.run(f"{PROGRAM} -w -t")
    assert exits.rc == 2 and "no KVM_MEM_EXIT_ON_MISSING" in exits.output
    assert bitmap.rc == 2 and "no KVM_MEM_USERFAULT" in bitmap.output
