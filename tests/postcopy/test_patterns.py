# SPDX-License-Identifier: GPL-2.0-or-later
"""vCPUs that miss the same page, the same huge page, different pages, zero pages; by SMI; ROM; in a nested guest; and
which memslots get KVM_MEM_EXIT_ON_MISSING or KVM_MEM_USERFAULT, and for how long."""
import pytest

from tests.lab import guest
from tests.lab.arches import both_interfaces, choices, listed, on_aarch64, on_both
from tests.lab.backends import guest_on
from tests.lab.kvm_interface import USERFAULT
from tests.lab.pair import MIB, Pair
from tests.lab.paths import SANITIZED
from tests.lab.text import search

EXITS = ("on", "off")
WITH_EXITS = listed(*EXITS, quick=["on"])
# Pages of the firmware, which the guest reads. Its memslots are read-only and do not exit.
ROM_PAGES = 16
# RAMBlocks of the guest's memory, whose memslots exit.
RAM = ("pc.ram", "mach-virt.ram", "ram")
READONLY, EXIT_ON_MISSING = 2, 8
SMRAM = 1   # address space
# The pages of a bitmap's word. Memslots begin at multiples of it in their block, but for parts of a PC's first MiB.
WORD = 64 << 12


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
        assert in_place == any(name == "postcopy_mirror" and text.startswith("ram ") for name, text in trace)
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


def faults_taken(side):
    """The number of faults in KVM."""
    return int(side.lab.run(f"cat /sys/kernel/debug/kvm/$(cat {side.pidfile})-*/pf_taken", check=True).output)


@both_interfaces
def test_mapped_at_once(lab):
    """A received page is mapped before the vCPU resumes, which would fault again otherwise."""
    with Pair(lab, exits="on", mem=8, zero=0) as pair:
        # Hardly any page is received before it is missed.
        pair.postcopy(bandwidth=64 << 10)
        pair.destination.wait_event("end")
        pair.finish_fast()
        taken = faults_taken(pair.destination)
        exits, pages = pair.faults()["exits"], pair.source.report().the("boot")["test_pages"]
    # The longer the guest takes, the more pages the background sends first.
    assert SANITIZED or exits > pages / 8
    # One fault per missed page, and one after its mapping was dropped; some for other memory.
    assert taken < 2 * pages + exits / 2


@both_interfaces
@pytest.mark.slow
def test_mapped_at_once_after_a_nested_fault(lab):
    """KVM maps no pages ahead for a vCPU that runs a nested guest; for other vCPUs it still does."""
    with Pair(lab, exits="on", cpus=2, memory_mb=48, payload=guest.payload("nested"), mem=16) as pair:
        pair.postcopy(bandwidth=64 << 10)
        pair.destination.wait_event("end")
        taken, exits = faults_taken(pair.destination), pair.faults()["exits"]
        # The nested guest's page, before all others
        last = 32 * MIB - 4096
        missed = [text for name, text in pair.destination.trace()
                  if name == "kvm_exit_on_missing" and "gpa 0x1" in text]
        first = next(i for i, text in enumerate(missed) if f"gpa {last:#x}," in text)
        assert exits > 1000 and first < 100
        # KVM counts one fault per page, and another one if the page was not mapped after the exit.
        assert taken - 16 * MIB // 4096 < exits / 10
        pair.finish_fast()


@both_interfaces
@on_both("exits", WITH_EXITS)
def test_same_page(place, exits):
    faults, _ = migrate(place, exits, pattern="shared")
    if exits == "on":
        assert_shared(faults)


@both_interfaces
@on_both("exits, backend", choices(
    EXITS, ("memfd", "shm", "anonymous-shared"), quick=[("on", "memfd"), ("off", "anonymous-shared")]))
def test_shared_memory(place, exits, backend):
    """Every other page is zero until it is written to."""
    migrate(place, exits, pattern="shared", zero=50, backend=backend)


@both_interfaces
@on_both("exits, backend", choices(
    EXITS, ("hugetlb-file", "hugetlb-private", "hugetlb"), quick=[("on", "hugetlb")]))
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


def slots(trace):
    """After each event of the trace, its name and the flags of all slots: {(space, slot, address): flags}."""
    now: dict[tuple[int, int, int], int] = {}
    for name, text in trace:
        if name == "kvm_set_user_memory":
            space, slot, flags, gpa, size = search(
                r"^AddrSpace#(\d+) Slot#(\d+) flags=(\w+) gpa=(\w+) size=(\w+)", text).groups()
            key = int(space), int(slot), int(gpa, 16)
            now.pop(key, None)
            if int(size, 16):
                now[key] = int(flags, 16)
        yield name, dict(now)


@both_interfaces
@pytest.mark.parametrize("machine, spaces", listed(
    ("q35,smm=on", {0, SMRAM}), ("pc", {0, SMRAM}), ("pc,smm=off", {0}), quick=[("q35,smm=on", {0, SMRAM})]))
def test_flags(lab, machine, spaces, by):
    with Pair(lab, exits="on", mem=8, machine=machine) as pair:
        pair.postcopy()
        pair.finish()
        trace = pair.destination.trace()
    steps = list(slots(trace))
    names = [name for name, _ in steps]
    enabled = names.index("kvm_exit_on_missing_enable")
    disabled = names.index("kvm_exit_on_missing_disable")
    flag = "KVM_MEM_USERFAULT" if by == USERFAULT else "KVM_MEM_EXIT_ON_MISSING"
    assert ("kvm_exit_on_missing_enable", f"{flag}: ret 0") in trace
    assert names.count("kvm_exit_on_missing_enable") == names.count("kvm_exit_on_missing_disable") == 1
    for i, (_, now) in enumerate(steps):
        if enabled <= i < disabled - len(now):
            # While post-copy runs: all writable RAM, also of new slots.
            # A bitmap begins with a whole word.
            assert {key for key, flags in now.items() if flags & EXIT_ON_MISSING} == \
                {key for key, flags in now.items() if not flags & READONLY
                 and not (by == USERFAULT and key[2] < MIB and key[2] % WORD)}, (i, now)
            assert {space for (space, _, _), flags in now.items() if flags & EXIT_ON_MISSING} == spaces
    assert not any(flags & EXIT_ON_MISSING for flags in steps[disabled][1].values())
    assert not any(flags & EXIT_ON_MISSING for flags in steps[-1][1].values())


@both_interfaces
@on_aarch64()
def test_flags_on_aarch64(lab, by):
    test_flags(lab, None, {0}, by)
