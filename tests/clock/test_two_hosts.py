# SPDX-License-Identifier: GPL-2.0-or-later
"""Migrations between two L1s, whose TSCs began at different times."""
import contextlib

import pytest

from tests.clock.test_guest_time import held
from tests.lab.clocks import numbers, offsets, set_host_clock
from tests.lab.lab import Lab, tsc_khz

pytestmark = pytest.mark.slow
GAP_S = 3
# Linux uses the TSC frequency of its command line, and does not measure it.
BELIEVE = "hpet=disable pmtmr=0"
RESOURCE = "$(dirname $(grep -l 0x1110 /sys/bus/pci/devices/*/device))/resource2"


def compare(a, b, role="ask"):
    """Of b less a: (time of day in ns, TSC, ns by which both may be wrong)."""
    answer = a.job(f"build/tests/clock-difference answer {RESOURCE}")
    ns, tsc, took = map(int, b.run(f"build/tests/clock-difference {role} {RESOURCE}", check=True).output.split())
    answer.kill()
    return -ns, -tsc, took / 2


@contextlib.contextmanager
def two_hosts(directory, percent=100, **options):
    """Two L1s with the same time of day, as by PTP; percent: the TSC of the second one, by its Linux."""
    options |= {"memory_mb": 1024, "shared": directory / "shared"}
    khz = tsc_khz() * percent // 100
    with (Lab(name="host-a", append=BELIEVE, **options) as a,
          Lab(name="host-b", append=f"{BELIEVE} tsc_early_khz={khz}", **options) as b):
        for _ in range(3):
            compare(a, b, "set")
        yield a, b


@pytest.mark.parametrize("postcopy", [False, True], ids=["precopy", "postcopy"])
@pytest.mark.parametrize("policy", ["continuous", "stopped"])
def test_different_bases(tmp_path, policy, postcopy):
    with two_hosts(tmp_path) as (a, b), held(a, postcopy, destination_lab=b, policy=policy, cpus=2) as pair:
        differ_ns, pair.tsc_base, wrong_ns = compare(a, b)
        jump = pair.moved(GAP_S, postcopy)
        later_ns, _, _ = compare(a, b)
        assert abs(pair.tsc_base) > tsc_khz() * 1000, "the TSCs began a second or more apart"
        assert jump.offsets_differ == 0 and jump.backwards == 0
        assert max(map(abs, jump.relation_ns)) <= 100 + 80 * jump.settled_s, jump
        if policy == "continuous":
            bound_us = (max(abs(differ_ns), abs(later_ns)) + wrong_ns) / 1000 + 10
            assert max(map(abs, jump.tsc_us)) <= bound_us, jump.tsc_us
            assert jump.least_step_s > GAP_S
        else:
            assert max(jump.tsc_us) < -GAP_S * 1e6
            assert 0 <= pair.passed_in_blackout_us(jump) < 0.1e6
        assert not pair.warnings()


def test_other_frequency(tmp_path):
    """The TSC is one per cent faster, by its host's Linux, and KVM cannot scale."""
    with two_hosts(tmp_path, 101) as (a, b), held(a, destination_lab=b, policy="continuous", cpus=2) as pair:
        _, pair.tsc_base, _ = compare(a, b)
        jump = pair.moved(GAP_S)
        assert jump.backwards == 0
        assert max(jump.tsc_us) < -GAP_S * 1e6 * 0.9, "neither clock counts the blackout"
        [line] = pair.warnings()
        assert "the guest's TSC has another frequency here" in line
        pair.destination.wait_says("TSC scaling unavailable")


def test_other_frequency_scaled(tmp_path):
    """KVM scales: the clocks are exact as seen by a host whose seconds are one per cent too long."""
    with (two_hosts(tmp_path, 101, cpu="max") as (a, b),
          held(a, destination_lab=b, policy="continuous", cpus=2) as pair):
        pair.source.wait_event("ready")
        was = offsets(pair.source)
        # That host's time of day falls behind by 10 ms a second, which is noticed if it is far behind
        compare(a, b, "set")
        set_host_clock(b)
        jump = pair.moved(GAP_S)
        assert not pair.warnings()
        assert jump.backwards == 0 and jump.offsets_differ == 0
        # KVM rounds the scaled frequency: 1 kHz is 0.4 ppm of the guest's whole life
        assert max(map(abs, jump.relation_ns)) <= 50 * 1000, jump.relation_ns
        stop = numbers(pair.source, "kvm_guest_time_stop")
        start = numbers(pair.destination, "kvm_guest_time_start")
        ratio = (tsc_khz() << 32) // (tsc_khz() * 101 // 100)
        for before, after in zip(was, offsets(pair.destination), strict=True):
            cycles = (start["host TSC"] * ratio >> 32) + after - (stop["host TSC"] + before)
            passed_ns = start["kvmclock"] - stop["kvmclock"]
            assert passed_ns > GAP_S * 1e9
            assert abs(cycles - passed_ns * tsc_khz() / 1e6) <= 2
