# SPDX-License-Identifier: GPL-2.0-or-later
"""What a guest's clocks are after a migration, and which QEMUs and states take part."""
import pytest

from clocks import ClockPair, offsets
from pair import FORK, STOCK

GAP_S = 3
HELD = ("-S",)
US = 1000       # ns


def exact(jump):
    """What every exact restoration has."""
    assert jump.backwards == 0, jump
    assert jump.offsets_differ == 0, jump.tsc
    assert max(map(abs, jump.relation_ns)) <= 10, jump.relation_ns
    for event in jump.after:
        assert event["pv_flags"] == 3, "TSC_STABLE, and GUEST_STOPPED by KVM_KVMCLOCK_CTRL"


@pytest.mark.parametrize("postcopy", [False, True], ids=["precopy", "postcopy"])
def test_continuous(lab, postcopy):
    with ClockPair(lab, policy="continuous", destination_options=HELD,
                   capabilities=() if postcopy else None) as pair:
        jump = pair.moved(GAP_S, postcopy)
        exact(jump)
        assert max(map(abs, jump.tsc_us)) <= 10, jump.tsc_us
        assert max(map(abs, jump.kvmclock_ns)) <= 10 * US, jump.kvmclock_ns
        assert jump.steps_s[0] > GAP_S, "the guest has seen the blackout"
        assert not pair.warnings()


@pytest.mark.parametrize("postcopy", [False, True], ids=["precopy", "postcopy"])
def test_stopped(lab, postcopy):
    with ClockPair(lab, destination_options=HELD, capabilities=() if postcopy else None) as pair:
        jump = pair.moved(GAP_S, postcopy)
        exact(jump)
        assert max(jump.tsc_us) < -GAP_S * 1e6
        assert jump.steps_s[1] < 1, "the guest has seen nothing of the blackout"
        assert not pair.warnings()


@pytest.mark.parametrize("way", [(STOCK, STOCK), (STOCK, FORK), (FORK, STOCK), (FORK, FORK)])
def test_old(lab, way):
    with ClockPair(lab, told=False, source=way[0], destination=way[1], destination_options=HELD, capabilities=None) as pair:
        j = pair.moved(GAP_S)
        print(way, j.tsc_us, [k/1e3 for k in j.kvmclock_ns], j.relation_ns, j.steps_s, j.backwards, pair.warnings())
