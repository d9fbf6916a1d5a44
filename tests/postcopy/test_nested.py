# SPDX-License-Identifier: GPL-2.0-or-later
"""A guest with a nested guest."""
import pytest

from tests.lab import guest
from tests.lab.arches import both_interfaces
from tests.lab.pair import Pair

PAGES = (16 << 20) // 4096


@both_interfaces
@pytest.mark.slow
def test_mapped_at_once_after_a_nested_fault(lab):
    """KVM maps no pages ahead for a vCPU that runs a nested guest; for other vCPUs it still does."""
    with Pair(lab, exits="on", cpus=2, memory_mb=48, payload=guest.payload("nested"), mem=16) as pair:
        pair.postcopy(bandwidth=64 << 10)
        pair.destination.wait_event("end")
        dst = pair.destination
        taken = int(lab.run(f"cat /sys/kernel/debug/kvm/$(cat {dst.pidfile})-*/pf_taken", check=True).output)
        exits = pair.faults()["exits"]
        # The nested guest's page, before all others
        last = (16 << 20) + (16 << 20) - 4096
        missed = [text for name, text in dst.trace() if name == "kvm_exit_on_missing" and "gpa 0x1" in text]
        first = next(i for i, text in enumerate(missed) if f"gpa {last:#x}," in text)
        print(f"{first} exits before the nested guest's; {taken} faults in KVM, {exits} exits")
        assert exits > 1000 and first < 100
        # KVM counts one fault per page, and another one if the page was not mapped after the exit.
        assert taken - PAGES < exits / 10
        pair.finish_fast()
