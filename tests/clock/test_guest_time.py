# SPDX-License-Identifier: GPL-2.0-or-later
"""A guest's clocks after a migration, and the QEMUs and states that take part."""
import json
import re
import struct
import time
from typing import Any

import pytest
from qemu.qmp import ExecuteError

from tests.lab.arches import listed
from tests.lab.clocks import (
    ClockPair,
    later_reports,
    lines_after,
    numbers,
    offsets,
    set_host_clock,
    through_a_file,
    took_us,
)
from tests.lab.lab import Lab, tsc_khz
from tests.lab.pair import FORK, INJECT, STOCK, Side, until
from tests.lab.text import search

GAP_S = 2
HELD = ("-S",)      # the destination does not run before "cont"
US = 1000           # ns
# vmclock: some fields of its page, and constants
FIELDS = struct.Struct("<I6xBB4xQQ2xB4xBQQ16xQQ8xQ")
NAMES = ("magic", "counter_id", "time_type", "marker", "flags", "status", "shift", "counter", "period", "sec", "frac",
         "maxerror")
VMCLOCK = 0xfeffb000
UTC, TAI = 0, 1
MAXERROR_VALID = 1 << 6
SYNCHRONIZED, FREERUNNING, UNRELIABLE = 2, 3, 4
ADJUST = 123456789
ACPI_CPU = 0xaf00   # registers of the pc machine for hot-plugged vCPUs
# When a vCPU enters the guest, KVM reads its base clock anew, whose rate differs from the TSC's by at
# most 80 ns/s. In the lab, the last vCPU does so some tenths of a second after the start, on a busy
# host later.
RELATION_NS, RELATION_NS_PER_S = 100, 80
WAYS = pytest.mark.parametrize("postcopy", [
    pytest.param(False, id="precopy"), pytest.param(True, id="postcopy", marks=pytest.mark.slow)])
WITH_ROOM = ("-smp", "2,maxcpus=3")     # for a vCPU that is hot-plugged


def held(lab, postcopy=False, kind=ClockPair, **options):
    return kind(lab, destination_options=(*HELD, *options.pop("destination_options", ())),
                capabilities=() if postcopy else None, **options)


def plug_cpu(side):
    free = [c for c in side.cmd("query-hotpluggable-cpus") if "qom-path" not in c]
    side.cmd("device_add", driver=free[0]["type"], id="new", **free[0]["props"])


def exact(jump):
    """Asserts the properties of every exact restoration."""
    assert jump.backwards == 0, jump
    assert jump.offsets_differ == 0, jump.tsc
    assert max(map(abs, jump.relation_ns)) <= RELATION_NS + RELATION_NS_PER_S * jump.settled_s, jump
    for event in jump.after:
        assert event["pv_flags"] == 3, "TSC_STABLE, and GUEST_STOPPED by KVM_KVMCLOCK_CTRL"


def is_continuous(jump):
    exact(jump)
    assert max(map(abs, jump.tsc_us)) <= 10, jump.tsc_us
    assert max(map(abs, jump.kvmclock_ns)) <= 10 * US, jump.kvmclock_ns
    assert jump.least_step_s > GAP_S, "the guest has seen the blackout"


def is_stopped(pair, jump, side=None):
    exact(jump)
    assert max(jump.tsc_us) < -GAP_S * 1e6
    assert max(jump.kvmclock_ns) < -GAP_S * 1e9
    started_us = took_us(side or pair.destination, "guest_time_start")
    assert 0 <= pair.passed_in_blackout_us(jump, side) <= started_us, "the guest has seen something of the blackout"


def is_as_stock(jump, stopped_s=1):
    """The kvmclock is stopped, but the TSC runs from the load on, at most stopped_s after the stop."""
    assert max(jump.kvmclock_ns) < -GAP_S * 1e9
    assert max(map(abs, jump.tsc_us)) < stopped_s * 1e6
    assert max(jump.relation_ns) < -1e9


def follows(policy, pair, jump, side=None):
    if policy == "continuous":
        is_continuous(jump)
    else:
        is_stopped(pair, jump, side)


def both_stand_still(jump, apart_s=0.3):
    """Both clocks continue from a stream without an instant, whose source reads the kvmclock when it writes it, the TSC
    at the stop, at most apart_s before; or from the stop, set one after the other."""
    assert jump.backwards == 0, jump
    assert jump.offsets_differ == 0, jump.tsc
    assert max(jump.kvmclock_ns) < -GAP_S * 1e9
    assert max(jump.tsc_us) < -GAP_S * 1e6
    assert max(map(abs, jump.relation_ns)) < apart_s * 1e9


def test_a_line_broken_by_a_snapshot():
    """The snapshot may be saved and loaded anywhere within a line, also where both halves look like a line."""
    line = '{"event": "clock", "cpu": 0, "step_tsc": 12345678}\n'
    for loaded in range(len(line)):
        console = (line * 2 + line[:loaded]).encode()
        for saved in range(len(line)):
            assert lines_after(console + (line[saved:] + line * 2).encode(), len(console)) \
                == [json.loads(line)] * 2, (loaded, saved)


@WAYS
@pytest.mark.parametrize("policy", ["continuous", None], ids=["continuous", "default"])
def test_policy(lab, policy, postcopy):
    """By default, the clocks are stopped."""
    with held(lab, postcopy, policy=policy) as pair:
        follows(policy, pair, pair.moved(GAP_S, postcopy))
        assert not pair.warnings()


def test_outcome(lab):
    """The outcome that operators see on both sides, while the guest is held and after it."""
    with held(lab, policy="continuous") as pair:
        for side in pair.sides:
            assert "guest-time" not in side.cmd("query-migrate")
        seen = {}
        pair.moved(GAP_S, meanwhile=lambda: seen.update(pair.outcome()))
        assert seen["instant"] and seen["source"]["synchronized"] and "policy" not in seen
        told, outcome = pair.outcome(pair.source), pair.outcome()
        assert told["instant"] and "reason" not in told and told["source"] == outcome["source"] == seen["source"]
        assert outcome["instant"] and "reason" not in outcome and outcome["policy"] == "continuous"
        assert outcome["destination"]["synchronized"]
        start, stop = numbers(pair.destination, "kvm_guest_time_start"), numbers(pair.source, "kvm_guest_time_stop")
        assert outcome["counted"] == outcome["gap"] > GAP_S * 1e9
        assert 0 <= start["kvmclock"] - stop["kvmclock"] - outcome["gap"] < 1e9
        # The sum of both hosts' 100 us, which the lab has set; it grows by 500 us in a second
        assert 200e3 <= outcome["error"] < 100e6
        [event] = [e for e in pair.destination.qmp.get_events() if e["event"] == "MIGRATION_GUEST_TIME"]
        assert event["data"] == outcome
        text = pair.destination.hmp("info migrate")
        assert "guest time: moves by one instant, continuous" in text
        assert "guest time, clock of the source: synchronized to" in text


@pytest.mark.slow
def test_no_return_path(lab):
    """A source that cannot query the destination sends the instant only with guest-time=on."""
    with held(lab, policy="continuous", return_path=False) as pair:
        both_stand_still(pair.moved(GAP_S))
        assert pair.outcome(pair.source)["reason"] \
            == "without the return path, the destination cannot be asked whether it knows guest-time"


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"machine": "pc-q35-10.0"}, {"cpus": 8}, {"return_path": False, "switch": "on"},
    {"return_path": False, "source_options": ("-global", "kvmclock.guest-time=on")}],
    ids=["q35", "8-vcpus", "no-return-path", "older-name"])
def test_other_options(lab, options):
    with held(lab, policy="continuous", **options) as pair:
        is_continuous(pair.moved(GAP_S))
        assert not pair.warnings()


@pytest.mark.slow
def test_destination_does_not_take_part(lab):
    with held(lab, destination_options=("-machine", "guest-time=off")) as pair:
        is_as_stock(pair.moved(GAP_S))
        assert pair.outcome(pair.source)["reason"] == "the destination does not know guest-time"


# Hosts whose clocks are wrong

def not_counted(pair, jump, why):
    is_stopped(pair, jump)
    [line] = pair.warnings()
    assert f"{why}: it is not counted" in line
    outcome = pair.outcome()
    assert (outcome["instant"], outcome["counted"], outcome["reason"]) == (True, 0, why)


UNSYNCHRONIZED = {"max_error_us": None}
TAI_KNOWN = {"tai_offset_s": 37}


# then: the source's host, and options of the pair; now: the destination's host; why: the blackout is not counted
@pytest.mark.parametrize("policy, then, now, why", [
    ("continuous", {}, UNSYNCHRONIZED, "is not certain: this host's clock is not synchronized"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in list[Any]((
        ("continuous", UNSYNCHRONIZED, {}, "is not certain: the source's clock is not synchronized"),
        ("continuous-unchecked", {}, UNSYNCHRONIZED, None),
        ("continuous-unchecked", UNSYNCHRONIZED, {}, None),
        ("continuous", TAI_KNOWN, {"tai_offset_s": 38}, "is not certain: the hosts do not agree on TAI - UTC"),
        ("continuous", TAI_KNOWN, TAI_KNOWN, None),
        ("continuous", {}, TAI_KNOWN, None),
        ("continuous", TAI_KNOWN, {}, None),
        ("continuous", {"max_error_us": 8_000_000, "return_path": False, "switch": "on"}, {"max_error_us": 8_000_000},
         "is shorter than the hosts' clocks may be wrong"),
        # A query of the destination has bounded the blackout
        ("continuous", {"max_error_us": 2_000_000, "switch": "on"}, {"max_error_us": 2_000_000}, None))))])
def test_host_clocks(lab, policy, then, now, why):
    with held(lab, policy=policy, **then) as pair:
        jump = pair.moved(GAP_S, meanwhile=lambda: set_host_clock(lab, **now))
        if why:
            not_counted(pair, jump, why)
        else:
            is_continuous(jump)
            assert not pair.warnings()
            assert pair.outcome()["error"] < 2e9
        for side, clock in ("source", then), ("destination", now):
            assert pair.outcome()[side]["synchronized"] == (clock != UNSYNCHRONIZED)


def shift(lab, s):
    """Set the host's clock, as if by NTP."""
    lab.run(f"date -s @$(($(date +%s) + {s}))", check=True)
    set_host_clock(lab)


WAITED = "does not agree with how long both ends have waited"


# shift() drops a part of a second: by -1, the blackout remains positive
@pytest.mark.parametrize("s, why", listed((4, WAITED), (-1, WAITED), (-20, "is negative"), quick=[(4, WAITED)]))
def test_clocks_differ(lab, s, why):
    """The destination's clock is wrong, and the host reports it as synchronized."""
    with held(lab, policy="continuous") as pair:
        try:
            jump = pair.moved(GAP_S, meanwhile=lambda: shift(lab, s))
        finally:
            shift(lab, -s)
        not_counted(pair, jump, why)


@pytest.mark.parametrize("policy, destination", listed(
    ("stopped", STOCK), ("continuous", STOCK), ("stopped", FORK), ("continuous", FORK), quick=[("stopped", STOCK)]))
def test_resumes_on_source(lab, policy, destination):
    """A QEMU without the feature refuses guest-time=on, or the destination is killed: the clocks are those of a guest
    that was moved, even if the host's clock is set meanwhile."""
    with ClockPair(lab, switch="on" if destination == STOCK else None, source=INJECT, destination=destination,
                   capabilities=None, source_options=("-global", f"migration.guest-time={policy}")) as pair:
        def meanwhile():
            if destination == FORK:
                pair.destination.job.kill()
            shift(lab, 4)
        try:
            jump = pair.failed(GAP_S, meanwhile)
        finally:
            shift(lab, -4)
        if destination == STOCK:
            refused = "error while loading state for instance 0x0 of device 'kvmclock'"
            assert refused in pair.destination.job.wait().output
        follows(policy, pair, jump, pair.source)
        assert pair.outcome(pair.source)["counted"] == (0 if policy == "stopped" else pair.outcome(pair.source)["gap"])


@pytest.mark.slow
def test_failed_after_an_unplug(lab):
    """KVM keeps the vCPU, and reports a master clock only while that vCPU's offset equals the others."""
    with ClockPair(lab, source=INJECT, cpus=2, capabilities=None, source_options=WITH_ROOM) as pair:
        pair.source.wait_event("ready")     # by then the guest has read how many processors to start
        plug_cpu(pair.source)
        # As a guest's ACPI does: switch its registers on, select the vCPU, and eject it.
        for width, register, value in ("b", 0, 0), ("w", 0, 2), ("b", 4, 1 << 3):
            pair.source.hmp(f"o/{width} {ACPI_CPU + register:#x} {value}")
        assert len(pair.source.cmd("query-cpus-fast")) == 2
        jump = pair.failed(GAP_S, pair.destination.job.kill)
        assert len(offsets(pair.source)) == 3
        is_stopped(pair, jump, pair.source)
        assert len(set(offsets(pair.source))) == 1


def real_ns(side, tsc):
    """CLOCK_REALTIME of the lab's host when the first vCPU's TSC is tsc."""
    now = dict(re.findall(r"(counter|realtime) (\d+)", dict(side.trace())["vmclock_update"]))
    return int(now["realtime"]) + (tsc - int(now["counter"])) * 1e6 / tsc_khz()


def vmclock(lab, **options):
    device = ("-device", "vmclock")
    return held(lab, cpus=2, source_options=device, destination_options=device, **options)


@pytest.mark.parametrize("policy, synchronized", [
    ("continuous", True), pytest.param("stopped", True, marks=pytest.mark.slow),
    pytest.param("stopped", False, marks=pytest.mark.slow)])
def test_vmclock(lab, policy, synchronized):
    """The device contains the time of day, also right after a migration, and a marker of the migration."""
    def host_ns():
        return int(lab.run("build/tests/host-clock", check=True).output)

    with vmclock(lab, policy=policy, vmclock=1, max_error_us=100 if synchronized else None, tai_offset_s=37) as pair:
        before, host_before = decoded(pair.source.wait_event("vmclock")), host_ns()
        pair.moved(GAP_S)
        after, host_after = vmclock_after(pair), host_ns()
        assert after["marker"] > before["marker"]
        for side, event, now_ns in zip(pair.sides, (before, after), (host_before, host_after), strict=True):
            assert (event["magic"], event["counter_id"], event["time_type"]) == (0x4b4c4356, 1, TAI), event
            utc_ns = event["ns"] - 37 * 10**9
            assert abs(utc_ns - real_ns(side, event["tsc"])) < 10 * US, event
            assert 0 < now_ns - utc_ns < 30e9
        assert after["flags"] == (MAXERROR_VALID if synchronized else 0)
        assert after["status"] == (SYNCHRONIZED if synchronized else FREERUNNING)
        assert not synchronized or 100e3 <= after["maxerror"] < 100e6


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(37, 0), (0, 37)])
def test_vmclock_keeps_its_type(lab, first, then):
    """A device with TAI does not change to UTC if the next host does not know TAI, and a device with UTC not to TAI."""
    with vmclock(lab, vmclock=1, tai_offset_s=first) as pair:
        before = decoded(pair.source.wait_event("vmclock"))
        pair.moved(GAP_S, meanwhile=lambda: set_host_clock(lab, tai_offset_s=then))
        assert before["time_type"] == (TAI if first else UTC)
        assert pair.destination.memory(VMCLOCK, 64)[10:12] == bytes([1, before["time_type"]])
        if first:
            assert vmclock_status(pair.destination) == UNRELIABLE
        else:
            after = vmclock_after(pair)
            assert (after["time_type"], after["flags"]) == (UTC, MAXERROR_VALID)
            assert abs(after["ns"] - real_ns(pair.destination, after["tsc"])) < 10 * US, after


def decoded(event):
    """With the fields of the page that the guest has read, and the time of day at its TSC by the specification"""
    page = dict(zip(NAMES, FIELDS.unpack(struct.pack("<13Q", *event["page"])), strict=True))
    passed = ((event["tsc"] - page["counter"]) * page["period"] >> page["shift"]) + page["frac"]
    return event | page | {"ns": page["sec"] * 10**9 + (passed * 10**9 >> 64)}


def vmclock_after(pair):
    """The guest's first reading on the destination, where it may also write a reading of the source."""
    def read():
        pair.destination.check()
        return next((e for e in pair.destination.report().all("vmclock") if e["move"] == 1), None)
    return decoded(until(read, "the guest reads the device on the destination"))


def vmclock_status(side):
    return side.memory(VMCLOCK, 64)[34]


@pytest.mark.slow
def test_vmclock_of_a_slewed_clock(lab):
    """A host's clock is slewed for a short time, but the page is only written when the guest starts."""
    with vmclock(lab, vmclock=1, tai_offset_s=37) as pair:
        try:
            pair.moved(GAP_S, meanwhile=lambda: set_host_clock(lab, tai_offset_s=37, faster_ppm=10000))
        finally:
            set_host_clock(lab)
        after = vmclock_after(pair)
        assert (after["status"], after["flags"]) == (FREERUNNING, 0), after
        periods = [int.from_bytes(side.memory(VMCLOCK, 64)[48:56], "little") for side in pair.sides]
        assert abs(periods[1] / periods[0] - 1) < 1e-3, periods


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True])
def test_vmclock_is_unreliable(lab, paused):
    """The page for a destination that cannot update it. A reset, at which the TSC may begin anew, updates the page."""
    with vmclock(lab, destination=STOCK) as pair:
        pair.source.wait_event("ready")
        assert vmclock_status(pair.source) == SYNCHRONIZED
        pair.source.cmd("set-action", reboot="reset")
        pair.source.cmd("system_reset")
        until(lambda: [text for name, text in pair.source.trace() if name == "vmclock_update"][1:], "an update")
        assert vmclock_status(pair.source) == SYNCHRONIZED
        counters = [int.from_bytes(pair.source.memory(VMCLOCK, 64)[40:48], "little"), *(
            int(search(r"counter (\d+)", text)[1]) for name, text in pair.source.trace() if name == "vmclock_update")]
        assert counters[0] == counters[2] != counters[1], counters
        if paused:
            pair.source.cmd("stop")
        pair.source.cmd("migrate", uri=pair.listen())
        pair.wait_completed()
        assert vmclock_status(pair.destination) == UNRELIABLE


@pytest.mark.slow
def test_gap_is_too_long(lab):
    with held(lab) as pair:
        pair.destination.cmd("migrate-set-parameters", guest_time="continuous", guest_time_max_gap=1000)
        not_counted(pair, pair.moved(GAP_S), "is longer than guest-time-max-gap")


@pytest.mark.slow
def test_parameter(lab):
    with held(lab) as pair:
        info = pair.destination.hmp("info migrate_parameters")
        assert "guest-time: stopped" in info and "guest-time-max-gap: 10000 ms" in info
        assert pair.destination.hmp("migrate_set_parameter guest-time continuous") == ""
        assert pair.destination.hmp("migrate_set_parameter guest-time-max-gap 60000") == ""
        parameters = pair.destination.cmd("query-migrate-parameters")
        assert (parameters["guest-time"], parameters["guest-time-max-gap"]) == ("continuous", 60000)
        with pytest.raises(ExecuteError, match="sometimes"):
            pair.destination.cmd("migrate-set-parameters", guest_time="sometimes")
        is_continuous(pair.moved(GAP_S))


@pytest.mark.slow
def test_paused_vm(lab):
    """A pause is not a blackout: the clocks behave as without the feature."""
    with held(lab, policy="continuous") as pair:
        pair.source.wait_event("ready")
        began = time.monotonic()
        pair.source.cmd("stop")
        loaded = []
        jump = pair.moved(GAP_S, meanwhile=lambda: loaded.append(time.monotonic()))
        is_as_stock(jump, loaded[0] - began - GAP_S)
        assert not pair.started() and not pair.warnings()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continuous", "stopped"])
def test_differences_stay(lab, policy):
    """A guest has written to IA32_TSC_ADJUST of one vCPU; a hot-plugged vCPU has the first one's TSC."""
    smp = ("-smp", "4,maxcpus=5")
    with held(lab, policy=policy, adjust=ADJUST, source_options=smp, destination_options=smp) as pair:
        jump = pair.moved(GAP_S)
        was, now = offsets(pair.source), offsets(pair.destination)
        assert sorted(o - was[0] for o in was) == sorted(o - now[0] for o in now) == [0, 0, 0, ADJUST]
        assert jump.offsets_differ == 0
        assert max(e["back_tsc"] for e in jump.after) == 0
        # The offsets that QEMU has set, from the instant of the stop to that of the start
        stop, start = numbers(pair.source, "kvm_guest_time_stop"), numbers(pair.destination, "kvm_guest_time_start")
        passed = (start["kvmclock"] - stop["kvmclock"]) * tsc_khz() / 1e6
        for then, o in zip(was, now, strict=True):
            assert abs(start["host TSC"] + o - (stop["host TSC"] + then) - passed) <= 2
        # The guest's view: with different offsets, KVM has no master clock and reads for each vCPU the TSC, then its
        # base clock. So the kvmclock is never behind, but ahead by the time between both readings. Interrupts are off
        # then, but the lab's host may run another process for a time slice.
        assert min(jump.relation_ns) >= -RELATION_NS - RELATION_NS_PER_S * jump.settled_s, jump
        assert max(jump.relation_ns) < 0.3e9, jump.relation_ns
        assert (abs(jump.tsc_us[0]) <= 10) == (policy == "continuous")
        plug_cpu(pair.destination)
        assert [o - now[0] for o in offsets(pair.destination)[4:]] == [0]


def hold_at_each(pair, *points):
    """Start the migration, and hold it for a while at each injection point: (side, name)."""
    for side, point in points:
        side.inject.arm(point)
    pair.source.cmd("migrate", uri=pair.listen())
    for side, point in points:
        side.inject.wait_held(point)
        pair.lab.run(f"sleep {GAP_S}")
        side.inject.release(point)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continuous", "stopped"])
def test_deadline(lab, policy):
    """A timer of the LAPIC that was set before the migration expires in time by the guest's TSC.

    KVM has computed the expiry when the state was loaded. That is late with "continuous" by the time from the
    stop to the load, and early with "stopped" by the time from there to the start: both are GAP_S.
    """
    with held(lab, source=INJECT, destination=INJECT, policy=policy, deadline=18000) as pair:
        pair.source.wait_event("ready")
        hold_at_each(pair, (pair.source, "guest-time-taken"))
        pair.wait_completed()
        assert not pair.source.report().first("deadline"), "the migration has taken too long"
        lab.run(f"sleep {GAP_S}")
        pair.destination.cmd("cont")
        event = until(lambda: pair.destination.report().first("deadline"), "the timer expires")
        late_s = (event["tsc"] - event["deadline"]) / event["khz"] / 1000
        assert 0 <= late_s < 0.9 * GAP_S, event     # on a busy machine, it looks late


@pytest.mark.slow
def test_held_at_every_step(lab):
    """The steps are exact, however much time is between them."""
    with ClockPair(lab, source=INJECT, destination=INJECT, policy="continuous", capabilities=None) as pair:
        is_continuous(pair.moved_by(lambda: hold_at_each(
            pair, (pair.source, "guest-time-take"), (pair.source, "guest-time-taken"),
            (pair.destination, "guest-time-clock"), (pair.destination, "guest-time-set"))))
        assert not pair.warnings()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continuous", "stopped"])
def test_unknown_scale(lab, policy):
    """Both clocks continue from the stop, though not by one instant."""
    with held(lab, destination=INJECT, policy=policy) as pair:
        pair.destination.inject.arm("guest-time-scale")
        jump = pair.moved(GAP_S)
        [line] = pair.warnings()
        assert line.endswith("it is not known how KVM scales the TSC: TSC and kvmclock go on from where they "
                             "were when the guest stopped")
        both_stand_still(jump)


@pytest.mark.slow
def test_reset_and_hotplug(lab):
    """The guest is reset, and a vCPU hot-plugged, later on the destination."""
    with held(lab, policy="continuous", cpus=2, source_options=WITH_ROOM, destination_options=WITH_ROOM) as pair:
        is_continuous(pair.moved(GAP_S))
        plug_cpu(pair.destination)
        of_all = offsets(pair.destination)
        assert len(of_all) == 3 and len(set(of_all)) == 1, of_all

        pair.destination.cmd("set-action", reboot="reset")
        pair.destination.cmd("system_reset")
        # The reset cuts off a line that a vCPU was writing.
        until(lambda: pair.lab.run(f"grep -c '\"ready\"' {pair.destination.console}").output.strip() == "1",
              "the guest boots anew")
        of_all = offsets(pair.destination)
        assert len(of_all) == 3 and len(set(of_all)) == 1, of_all


@pytest.mark.slow
def test_reset_before_it_runs(lab):
    """The instant belongs to the guest before the reset."""
    with held(lab, cpus=2) as pair:
        pair.destination.cmd("set-action", reboot="reset")
        pair.source.wait_event("ready")
        pair.source.cmd("migrate", uri=pair.listen())
        pair.wait_completed()
        pair.destination.cmd("system_reset")
        pair.destination.cmd("cont")
        pair.destination.wait_event("ready")
        assert not pair.started()
        assert len(set(offsets(pair.destination))) == 1


def moved_on(pair, qemu, *words):
    """Let the destination send the guest on to another QEMU, the new source, without running it."""
    pair.source.wait_event("ready")
    # KVM treats a TSC that is set to nearly the vCPU's value as equal: let it differ
    pair.lab.run(f"sleep {GAP_S}")
    pair.source.cmd("migrate", uri=pair.listen())
    pair.wait_completed()
    pair.source.end()
    pair.lab.run(f"sleep {GAP_S}")
    pair.sides[0] = pair.source = Side(pair.lab, "source", qemu, [*words, "-incoming", "defer"], pair.options)
    pair.source.connect()
    pair.source.cmd("migrate-incoming", uri="tcp:127.0.0.1:4200")
    pair.destination.cmd("migrate", uri="tcp:127.0.0.1:4200")
    pair.source.wait_status("completed")


@pytest.mark.slow
@pytest.mark.parametrize("source, third", [(FORK, FORK), (FORK, STOCK), (STOCK, FORK)],
                         ids=["by-instant", "to-stock", "from-stock"])
def test_moved_on_before_it_runs(lab, source, third):
    """A QEMU without the feature neither gets the instant nor sends one. Then the stream has the clocks' values at the
    stop, not those of a KVM in which the guest has not run."""
    counted = source == third
    with held(lab, cpus=2, source=source) as pair:
        pair.source.wait_event("ready")
        was = offsets(pair.source)
        moved_on(pair, third, *("-global", "migration.guest-time=continuous") * counted)
        pair.source.cmd("cont")
        for event in later_reports(pair.source, 2):
            assert event["back_tsc"] == event["back_clock"] == 0, event
            assert (event["step_tsc"] > GAP_S * tsc_khz() * 1000) == counted, event
            assert (event["step_clock"] > GAP_S * 1e9) == counted, event
        if counted:
            for now, then in zip(offsets(pair.source), was, strict=True):
                assert abs(now - then) * 1000 / tsc_khz() <= 10


# The fork and other QEMUs

@WAYS
@pytest.mark.parametrize("source, destination", listed(
    (STOCK, FORK), (FORK, STOCK), (FORK, FORK), (STOCK, STOCK), quick=[(STOCK, FORK)]))
def test_old_stream(lab, source, destination, postcopy):
    """Without configuration, with stock on one side; or the fork's source is configured to be like stock."""
    with held(lab, postcopy, switch="off" if source == destination == FORK else None, source=source,
              destination=destination, policy="continuous" if destination == FORK else None) as pair:
        jump = pair.moved(GAP_S, postcopy)
        if destination == STOCK:
            is_as_stock(jump)
        else:
            both_stand_still(jump, 0.1 + pair.source.cmd("query-migrate")["downtime"] / 1000)
        if source == FORK:
            assert pair.outcome(pair.source)["reason"] == "the destination does not know guest-time" \
                if destination == STOCK else "guest-time" not in pair.source.cmd("query-migrate")
        if destination == FORK:
            assert not pair.outcome()["instant"]
            assert "the source has not reported" in pair.outcome()["reason"]
            [line] = pair.warnings()
            assert "the source has not reported when it stopped the guest" in line


@pytest.mark.parametrize("machine, cpus", [("microvm", 2), pytest.param("isapc", 1, marks=pytest.mark.slow)])
def test_machines_without_versions(lab, machine, cpus):
    """These machines send the same stream as stock. With stock, a TSC can go back: KVM mistakes a value near that of
    the destination's vCPUs, which are as old as the guest, for an attempt to synchronise them."""
    with ClockPair(lab, destination=STOCK, machine=machine, cpus=cpus, capabilities=None) as pair:
        for event in pair.moved().after:
            assert event["back_clock"] == event["all_back_clock"] == 0, event


@pytest.mark.slow
def test_frequency_within_tolerance(lab):
    """KVM does not scale a TSC that should be 100 ppm faster, and vmclock contains the TSC's real rate."""
    words = ("-cpu", f"max,tsc-frequency={tsc_khz() * 10001 // 10000 * 1000}", "-device", "vmclock")
    with held(lab, policy="continuous", source_options=words, destination_options=words, vmclock=1) as pair:
        is_continuous(pair.moved(GAP_S))
        assert not pair.warnings()
        vmclock_after(pair)
        page = pair.destination.memory(VMCLOCK, 64)
        khz = 2 ** (64 + page[39]) / int.from_bytes(page[48:56], "little") / 1000
        assert abs(khz / tsc_khz() - 1) < 2e-5, khz


@pytest.mark.slow
@pytest.mark.parametrize("percent", [50, 90, 130])
def test_frequency_scaled(percent):
    """One host that scales: the offsets stay the same if the guest's time continues."""
    khz = tsc_khz() * percent // 100
    cpu = ("-cpu", f"max,tsc-frequency={khz * 1000}")
    with (Lab(name="scaling", cpu="max") as lab,
          held(lab, policy="continuous", source_options=cpu, destination_options=cpu) as pair):
        jump = pair.moved(GAP_S)
        assert max(map(abs, jump.tsc_us)) <= 10, jump.tsc_us
        # Until then, KVM's clock for the guest runs by the scaled frequency, rounded down to a kHz.
        rate = RELATION_NS_PER_S + 1e9 / khz
        assert max(map(abs, jump.relation_ns)) <= RELATION_NS + rate * jump.settled_s, jump
        assert jump.offsets_differ == jump.backwards == 0
        assert not pair.warnings()
        assert {e["pv_flags"] for e in jump.after} == {3}


@pytest.mark.slow
def test_snapshot_before_the_guest_runs(lab):
    """The snapshot does not contain the destination's instant, so that QEMU 10.0 loads it."""
    with ClockPair(lab, switch="on", cpus=2, capabilities=None,
                   destination_options=("-S", "-machine", "guest-time=on")) as pair:
        pair.source.cmd("migrate", uri=pair.listen())
        pair.destination.wait_status("completed")
        image = pair.destination.add_disk()     # Migrated disks are not active before the guest runs
        assert not pair.destination.run_job("snapshot-save", tag="s", vmstate="disk", devices=["disk"])
        assert lab.run(f"grep -aq kvmclock {image}").rc == 0
        assert lab.run(f"grep -aq guest_time {image}").rc == 1
        pair.destination.cmd("cont")


def advance(before, after, clock):
    """The largest advance of a clock, of all vCPUs."""
    was = {e["cpu"]: e[clock] for e in before}
    return max(e[clock] - was[e["cpu"]] for e in after)


@pytest.mark.slow
def test_snapshot_and_pause(lab):
    """On one host nothing has changed: a snapshot does not contain its age, and the clocks continue from it."""
    with ClockPair(lab, cpus=2, capabilities=None) as pair:
        side = pair.source
        side.wait_event("ready")
        side.add_disk()

        # To load a snapshot, QEMU resets the guest, which writes 0 to the TSC, then writes the saved value. KVM
        # mistakes a value within a second of its own for an attempt to synchronise vCPUs, and keeps the TSC: that of
        # a younger guest would go back, as with stock QEMU.
        until(lambda: side.report().all("clock")[-1]["tsc"] > 3 * tsc_khz() * 1000, "the guest is old enough")
        start, before = time.monotonic(), later_reports(side, 2)
        assert not side.run_job("snapshot-save", tag="s", vmstate="disk", devices=["disk"])
        saved = time.monotonic()
        lab.run(f"sleep {GAP_S}")
        lay_s = time.monotonic() - saved
        side.cmd("stop")
        assert not side.run_job("snapshot-load", tag="s", vmstate="disk", devices=["disk"])
        side.cmd("cont")
        loaded, events = time.monotonic(), later_reports(side, 2)
        ran_s = time.monotonic() - start - lay_s
        assert advance(before, events, "clock") < (ran_s + 0.1) * 1e9
        assert advance(before, events, "tsc") < (ran_s + 0.1) * tsc_khz() * 1000

        side.cmd("stop")
        stopped = time.monotonic()
        lab.run(f"sleep {GAP_S}")
        lay_s = time.monotonic() - stopped
        side.cmd("cont")
        before, events = events, later_reports(side, 2)
        ran_s = time.monotonic() - loaded - lay_s
        assert advance(before, events, "clock") < (ran_s + 0.1) * 1e9
        for event in events:
            assert event["step_tsc"] > GAP_S * tsc_khz() * 1000, event
            assert event["back_tsc"] == event["back_clock"] == 0, event
        assert not [name for name, _ in side.trace() if name.startswith("kvm_guest_time_st")]


def test_background_snapshots(lab):
    """The TSC and the kvmclock both run on in the pauses."""
    with ClockPair(lab, cpus=2, capabilities=None, return_path=False) as pair:
        side = pair.source
        side.wait_event("ready")
        side.set_capabilities("background-snapshot")
        was, before = offsets(side), later_reports(side, 2)
        for _ in range(5):
            side.cmd("migrate", uri=f"file:{lab.tmp}/snapshot")
            side.wait_status("completed")
        jump = pair.jump(was, before, side, later_reports(side, 2))
        assert max(map(abs, jump.relation_ns)) < RELATION_NS + RELATION_NS_PER_S * 100, jump


@pytest.mark.slow
@pytest.mark.parametrize("switch, policy", [(None, "stopped"), ("on", "stopped"), ("on", "continuous")])
def test_cpr_reboot(lab, switch, policy):
    """The clocks are exact only with guest-time=on on the old QEMU: it cannot query the new one."""
    with ClockPair(lab, policy=policy, switch=switch, cpus=2, capabilities=None, return_path=False) as pair:
        for side in pair.sides:
            side.cmd("migrate-set-parameters", mode="cpr-reboot")
        # The stream is a file
        pair.destination.cmd("migrate-set-parameters", guest_time_restore=policy)
        def move():
            through_a_file(pair, GAP_S, mapped=False)
            pair.destination.cmd("cont")
        jump = pair.moved_by(move)
        if not switch:
            assert not pair.started()
            # QEMU stops the guest before it saves its memory
            both_stand_still(jump, pair.source.cmd("query-migrate")["total-time"] / 1000)
        else:
            follows(policy, pair, jump)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stopped", "continuous"])
def test_cpr_transfer(lab, policy):
    """One host: exact, even if its clock is unsynchronized, and is set meanwhile."""
    words = ("-machine", "aux-ram-share=on")
    main, cpr = ({"transport": "socket", "type": "unix", "path": f"{lab.tmp}/{name}.sock"} for name in ("main", "cpr"))
    with ClockPair(lab, policy=policy, switch="on", cpus=2, backend="memory-backend-memfd,share=on", capabilities=None,
                   return_path=False, source_options=words, destination_options=words) as pair:
        set_host_clock(lab, None)
        pair.source.wait_event("ready")
        # This destination loads the source's state before it has a monitor
        pair.destination.end()
        arguments = [*pair.plans[1].arguments[:-2], "-S", "-incoming", f"unix:{main['path']}",
                     "-incoming", json.dumps({"channel-type": "cpr", "addr": cpr})]
        pair.sides[1] = pair.destination = Side(lab, "destination", FORK, arguments, pair.options)
        until(lambda: not lab.run(f"test -S {cpr['path']}").rc, "the destination listens")
        was = offsets(pair.source)
        pair.source.cmd("migrate-set-parameters", mode="cpr-transfer")
        pair.source.cmd("migrate", channels=[{"channel-type": "main", "addr": main},
                                             {"channel-type": "cpr", "addr": cpr}])
        pair.destination.connect()
        pair.wait_completed()
        lab.run(f"sleep {GAP_S}")
        shift(lab, 4)
        set_host_clock(lab, None)
        pair.destination.cmd("cont")
        jump = pair.jump_since(was)
        shift(lab, -4)
        follows(policy, pair, jump)
        assert not pair.warnings()


@pytest.mark.parametrize(("policy", "lazy"), [
    pytest.param("continuous", True, id="continuous-lazy"),
    pytest.param("continuous", False, id="continuous", marks=pytest.mark.slow),
    pytest.param(None, True, id="stopped-lazy", marks=pytest.mark.slow)])
def test_from_a_file(lab, policy, lazy):
    """guest-time-restore decides; guest-time-max-gap only applies to migrations."""
    words = ["-global", "migration.guest-time-max-gap=1",
             *(("-global", f"migration.guest-time-restore={policy}") if policy else
               ("-global", "migration.guest-time=continuous"))]
    with ClockPair(lab, switch="on", return_path=False, capabilities=None, destination_options=words) as pair:
        jump = pair.moved_by(lambda: through_a_file(pair, GAP_S, lazy))
        outcome = pair.outcome()
        assert outcome["instant"] and outcome["policy"] == (policy or "stopped"), outcome
        assert outcome["gap"] > GAP_S * 1e9 and outcome["counted"] == (outcome["gap"] if policy else 0), outcome
        follows(policy, pair, jump)
