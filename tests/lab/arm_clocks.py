# SPDX-License-Identifier: GPL-2.0-or-later
"""The exact effect of migrations on an arm64 guest's counters.

A guest's counter is L1's minus an offset, which L1's KVM shows in debugfs. So the difference of the
offsets on both sides is the time by which a migration has delayed the counter.
"""
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab import guest
from tests.lab.clocks import ClockPair, numbers, signed
from tests.lab.guest import Event
from tests.lab.host import Place
from tests.lab.pair import FORK, INJECT, BaseSide, Side

ONE_OFFSET = ("-global", "arm-cpu.kvm-counter-offset=on")
NO_ADJVTIME = ("-global", "arm-cpu.kvm-no-adjvtime=on")
COUNTERS = ("virtual", "physical")
TRIES = 10          # after which QEMU may accept an inexact counter


def offsets(side: BaseSide) -> list[int]:
    """The offsets of the VM's virtual and physical counter."""
    files = " ".join(f"{name}-counter-offset" for name in COUNTERS)
    return [int(n) for n in side.lab.run(f"cd /sys/kernel/debug/kvm/$(cat {side.pidfile})-* && cat {files}",
                                         check=True).output.split()]


@dataclass
class Jump:
    """The effect of a migration on the counters, by counter."""

    added: list[int]        # ticks beside the time that passed: 0 if the counter ran on
    offsets: list[int]      # on the destination
    after: list[Event]      # the guest's reports
    khz: int
    error: int              # ticks; QEMU's error after ten tries

    @property
    def added_us(self) -> list[float]:
        return [ticks * 1000 / self.khz for ticks in self.added]

    @property
    def tolerance_us(self) -> float:
        """10 us and a tick, or more if QEMU could not be so exact."""
        return 10 + (1 + self.error) * 1000 / self.khz

    @property
    def least_step_s(self) -> float:
        """The smaller of the largest steps that the guest has seen, of all counters."""
        return min(int(e[f"step_{name}"]) for e in self.after for name in COUNTERS) / self.khz / 1000

    @property
    def backwards(self) -> int:
        return max(int(e[f"{way}_{name}"]) for e in self.after for way in ("back", "all_back") for name in COUNTERS)


class CounterPair(ClockPair):
    """A pair whose guest reads its counters. one_offset: the VM has kvm-counter-offset=on, on both sides; both: words
    for each fork's command line."""

    _offsets = staticmethod(offsets)

    def __init__(self, lab: Place, one_offset: bool = False, cpus: int = 2, source: str = FORK, destination: str = FORK,
                 both: Sequence[str] = (), source_options: Sequence[str] = (), destination_options: Sequence[str] = (),
                 **options: Any) -> None:
        both = (*both, *ONE_OFFSET * one_offset)
        super().__init__(lab, source=source, destination=destination, cpus=cpus,
                         payload=guest.payload("clock", "aarch64"),
                         source_options=(*(both if source in (FORK, INJECT) else ()), *source_options),
                         destination_options=(*(both if destination in (FORK, INJECT) else ()), *destination_options),
                         **options)

    def jump(self, was: list[int], before: list[Event], side: Side, after: list[Event]) -> Jump:
        khz = self.source.report().the("ready")["khz"]
        now = offsets(side)
        for events, (virtual, physical) in (before, was), (after, now):
            # The guest must read the values that KVM has set. It reads the physical counter second, and may be
            # interrupted.
            late = min(signed(e["physical"] - e["virtual"] - (virtual - physical)) for e in events)
            assert 0 <= late < 100 * khz, f"{late} ticks; {events}, {virtual}, {physical}"
        tried = [re.findall(r"\w+", text) for name, text in side.trace() if name == "kvm_arm_guest_time_offset"]
        error = max((abs(signed(int(words[3], 16) - int(words[1], 16))) for words in tried if int(words[7]) >= TRIES),
                    default=0)
        jump = Jump([signed(w - n) for w, n in zip(was, now, strict=True)], now, after, khz, error)
        print(f"added to the counters: {jump.added_us} us; {dict(side.trace())}")
        return jump

    def passed_in_blackout_us(self, jump: Jump, side: Side | None = None) -> list[float]:
        """By both counters"""
        stop = numbers(self.source, "kvm_arm_guest_time_stop")
        start = numbers(side or self.destination, "kvm_arm_guest_time_start")
        return [(start["host counter"] - stop["host counter"] + ticks) * 1000 / jump.khz for ticks in jump.added]
