# SPDX-License-Identifier: GPL-2.0-or-later
"""The clocks of a Linux guest under load that migrates again and again, with nothing configured but the policy."""
import re

import pytest

from tests.lab import linux_guest
from tests.lab.clocks import offsets, set_host_clock, signed
from tests.lab.guest import PAYLOADS
from tests.lab.lab import Lab, tsc_khz
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import MIB, until

CPUS = 2
HOPS = 6
GAP_S = 2
TAI_S = 37
# Linux detects Hyper-V, whose clock it prefers to the TSC
HYPERV = ("-cpu", "max,kvm=off,hv-time,hv-relaxed,hv-vpindex")


def clocks_by_log(side):
    """The clock sources to which the guest's kernel has switched."""
    return re.findall(r"clocksource: Switched to clocksource (\S+)", side.kernel_log())


def hop(pair, postcopy):
    for side in pair.sides:
        side.cmd("migrate-set-parameters", max_bandwidth=64 * MIB)
    pair.source.cmd("migrate", uri=pair.listen())
    if postcopy:
        pair.source.cmd("migrate-start-postcopy")
    pair.wait_completed()
    pair.until_reports(3)
    pair.check_threads()


def wrong_s(lab, side):
    """How far the guest's time of day is behind the host's, plus at most the delay of the fastest report."""
    def reading():
        told = len(side.report().lines)
        until(lambda: len(side.report().lines) > told, "the guest's next report", pause=0.05)
        now_ns = int(lab.run(f"{PAYLOADS[lab.arch]}/host-clock", check=True).output)
        return now_ns / 1e9 - side.report().lines[-1]["real"] / 1e3
    return min(reading() for _ in range(3))


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stopped", "continuous"])
@pytest.mark.parametrize("source, cpu", [
    pytest.param({"tsc", "kvm-clock"}, (), id="kvm"),
    pytest.param({"hyperv_clocksource_tsc_page"}, HYPERV, id="hv-time")])
def test_many_migrations(lab, source, cpu, policy):
    """No clock goes back on any vCPU, no watchdog complains, and the time of day follows the policy."""
    words = (*cpu, "-global", f"migration.guest-time={policy}")
    with LinuxPair(lab, cpus=CPUS, capabilities=("postcopy-preempt", "return-path"), writers=1, computers=1,
                   clocks=CPUS, mem=16, append="loglevel=8", source_options=cpu, destination_options=words) as pair:
        pair.source.wait_ready()
        set_host_clock(lab)
        first, behind_s = offsets(pair.source), wrong_s(lab, pair.source)
        sources = clocks_by_log(pair.source)
        gaps_ns = 0
        for n in range(HOPS):
            hop(pair, postcopy=n % 2 == 1)
            outcome = pair.destination.cmd("query-migrate")["guest-time"]
            assert outcome["instant"] and "reason" not in outcome, outcome
            assert outcome["counted"] == (outcome["gap"] if policy == "continuous" else 0)
            gaps_ns += outcome["gap"] - outcome["counted"]
            assert not clocks_by_log(pair.destination), "the guest has another clock source"
            if n < HOPS - 1:
                pair.next()
                set_host_clock(lab)
        assert sources and sources[-1] in source, sources
        added_us = [signed(now - then) * 1000 / tsc_khz()
                    for now, then in zip(offsets(pair.destination), first, strict=True)]
        assert max(added_us) == min(added_us)
        now_behind_s = wrong_s(lab, pair.destination)
        # The tests above bound a migration by 10 us; and less than 0.1 s passes at each start
        if policy == "continuous":
            assert abs(added_us[0]) <= 10 * HOPS
        else:
            assert -gaps_ns / 1000 - 10 * HOPS <= added_us[0] <= -gaps_ns / 1000 + 0.1e6 * HOPS
        # The guest reports every 0.25 s
        assert abs(now_behind_s - behind_s - gaps_ns / 1e9) < 1
        pair.check_memory()


def until_right(side):
    """Wait until phc2sys has corrected the time of day; returns the guest's report at that time."""
    return until(lambda: (lines := side.report().lines) and abs(lines[-1]["ptp"]) < 1e6 and lines[-1],
                 "the guest's time of day is that of its PTP clock", timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stopped", "continuous"])
def test_ptp_vmclock(policy):
    """Linux's own driver makes a PTP clock of the vmclock device, by which phc2sys corrects the time of day: also
    after a blackout that the guest's clocks have not counted, and without a network."""
    device = ("-device", "vmclock")
    words = ("-S", "-global", f"migration.guest-time={policy}")
    with Lab(name="newer", memory_mb=3072, extra=linux_guest.build_newer()) as lab:
        set_host_clock(lab, tai_offset_s=TAI_S)
        with LinuxPair(lab, cpus=CPUS, memory_mb=256, newer=True, ptp=TAI_S, clocks=CPUS, mem=16, capabilities=(
                           "return-path",), source_options=device, destination_options=device + words) as pair:
            pair.source.wait_ready()
            before = until_right(pair.source)
            behind_s = wrong_s(lab, pair.source)
            pair.source.cmd("migrate", uri=pair.listen())
            pair.wait_completed()
            lab.run(f"sleep {GAP_S}")
            pair.destination.cmd("cont")
            pair.until_reports(1)
            after = until_right(pair.destination)
            now_behind_s = wrong_s(lab, pair.destination)
            gap_s = pair.destination.cmd("query-migrate")["guest-time"]["gap"] / 1e9
            stepped_s = (after["real"] - after["ms"] - before["real"] + before["ms"]) / 1e3
            assert gap_s > GAP_S
            # The guest reads both clocks one after the other
            assert abs(stepped_s - (gap_s if policy == "stopped" else 0)) < 0.1
            assert abs(behind_s) < 1 and abs(now_behind_s) < 1
            pair.check_memory()
