# SPDX-License-Identifier: GPL-2.0-or-later
"""The guest payload for tests and the demo: QEMU's command line, and the guest's report.

The guest fills memory, then touches it until it moves. The debug console's readback value, on arm64 a
file of fw_cfg, shows whether it is on the destination; there it times one touch of each page (pass 1),
once more with all memory present but not mapped by KVM (pass 2: a fault that does not wait; on arm64,
where a guest cannot make KVM forget mappings, no fault), checks every word, and reports on the console.
tests/guest/memory.c describes the contents of pages, touch.c the order of touches.
"""
import json
import statistics
from array import array
from collections.abc import Callable
from typing import Any

# A report of the guest: a JSON object with the key "event".
Event = dict[str, Any]
# Microseconds of touches, by processor.
Pass = list[list[float]]
# A touch that took longer than this number of medians of the second pass has waited.
WAIT_MEDIANS = 2

READBACK = {"source": 0xE9, "destination": 0xD5}
PAYLOADS = {"x86_64": "build/tests", "aarch64": "build/tests-aarch64"}
MACHINE = {"x86_64": "pc", "aarch64": "virt,gic-version=3"}
# As in tests/guest/touch.h
PATTERNS = ("disjoint", "shared", "samehuge", "zerowrite", "smm", "sequential", "strided", "hot")


def payload(name: str = "touch", arch: str = "x86_64") -> str:
    """Path of a payload in the checkout, and below /lab in the lab."""
    return f"{PAYLOADS[arch]}/{name}.bin"


def arguments(side: str, log: str, cpus: int | str = 4, memory_mb: int | str = 128, machine: str | None = None,
              payload: str | None = None, arch: str = "x86_64", **parameters: int | str) -> list[str]:
    """QEMU's arguments, without accelerator and monitor.

    side: "source" or "destination"; log: file for the guest's report; payload: by default
    touch.bin. Parameters, of which both sides must have the same, for touch.bin:
      pattern  disjoint: each processor has its part of memory; shared: all processors touch
               all pages, together; samehuge: they touch different pages of the same 2 MiB;
               sequential: disjoint, and in order of their addresses, where the others are random;
               strided: disjoint, each fourth page in order of addresses, then those between;
               hot: disjoint; an eighth of the pages, anywhere, is written most often, and only they
               are timed on the destination;
               zerowrite: disjoint, and read before they write (use with zero=100);
               smm: disjoint, and processor 0 touches by an SMI handler
               (x86 only)
      mem      MiB under test (all that is free)
      zero     per cent of pages that hold zeros until the guest has moved (12)
      seed     of contents and order (0)
      passes   number of touches of each page, then check, moved or not (0: until moved)
      time     1: count touches by duration before the guest moves, see times()
    and for clock.bin:
      vmclock  1: processor 0 reads QEMU's vmclock device every second
      adjust   value that processor 1 writes to its IA32_TSC_ADJUST
      deadline ms until a timer of the LAPIC expires, on arm64 two timers of each processor
               (0: none)
    and for async.bin and nested.bin:
      async    sum of flags of tests/guest/x86_64/async.h (0)
    """
    if arch == "aarch64":
        parameters = {"ram": memory_mb} | parameters    # no other way tells it
        console = ["-serial", "chardev:report", "-fw_cfg", f"name=opt/side,string={side[0]}"]
    else:
        console = ["-device", f"isa-debugcon,iobase=0xe9,readback={READBACK[side]:#x},chardev=report"]
    if "pattern" in parameters:
        parameters["pattern"] = PATTERNS.index(str(parameters["pattern"]))
    text = " ".join(f"{key}={value}" for key, value in parameters.items())
    return [
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", machine or MACHINE[arch], "-smp", str(cpus), "-m", str(memory_mb)),
        *("-bios", payload or f"{PAYLOADS[arch]}/touch.bin"),
        *("-fw_cfg", f"name=opt/touch,string={text}") * bool(text),
        *("-chardev", f"file,id=report,path={log}"), *console,
    ]


TIMES_BUCKETS = 512


def times(before: bytes, after: bytes, tsc_khz: int) -> list[tuple[float, int]]:
    """[(microseconds, touches)] between two dumps of memory, shortest first; the time of each bucket is its
    upper end, at most an eighth too long.

    The dumps contain TIMES_BUCKETS * 4 bytes for each processor from event "boot"'s times_address on.
    """
    count = [0] * TIMES_BUCKETS
    for i, (a, b) in enumerate(zip(array("I", before), array("I", after), strict=True)):
        count[i % TIMES_BUCKETS] += (b - a) % (1 << 32)
    # Inverse of the guest's bucket(): the number of the highest bit and the three bits after it.
    return [(((i % 8 + 9 if i > 7 else i + 1) << max(i // 8 - 1, 0)) * 1000 / tsc_khz, n)
            for i, n in enumerate(count) if n]


class Report:
    """A guest's reports so far on one side."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")[:-1]  # the last one is not complete
        if lines and not lines[0].startswith("{"):
            del lines[0]                # nor is a line within which the guest moved
        self.events: list[Event] = [json.loads(line) for line in lines]

    def all(self, event: str) -> list[Event]:
        return [e for e in self.events if e["event"] == event]

    def first(self, event: str) -> Event | None:
        return next(iter(self.all(event)), None)

    def the(self, event: str) -> Event:
        """The first event of this kind, which must exist."""
        found = self.first(event)
        assert found is not None, f"the guest has not reported '{event}': {self.events}"
        return found

    @property
    def error(self) -> str | None:
        """The reason for which the guest gave up, if it did."""
        event = self.first("error")
        return event["message"] if event else None

    @property
    def intact(self) -> bool:
        """Whether the guest has checked its memory, without an error."""
        end = self.first("end")
        return end is not None and end["bad_pages"] == 0 and end["bad_regions"] == 0

    def latencies_us(self, memory: Callable[[int, int], bytes], tsc_khz: int) -> tuple[Pass, Pass]:
        """(pass 1, pass 2): microseconds of each touch, by processor, in order of time.

        memory: Side.memory. tsc_khz is in the source's event "boot".
        """
        def one_pass(key: str) -> Pass:
            return [[ticks * 1000 / tsc_khz for ticks in array("I", memory(s[key], 4 * s["count"]))]
                    for s in self.all("samples")]
        return one_pass("pass1_address"), one_pass("pass2_address")

    def from_switch_us(self, tsc_khz: int) -> list[float]:
        """Microseconds from the switch to the end of pass 1, by processor."""
        return [s["ticks"] * 1000 / tsc_khz for s in self.all("samples")]


def wait_threshold_us(present_us: Pass, least_us: float) -> float:
    """A touch that takes longer has waited for its page. present_us: pass 2, in which all pages are present."""
    return max(WAIT_MEDIANS * statistics.median(t for cpu in present_us for t in cpu), least_us)
