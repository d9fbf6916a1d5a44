# SPDX-License-Identifier: GPL-2.0-or-later
"""Some migrations of make soak, and the conditions of a failure."""
import pytest

from tests.lab import failures
from tests.lab.failures import ACTIONS, PHASES, Failures, Hang
from tests.lab.pair import Pair
from tests.postcopy.soak import chosen, migrate, told

# One of each phase, with all actions and all earlier failures.
SEEDS = (3, 21, 24, 75, 86, 96, 99)


def test_seeds():
    plans = [chosen(seed) for seed in SEEDS]
    assert {None, *PHASES} == {c["phase"] for c in plans}
    assert {None, *sum(ACTIONS.values(), ())} == {c["action"] for c in plans}
    assert all(any(c[key] for c in plans) for key in ("snapshot_cancelled_s", "dimm", "troubles", "mute"))
    assert {None, "locked", "locking-off", "vhost-user"} == {c["disk"] for c in plans}
    assert {"touch", "linux"} == {c["guest"] for c in plans}
    assert {None, "source", "destination"} == {c["stop"] for c in plans}


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_soak(lab, seed):
    c = chosen(seed)
    print(told(c))
    migrate(lab, c, print)


@pytest.mark.slow
def test_a_hang_is_found(lab, monkeypatch):
    """The source is stopped, and no status shows it."""
    monkeypatch.setattr(failures, "HANG_S", 5)
    with Pair(lab, mem=8) as pair:
        pair.midst(bandwidth=64 << 10)
        pair.source.signal("STOP")
        pair.source.qmp.settimeout(5)
        with pytest.raises(Hang):
            Failures(pair).settled()
        text = failures.diagnosis(pair)
        assert "QMP does not answer" in text and '"status": "postcopy-active"' in text, text
