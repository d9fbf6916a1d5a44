# SPDX-License-Identifier: GPL-2.0-or-later
"""The exact effect of migrations on a guest's clocks.

A vCPU's TSC is L1's TSC plus an offset, which L1's KVM shows in debugfs. So the difference of the
offsets on both sides is the time that a migration has added to the TSC beside the time that has passed.
The kvmclock is a function of the vCPU's TSC, whose parameters KVM gives to the guest, and the guest
(tests/guest/clock.c) reports.
"""
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.guest import PAYLOADS, Event
from tests.lab.host import Place
from tests.lab.lab import tsc_khz
from tests.lab.pair import MIB, BaseSide, Pair, Side, until
from tests.lab.text import search

CLOCK = "build/tests/clock.bin"


def set_host_clock(lab: Place, max_error_us: int | None = 100, tai_offset_s: int = 0, faster_ppm: int = 0) -> None:
    """Make a host's kernel believe that NTP keeps its clock right, or, with None, that its clock is unsynchronized;
    faster_ppm: the rate at which the clock is slewed, in hundreds."""
    state = "unsynchronized" if max_error_us is None else max_error_us
    lab.run(f"{PAYLOADS[lab.arch]}/host-clock {state} {tai_offset_s} {10000 + faster_ppm // 100}", check=True)


def signed(value: int) -> int:
    """A difference modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def kvmclock_ns(event: Event, tsc: int) -> int:
    """The guest's kvmclock when its vCPU's TSC is tsc, by KVM's parameters."""
    shift: int = event["pv_shift"] - (256 if event["pv_shift"] > 127 else 0)
    ticks = signed(tsc - event["pv_tsc"])
    ticks = ticks << shift if shift >= 0 else ticks >> -shift
    return int(event["pv_time"] + (ticks * event["pv_mul"] >> 32))


def offsets(side: BaseSide) -> list[int]:
    """The offset of each vCPU's TSC."""
    text = side.lab.run(f"cd /sys/kernel/debug/kvm/$(cat {side.pidfile})-* && "
                        "for v in vcpu*; do echo $v $(cat $v/tsc-offset); done", check=True).output
    found = {int(v): int(o) for v, o in re.findall(r"^vcpu(\d+) (-?\d+)$", text, re.M)}
    return [found[v] for v in sorted(found)]


def clocks(side: Side, cpus: int, move: int, last: bool = False) -> list[Event]:
    """The first report of each vCPU, or its last so far, after this number of moves."""
    def come() -> list[Event] | None:
        side.check()
        events = [e for e in side.report().all("clock") if e["move"] == move]
        by_cpu = {e["cpu"]: e for e in (events if last else reversed(events))}
        return [by_cpu[cpu] for cpu in range(cpus)] if len(by_cpu) == cpus else None
    return until(come, f"reports of {cpus} vCPUs on the {side.name}", timeout=30)


def lines_after(console: bytes, at: int) -> list[Event]:
    """The whole lines that begin behind byte `at`, where the guest may be within a line: it writes byte by byte, and
    after a snapshot is loaded, the rest of another line follows, which the guest was writing when the snapshot was
    saved."""
    return [json.loads(line) for line in console[at:].decode().split("\n")[1:-1]]


def later_reports(side: Side, cpus: int) -> list[Event]:
    """Each vCPU's last report, after two more reports."""
    now = len(side.lab.read_file(side.console))

    def reports() -> list[Event] | None:
        events = [e for e in lines_after(side.lab.read_file(side.console), now) if e["event"] == "clock"]
        by_cpu = {e["cpu"]: e for e in events}
        enough = len(by_cpu) == cpus and min(Counter(e["cpu"] for e in events).values()) >= 2
        return [by_cpu[cpu] for cpu in range(cpus)] if enough else None
    return until(reports, "the guest reports again")


def backwards(events: Iterable[Event]) -> int:
    """The largest backward step of any clock, by the vCPUs' reports."""
    return max(int(e[key]) for e in events for key in ("back_tsc", "back_clock", "all_back_tsc", "all_back_clock"))


def numbers(side: Side, event: str) -> dict[str, int]:
    """The numbers in an event of the fork's trace, on either architecture."""
    text = dict(side.trace())[event]
    return {key: int(value) for key, value in
            re.findall(r"(kvmclock|virtual|physical|realtime|host TSC|host counter) (\d+)", text)}


def took_us(side: Side, event: str) -> float:
    """The time to read the clocks, by event guest_time_stop, or to set them, by guest_time_start."""
    return int(search(r"took (\d+) ns", dict(side.trace())[event])[1]) / 1000


@dataclass
class Jump:
    """The effect of a migration on the clocks, by vCPU."""

    tsc: list[int]              # cycles added to the TSC beside time that passed: 0 if it ran on
    kvmclock_ns: list[float]    # time added to the kvmclock
    relation_ns: list[int]      # change of kvmclock against TSC
    after: list[Event]          # the guest's reports
    khz: int
    settled_s: float            # from the start to KVM's last reading of its base clock before these reports

    @property
    def tsc_us(self) -> list[float]:
        return [cycles * 1000 / self.khz for cycles in self.tsc]

    @property
    def offsets_differ(self) -> int:
        return max(self.tsc) - min(self.tsc)

    @property
    def least_step_s(self) -> float:
        """The smallest of the largest steps that the guest has seen, of all clocks."""
        return float(min(s for e in self.after for s in (e["step_tsc"] / self.khz / 1e3, e["step_clock"] / 1e9)))

    @property
    def backwards(self) -> int:
        return backwards(self.after)


def migrate(pair: Pair, gap_s: float, postcopy: bool, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Migrate to the end; if the destination was started with -S, then let the guest run after gap_s."""
    if postcopy:
        pair.postcopy(bandwidth=64 * MIB)
    else:
        pair.source.cmd("migrate", uri=pair.listen())
    pair.wait_completed()
    if gap_s:
        pair.lab.run(f"sleep {gap_s}")
        meanwhile()
        pair.destination.cmd("cont")


def through_a_file(pair: Pair, gap_s: float, lazy: bool = False, mapped: bool = True) -> None:
    """Save the source's guest, with mapped-ram or as a stream; after gap_s, resume it on the destination, which reads
    touched pages first if lazy."""
    file = f"{pair.lab.tmp}/saved"
    if mapped:
        pair.source.set_capabilities("mapped-ram")
        pair.destination.set_capabilities("mapped-ram", *["postcopy-ram"] * lazy)
    pair.source.cmd("migrate", uri=f"file:{file}")
    pair.source.wait_status("completed")
    pair.lab.run(f"sleep {gap_s}")
    pair.destination.cmd("migrate-incoming", uri=f"file:{file}")
    pair.destination.wait_status("completed")
    pair.lab.run(f"rm {file}", check=True)


class ClockPair(Pair):
    """A pair whose guest reads its clocks. Its sides have the return path, as with libvirt, unless return_path=False,
    and hosts with clocks synchronized to max_error_us. switch: guest-time of the source's machine; policy: the
    destination's."""

    tsc_base = 0    # the TSC of the destination's host less that of the source's
    _offsets = staticmethod(offsets)

    def __init__(self, lab: Place, payload: str = CLOCK, switch: str | None = None, policy: str | None = None,
                 source_options: Sequence[str] = (), destination_options: Sequence[str] = (),
                 return_path: bool = True, max_error_us: int | None = 100, tai_offset_s: int = 0,
                 **options: Any) -> None:
        if switch:
            source_options = ("-machine", f"guest-time={switch}", *source_options)
        if policy:
            # In arm64's lab, beside other work, a blackout of 2 s has taken 11 s
            destination_options = (*destination_options, "-global", f"migration.guest-time={policy}",
                                   "-global", "migration.guest-time-max-gap=120000")
        super().__init__(lab, payload=payload, source_options=source_options, destination_options=destination_options,
                         **options)
        if return_path:
            self.capabilities = (*self.capabilities, "return-path")
        for host in {self.lab, self.destination_lab}:
            set_host_clock(host, max_error_us, tai_offset_s)

    def warnings(self) -> list[str]:
        return [line for line in self.destination.job.output.splitlines() if "guest-time" in line]

    def outcome(self, side: Side | None = None) -> Any:
        """The guest time of query-migrate, on the destination."""
        return (side or self.destination).cmd("query-migrate")["guest-time"]

    def moved(self, gap_s: float = 0, postcopy: bool = False, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Migrate; if the destination was started with -S, let the guest stand still for gap_s. Returns a Jump."""
        return self.moved_by(lambda: migrate(self, gap_s, postcopy, meanwhile))

    def moved_by(self, move: Callable[[], object]) -> Any:
        self.source.wait_event("ready")
        was = self._offsets(self.source)
        move()
        return self.jump_since(was)

    def jump_since(self, was: list[int]) -> Any:
        """From offsets and the last reports on the source to the first ones on the destination."""
        return self.jump(was, clocks(self.source, self.cpus, 0, last=True), self.destination,
                         clocks(self.destination, self.cpus, 1))

    def failed(self, gap_s: float, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """A migration that the destination fails to load: the guest stands still for gap_s, and then resumes on the
        source, which must be INJECT."""
        self.source.wait_event("ready")
        was = offsets(self.source)
        self.source.inject.arm("guest-time-taken")
        self.source.cmd("migrate", uri=self.listen())
        self.source.inject.wait_held("guest-time-taken")
        before = clocks(self.source, self.cpus, 0, last=True)
        self.lab.run(f"sleep {gap_s}")
        meanwhile()
        self.source.inject.release("guest-time-taken")
        until(lambda: self.source.status() == "failed", "the migration fails")
        until(lambda: self.source.cmd("query-status")["running"], "the guest runs again")
        # One report may have been in flight to the console, another one is from after the stop.
        return self.jump(was, before, self.source, later_reports(self.source, self.cpus))

    def jump(self, was: list[int], before: list[Event], side: Side, after: list[Event]) -> Any:
        """From offsets and reports on the source to those on a side."""
        base = self.tsc_base if side is self.destination else 0
        # KVM keeps unplugged vCPUs, which are the last ones
        tsc = [signed(now + base - w) for now, w in zip(offsets(side), was, strict=True)][:self.cpus]
        # At the TSC of the guest's first report
        relation = [kvmclock_ns(a, a["tsc"]) - kvmclock_ns(b, a["tsc"]) for b, a in zip(before, after, strict=True)]
        added = [t * 1e6 / tsc_khz() + r for t, r in zip(tsc, relation, strict=True)]
        start = numbers(side, "kvm_guest_time_start") if self.started(side) else {}
        last = max(e["pv_time"] for e in after)
        settled_s = max(0, last - start.get("kvmclock", last)) / 1e9
        jump = Jump(tsc, added, relation, after, tsc_khz(), settled_s)
        print(f"added to TSC {jump.tsc_us} us, to kvmclock {added} ns, relation {relation} ns, "
              f"settled in {settled_s:.3f} s")
        return jump

    def started(self, side: Side | None = None) -> bool:
        """Whether the destination has set the clocks by the source's instant."""
        return "kvm_guest_time_start" in dict((side or self.destination).trace())

    def passed_in_blackout_us(self, jump: Any, side: Side | None = None) -> Any:
        """Guest time from the instant of the stop to that of the start, on the destination."""
        side = side or self.destination
        base = self.tsc_base if side is self.destination else 0
        cycles = numbers(side, "kvm_guest_time_start")["host TSC"] \
            - numbers(self.source, "kvm_guest_time_stop")["host TSC"] + jump.tsc[0] - base
        return cycles * 1000 / jump.khz
