# SPDX-License-Identifier: GPL-2.0-or-later
"""Which memslots get KVM_MEM_EXIT_ON_MISSING or KVM_MEM_USERFAULT, and for how long."""

import pytest

from tests.lab.arches import both_interfaces, on_aarch64
from tests.lab.kvm_interface import USERFAULT
from tests.lab.pair import MIB, Pair
from tests.lab.text import search

READONLY, EXIT_ON_MISSING = 2, 8
SMRAM = 1   # address space
# The pages of a bitmap's word. Memslots begin at multiples of it in their block, but for parts of a PC's first MiB.
WORD = 64 << 12


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
@pytest.mark.parametrize("machine, spaces", [("q35,smm=on", {0, SMRAM}),
                                             *(pytest.param(*more, marks=pytest.mark.slow) for more in (
                                                 ("pc", {0, SMRAM}), ("pc,smm=off", {0})))])
def test_flags(lab, machine, spaces, by):
    flags_of(lab, machine, spaces, by)


@both_interfaces
@on_aarch64()
def test_flags_on_aarch64(lab, by):
    flags_of(lab, None, {0}, by)


def flags_of(lab, machine, spaces, by):
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
