# SPDX-License-Identifier: GPL-2.0-or-later
"""tests/bench/demand-paging in the lab: who serves its faults, and what it refuses."""
import json

from tests.lab import kvm_interface
from tests.lab.arches import on_both
from tests.lab.paths import below

PAGES = 512     # of two vCPUs with 1 MiB each


def program(lab):
    return f"build/{below('tests', lab.arch)}/demand-paging"


def measure(lab, options):
    return json.loads(lab.run(f"{program(lab)} -v 2 -b 1 -j {options}", check=True).output)


@on_both("options", ["", "-a -u minor -s shmem -r 2"], quick=[""])
def test_userfaultfd(lab, options):
    figures = measure(lab, options)
    assert (figures["exits_count"], figures["uffd_events_count"]) == (0, PAGES)
    assert figures["voluntary_switches_per_fault_count"] > 0.5


def assert_exits(figures):
    assert (figures["exits_count"], figures["uffd_events_count"]) == (PAGES, 0)
    assert figures["bad_pages_count"] == 0
    assert 0 < figures["latency_p50_us"] <= figures["latency_max_us"]


@on_both("options", ["", "-u minor -s shmem"], quick=["-u minor -s shmem"])
def test_exits(lab, options):
    assert_exits(measure(lab, f"-w {options}"))


def test_mapped_at_once(lab):
    assert_exits(measure(lab, "-a -w -p"))


@on_both("options", ["", "-u minor -s shmem", "-b 4 -s hugetlb"], quick=[""])
def test_bitmap(lab, options):
    with kvm_interface.offered(lab, kvm_interface.USERFAULT):
        figures = measure(lab, f"-w -t {options}")
    assert (figures["exits_count"], figures["uffd_events_count"]) == (4 if "huge" in options else PAGES, 0)
    assert figures["bad_pages_count"] == 0


@on_both()
def test_huge_pages(lab):
    figures = measure(lab, "-b 4 -s hugetlb -w")
    assert (figures["page_size_kib"], figures["exits_count"]) == (2048, 4)


@on_both()
def test_shared(lab):
    figures = measure(lab, "-o -w")
    assert figures["touch_count"] == PAGES
    assert PAGES / 2 <= figures["exits_count"] <= PAGES
    # Two vCPUs that made one page: one of them found it there.
    assert figures["exits_count"] - figures["eexist_count"] == PAGES / 2


@on_both()
def test_refused(lab):
    with kvm_interface.offered(lab):
        exits, bitmap = lab.run(f"{program(lab)} -w"), lab.run(f"{program(lab)} -w -t")
    assert exits.rc == 2 and "no KVM_MEM_EXIT_ON_MISSING" in exits.output
    assert bitmap.rc == 2 and "no KVM_MEM_USERFAULT" in bitmap.output
