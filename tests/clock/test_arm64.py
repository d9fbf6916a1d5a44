# SPDX-License-Identifier: GPL-2.0-or-later
"""An arm64 guest's counters after a migration, and the QEMUs and states that take part."""
import functools
import itertools
import time

import pytest

from tests.clock.test_guest_time import GAP_S, HELD, hold_at_each, moved_on
from tests.clock.test_guest_time import held as held_pair
from tests.lab import guest
from tests.lab.arches import on_aarch64
from tests.lab.arm_clocks import COUNTERS, NO_ADJVTIME, ONE_OFFSET, CounterPair, offsets
from tests.lab.clocks import clocks, later_reports, migrate, numbers, signed, through_a_file
from tests.lab.lab import Lab
from tests.lab.pair import FORK, INJECT, STOCK, until
from tests.lab.snapshot import Machine
from tests.sdei.test_sdei import is_refused

WAYS = {"precopy": False, "postcopy": True}
held = functools.partial(held_pair, kind=CounterPair)


def is_continuous(jump):
    assert jump.backwards == 0, jump
    assert max(map(abs, jump.added_us)) <= jump.tolerance_us, jump.added_us
    assert jump.least_step_s > GAP_S, "the guest has seen the blackout"


def is_stopped(pair, jump):
    assert jump.backwards == 0, jump
    assert max(jump.added_us) < -GAP_S * 1e6
    passed = pair.passed_in_blackout_us(jump)
    assert max(map(abs, passed)) <= jump.tolerance_us, passed


def stays_on_source(pair, reason):
    """The destination reports the reason and exits, and the guest resumes on the source."""
    pair.source.wait_event("ready")
    is_refused(pair, reason)
    assert pair.destination.job.wait().rc == 1
    told = len(pair.source.report().all("clock"))
    until(lambda: len(pair.source.report().all("clock")) > told + 2 * pair.cpus, "the guest resumes")


def is_as_stock(jump):
    """The virtual counter is stopped, but the physical one runs from the load on."""
    assert jump.backwards == 0, jump
    virtual, physical = jump.added_us
    assert virtual < -GAP_S * 1e6
    assert -GAP_S * 1e6 < physical < 0.5e6


def both_stand_still(jump):
    """Both counters continue from their values in stock's stream, which were read one after the other."""
    assert jump.backwards == 0, jump
    assert max(jump.added_us) < -GAP_S * 1e6
    assert abs(jump.added_us[0] - jump.added_us[1]) < 0.5e6


def have_one_offset(jump):
    assert jump.offsets[0] == jump.offsets[1], jump.offsets


@on_aarch64("policy, way, one_offset", itertools.product(("continuous", None), WAYS, (False, True)),
            quick=[("continuous", "postcopy", True), (None, "precopy", True)])
def test_policy(lab, policy, way, one_offset):
    with held(lab, WAYS[way], policy=policy, one_offset=one_offset) as pair:
        jump = pair.moved(GAP_S, WAYS[way])
        if policy == "continuous":
            is_continuous(jump)
        else:
            is_stopped(pair, jump)
        if one_offset:
            have_one_offset(jump)
        assert not pair.warnings()


@on_aarch64("lazy", [True, False])
def test_from_a_file(lab, lazy):
    with CounterPair(lab, switch="on", return_path=False, capabilities=None,
                     destination_options=["-global", "migration.guest-time-restore=continuous"]) as pair:
        is_continuous(pair.moved_by(lambda: through_a_file(pair, GAP_S, lazy)))


def timers_fire(pair, jump):
    """Each timer fires once, in time, on the destination."""
    fired = until(lambda: (e := pair.destination.report().all("timer")) and len(e) == 2 * pair.cpus and e,
                  "all timers fire")
    assert {(e["cpu"], e["timer"]) for e in fired} == {(c, t) for c in range(pair.cpus) for t in COUNTERS}
    host = numbers(pair.destination, "kvm_arm_guest_time_start")["host counter"]
    start = {name: signed(host - offset) for name, offset in zip(COUNTERS, jump.offsets, strict=True)}
    for event in fired:
        due = max(event["deadline"], start[event["timer"]])
        # On a busy machine, timers look late. A timer that was due in the blackout fires at its end.
        late = event[f"at_{event['timer']}"] - due
        assert 0 <= late < 0.9 * GAP_S * event["khz"] * 1000, f"{late} ticks; {event} of {fired}, {start}"
    for event in later_reports(pair.destination, pair.cpus):
        assert [event[f"fired_{name}"] for name in COUNTERS] == [1, 1], event
    assert jump.backwards == 0


# The timers are due in the blackout, which is then as long, or long after it
@on_aarch64("way, policy, one_offset, due_s", [
    ("precopy", "continuous", True, 12), ("precopy", "continuous", False, 7),
    ("precopy", "stopped", False, 12), ("precopy", "stopped", True, 7),
    ("postcopy", "continuous", False, 12), ("postcopy", "continuous", True, 7),
    ("postcopy", "stopped", True, 12), ("postcopy", "stopped", False, 7),
])
def test_timers(lab, way, policy, one_offset, due_s):
    """Timers that were armed before the migration, two on each vCPU."""
    in_blackout = policy == "continuous" and due_s == 7
    # On a slow machine, timers fire before the guest stops: repeat with a longer time.
    for slower in 1, 2, 4:
        with held(lab, WAYS[way], policy=policy, one_offset=one_offset, deadline=due_s * slower * 1000) as pair:
            jump = pair.moved(due_s * slower if in_blackout else GAP_S, WAYS[way])
            if pair.source.report().all("timer"):
                continue
            timers_fire(pair, jump)
            return
    pytest.fail("the migration has taken too long")


@on_aarch64("source, destination, policy", [(STOCK, FORK, None), (FORK, STOCK, None), (STOCK, FORK, "continuous")])
def test_old_and_new(lab, source, destination, policy):
    with held(lab, source=source, destination=destination, policy=policy) as pair:
        jump = pair.moved(GAP_S)
        (is_as_stock if destination == STOCK else both_stand_still)(jump)
        if policy:
            [line] = pair.warnings()
            assert "the source has not reported when it stopped the guest" in line


@on_aarch64()
def test_untold_with_one_offset(lab):
    with held(lab, switch="off", one_offset=True) as pair:
        jump = pair.moved(GAP_S)
        have_one_offset(jump)
        assert jump.backwards == 0
        assert max(jump.added_us) < -GAP_S * 1e6


@on_aarch64("policy, one_offset", itertools.product(("stopped", "continuous"), (False, True)))
def test_no_adjvtime(lab, policy, one_offset):
    """The guest's counters include the time in which the VM does not run, as far as QEMU 10.0 counts it, or all."""
    with held(lab, policy=policy, one_offset=one_offset, both=NO_ADJVTIME) as pair:
        jump = pair.moved(GAP_S)
        if policy == "continuous":
            is_continuous(jump)
        else:
            assert jump.backwards == 0
            assert min(jump.added_us) > -1e6 and max(jump.added_us) < 0
        if one_offset:
            have_one_offset(jump)


def one_guest(lab, words):
    return Machine(lab, cpus=2, memory_mb=32, payload=guest.payload("clock", "aarch64"), arguments=words)


@on_aarch64("one_offset", [False, True], quick=[False])
def test_background_snapshots(lab, one_offset):
    """The guest's counters run on in the pauses, both of them."""
    with one_guest(lab, ONE_OFFSET * one_offset) as machine:
        was = offsets(machine.side)
        for _ in range(3):
            machine.take()
        assert offsets(machine.side) == was


@on_aarch64("one_offset, adjvtime", [(False, True), (True, True), (True, False), (False, False)],
            quick=[(True, True)])
def test_pause(lab, one_offset, adjvtime):
    with one_guest(lab, [*ONE_OFFSET * one_offset, *NO_ADJVTIME * (not adjvtime)]) as machine:
        side = machine.side
        khz = side.wait_event("ready")["khz"]
        was = offsets(side)
        # A guest reads a physical counter without an offset without a trap.
        assert was[1] == (was[0] if one_offset else 0)
        side.cmd("stop")
        lab.run("sleep 1")
        side.cmd("cont")
        virtual, physical = [(w - n) / khz / 1000 for w, n in zip(was, offsets(side), strict=True)]
        if adjvtime:
            assert -5 < virtual < -1
        else:
            assert virtual == 0
        assert physical == (virtual if one_offset else 0)
        time.sleep(2)
        events = clocks(side, 2, 0, last=True)
        assert max(e[f"{way}_{name}"] for e in events for way in ("back", "all_back") for name in COUNTERS) == 0


@on_aarch64("source", [True, False])
def test_one_offset_on_one_side_alone(lab, source):
    with CounterPair(lab, capabilities=None, source_options=ONE_OFFSET if source else (),
                     destination_options=() if source else ONE_OFFSET) as pair:
        stays_on_source(pair, f"property kvm-counter-offset is {'on' if source else 'off'} on the source")


@on_aarch64("policy, one_offset", [("stopped", False), ("continuous", False), ("stopped", True)])
def test_old_destination_refuses(lab, policy, one_offset):
    """The guest stays on the source, and its counters are those of a guest that was moved."""
    with CounterPair(lab, switch="on", destination=STOCK, one_offset=one_offset, capabilities=(),
                     source_options=("-global", f"migration.guest-time={policy}")) as pair:
        pair.source.wait_event("ready")
        was = offsets(pair.source)
        before = clocks(pair.source, pair.cpus, 0, last=True)
        stays_on_source(pair, "error while loading state for instance 0x0 of device 'cpu'")
        jump = pair.jump(was, before, pair.source, clocks(pair.source, pair.cpus, 0, last=True))
        assert jump.backwards == 0, jump
        virtual_us, physical_us = jump.added_us
        assert abs(virtual_us - physical_us) <= jump.tolerance_us
        if policy == "continuous":
            assert abs(virtual_us) <= jump.tolerance_us
        else:
            passed = pair.passed_in_blackout_us(jump, pair.source)
            assert max(map(abs, passed)) <= jump.tolerance_us, passed


@on_aarch64()
def test_moved_on_to_stock(lab):
    """The QEMU in the middle has the instant, and migrates the guest to one without the feature."""
    with held(lab) as pair:
        moved_on(pair, STOCK)


@on_aarch64()
def test_held_at_every_step(lab):
    """A counter that is set much later than its value was computed is set again."""
    with CounterPair(lab, policy="continuous", source=INJECT, destination=INJECT, capabilities=None) as pair:
        is_continuous(pair.moved_by(lambda: hold_at_each(
            pair, (pair.source, "guest-time-taken"), (pair.destination, "guest-time-set"))))
        assert not pair.warnings()


@on_aarch64("side", ["source", "destination"])
def test_kvm_without_the_physical_counter(lab, side):
    """A host whose KVM neither reads nor sets the guest's physical counter, which is the host's then."""
    with held(lab, policy="continuous", **{side: INJECT}) as pair:
        getattr(pair, side).inject.arm("guest-time-no-physical")
        jump = pair.moved(GAP_S)
        if side == "source":
            is_continuous(jump)
            assert not pair.warnings()
        else:
            assert abs(jump.added_us[0]) <= jump.tolerance_us
            [line] = pair.warnings()
            why = "KVM does not set the physical counter: it has run on"
            assert line.endswith(why) and pair.outcome()["reason"] == why


@on_aarch64("when", ["load", "start", "cont"])
def test_one_offset_is_refused(lab, when):
    """KVM does not set the offset: the load fails; but a guest that is on no other host runs anyway."""
    with CounterPair(lab, destination=INJECT, one_offset=True, capabilities=None,
                     destination_options=HELD) as pair:
        inject = pair.destination.inject
        if when == "load":
            inject.arm("guest-time-one-offset")
            stays_on_source(pair, "KVM does not set the system counter's offset: Device or resource busy")
            return
        pair.source.wait_event("ready")
        migrate(pair, 0, False)
        if when == "cont":
            pair.destination.cmd("cont")
            pair.destination.cmd("stop")
        was = offsets(pair.destination)
        inject.arm("guest-time-one-offset")
        pair.destination.cmd("cont")
        assert inject.passed("guest-time-one-offset")
        assert offsets(pair.destination) == was
        for event in clocks(pair.destination, pair.cpus, 1):
            assert max(event[f"{way}_{name}"] for way in ("back", "all_back") for name in COUNTERS) == 0
        [line] = pair.warnings()
        assert line.endswith("KVM does not set the system counter's offset: Device or resource busy: "
                             "the counters have run on")


@pytest.mark.slow
@pytest.mark.aarch64
@pytest.mark.parametrize("policy, one_offset", [("continuous-unchecked", False), ("stopped", True)])
def test_two_hosts(policy, one_offset):
    """The hosts' counters began at different times, and the hosts' times of day can differ by some tenths of a
    second."""
    with (Lab(name="host-a", arch="aarch64", memory_mb=1024) as a,
          Lab(name="host-b", arch="aarch64", memory_mb=1024) as b,
          held(a, destination_lab=b, policy=policy, one_offset=one_offset) as pair):
        jump = pair.moved(GAP_S)
        stop = numbers(pair.source, "kvm_arm_guest_time_stop")
        start = numbers(pair.destination, "kvm_arm_guest_time_start")
        gap_us = (start["realtime"] - stop["realtime"]) / 1000
        assert abs((start["host counter"] - stop["host counter"]) * 1000 / jump.khz - gap_us) > 0.5e6
        counted_us = 0 if policy == "stopped" else gap_us
        for passed_us in pair.passed_in_blackout_us(jump):
            assert abs(passed_us - counted_us) <= jump.tolerance_us
        assert jump.backwards == 0, jump
        assert not pair.warnings()


@pytest.mark.slow
@pytest.mark.aarch64
def test_other_frequency():
    with (Lab(name="hz", arch="aarch64", memory_mb=1024) as a,
          Lab(name="other-hz", arch="aarch64", memory_mb=1024, cpu="max,pauth-impdef=on,cntfrq=50000000") as b,
          CounterPair(a, destination_lab=b, capabilities=None) as pair):
        stays_on_source(pair, "has 62500000 Hz on the source and 50000000 Hz here, and KVM cannot scale it: "
                              "migrate to a host with the same frequency")
