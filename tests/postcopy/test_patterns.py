# SPDX-License-Identifier: GPL-2.0-or-later
"""vCPUs that miss the same page, the same huge page, different pages, zero pages; by SMI; ROM."""

import pytest

from tests.lab.arches import both_interfaces, choices, listed, on_both
from tests.lab.backends import guest_on
from tests.lab.kvm_interface import USERFAULT
from tests.lab.pair import MIB, Pair
from tests.lab.paths import SANITIZED
from tests.lab.text import search

EXITS = ("on", "off")
WITH_EXITS = listed(*EXITS, quick=["on"])
# Pages of the firmware, which the guest reads. Its memslots are read-only and do not exit.
ROM_PAGES = 16
PAGE = 4096
# RAMBlocks of the guest's memory, whose memslots exit.
RAM = ("pc.ram", "mach-virt.ram", "ram")
HUGETLB = ("hugetlb-file", "hugetlb-private", "hugetlb")
SHARED = ("memfd", "shm", "anonymous-shared")


def migrate(place, exits, at_least=20, bandwidth=MIB, **options):
    """Migrate a guest of 4 vCPUs; returns the counts of its faults, and the destination's trace."""
    with Pair(place, exits=exits, **({"mem": 4} | options)) as pair:
        pair.postcopy(bandwidth=bandwidth)
        pair.finish()
        faults = pair.faults()
        print(faults)
        trace = pair.destination.trace()
        # A set of block and offset: a thread that is kicked while it waits reports its page again.
        uffd = {text.rsplit(" state ", 1)[0] for name, text in trace if name == "postcopy_fault_uffd"}
        if exits == "on":
            assert faults["exits"] > at_least
            assert len(uffd) <= ROM_PAGES and not [page for page in uffd if page.split()[0] in RAM], uffd
        else:
            assert faults["exits"] == faults["populated"] == 0 and faults["uffd"] > at_least
        # A page is requested once for all vCPUs; or never, if it is received before a vCPU has sent the request.
        unsent = faults["requests"] - pair.source.cmd("query-migrate")["ram"]["postcopy-requests"]
        assert 0 <= unsent <= pair.cpus
        in_place = options.get("backend") in ("hugetlb-file", "hugetlb")
        assert in_place == any(name == "postcopy_mirror" and text.startswith("ram ")
                             for name, text in trace)
        if in_place:
            # All memory was allocated by the helper thread, none by a thread that receives pages.
            assert dict(trace)["postcopy_mirror_memory"] == f"ram: {options['memory_mb'] * MIB:#x} bytes, 0"
        assert "postcopy_receive_twice" not in dict(trace)
        return faults, trace


def assert_shared(faults):
    """Up to four vCPUs miss a page; it is requested once. vCPUs share no pages of the ROM. If they shared none at all,
    each exit would be a request; if all met, one in four."""
    assert faults["requests"] - faults["uffd"] < 0.7 * faults["exits"]


@both_interfaces
@on_both("exits", WITH_EXITS, quick=["on"])
def test_different_pages(place, exits):
    migrate(place, exits, pattern="disjoint")


@both_interfaces
def test_mapped_at_once(lab):
    """A received page is mapped before the vCPU resumes, which would fault again otherwise."""
    with Pair(lab, exits="on", mem=8, zero=0) as pair:
        # Hardly any page is received before it is missed.
        pair.postcopy(bandwidth=64 << 10)
        dst = pair.destination
        dst.wait_event("end")
        pair.finish_fast()
        taken = int(lab.run(f"cat /sys/kernel/debug/kvm/$(cat {dst.pidfile})-*/pf_taken", check=True).output)
        exits, pages = pair.faults()["exits"], pair.source.report().the("boot")["test_pages"]
    print(f"{taken} faults in KVM, {exits} exits, {pages} pages")
    # The longer the guest takes, the more pages the background sends first.
    assert SANITIZED or exits > pages / 8
    # One fault per missed page, and one after its mapping was dropped; some for other memory.
    assert taken < 2 * pages + exits / 2


@both_interfaces
@on_both("exits", WITH_EXITS)
def test_same_page(place, exits):
    faults, _ = migrate(place, exits, pattern="shared")
    if exits == "on":
        assert_shared(faults)


@both_interfaces
@on_both("exits, backend",
         choices(EXITS, SHARED, quick=[("on", "memfd"), ("off", "anonymous-shared")]))
def test_shared_memory(place, exits, backend):
    """Every other page is zero until it is written to."""
    migrate(place, exits, pattern="shared", zero=50, backend=backend)


@both_interfaces
@on_both("exits, backend",
         choices(EXITS, HUGETLB, quick=[("on", "hugetlb")]))
def test_same_huge_page(place, exits, backend):
    faults, _ = migrate(place, exits, at_least=5, bandwidth=16 * MIB, **guest_on(backend))
    # Requests are for the host's pages, of which there are 32.
    assert faults["requests"] <= 32 + ROM_PAGES
    if exits == "on":
        assert_shared(faults)


@both_interfaces
@on_both("exits", WITH_EXITS)
def test_write_to_a_zero_page(place, exits, by):
    faults, trace = migrate(place, exits, pattern="zerowrite", zero=60)
    if exits == "off":
        assert faults["populated"] == 0
        return

    def pages(event):
        """Page and state of each event; state 1: the vCPU requested it."""
        return [search(r"^cpu \d+ (\S+ 0x\w+)(?: state (\d))?", text).groups()
                for name, text in trace if name == event]

    # The kernel maps its zero page read-only, for which KVM exits again: a page for which a vCPU waits is placed
    # writable, unless it was claimed just before the vCPU requested it. test_exit_on_present_page.py counts pages that
    # were received before.
    requested = {page for page, state in pages("postcopy_fault_exit") if state == "1"}
    twice = requested & {page for page, _ in pages("postcopy_fault_populate")}
    print(f"{len(requested)} requested, {len(twice)} of them exited for twice")
    assert len(requested) > 20 and len(twice) <= len(requested) / 20
    if by == USERFAULT:
        # Only pages that were received between the exit and its check.
        assert faults["populated"] <= faults["exits"] / 20, faults


@pytest.mark.slow
@both_interfaces
def test_smm(lab):
    _, trace = migrate(lab, "on", pattern="smm", machine="q35,smm=on")
    missed = [search("cpu_index (.*), as_id (.*), gpa", text).groups()
              for name, text in trace if name == "kvm_exit_on_missing"]
    # Only vCPU 0 touches memory by its SMI handler, and more than the few pages of the handler itself.
    assert {cpu for cpu, as_id in missed if as_id == "1"} == {"0"}
    assert SANITIZED or sum(as_id == "1" for _, as_id in missed) > 10
    assert {cpu for cpu, as_id in missed if as_id == "0"} >= {"1", "2", "3"}
