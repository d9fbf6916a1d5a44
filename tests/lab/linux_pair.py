# SPDX-License-Identifier: GPL-2.0-or-later
"""Two QEMUs in the lab, and the migration of the Linux guest from one to the other: as Pair of
pair.py, with parameters of tests/linux-guest/init.c as options."""
import struct
import time
from typing import Any, Self

from tests.lab import linux_guest
from tests.lab.host import Place
from tests.lab.linux_guest import ASYNC_PF
from tests.lab.pair import BasePair, BaseSide, until

# A guest under load
LOAD: dict[str, Any] = {"mem": 48, "writers": 2, "computers": 1, "forkers": 1, "interval": 100}


class LinuxSide(BaseSide):
    # Reports of a guest before this QEMU loaded it
    said_before = ""

    def guest_arguments(self, options: dict[str, Any]) -> list[str]:
        self.log = f"{self.lab.tmp}/{self.name}.log"    # the log of the guest's kernel
        self.logs.append(self.log)
        return linux_guest.arguments(self.console, self.log, **options, arch=self.lab.arch)

    def said(self) -> str:
        return self.said_before + self.lab.run(f"cat {self.console}").output

    def report(self) -> linux_guest.Report:
        return linux_guest.Report(self.said())

    def wait_ready(self) -> None:
        def ready() -> bool:
            self.check()
            report = self.report()
            # A guest that has moved here has booted elsewhere
            return bool(report.boots or report.lines)
        until(ready, "the Linux guest has booted", timeout=90)

    def reported(self) -> bool:
        return bool(self.report().lines)

    def checked(self) -> bool:
        """All of it, once more since the guest runs here."""
        self.check()
        lines = self.report().lines
        if not lines or lines[-1]["sweeps"] < lines[0]["sweeps"] + 2:
            return False
        self.check_log()
        return True

    def check_log(self) -> None:
        report, complaints = self.report(), linux_guest.complaints(self.kernel_log())
        assert not report.bad and not (report.lines and report.lines[-1]["bad"]), (report.bad, complaints)
        assert not complaints, complaints

    def kernel_log(self) -> str:
        return self.lab.run(f"cat {self.log}").output


class LinuxPair(BasePair[LinuxSide]):
    side_type = LinuxSide

    def __init__(self, lab: Place, memory_mb: int = 160, cpus: int = 1, **options: Any) -> None:
        super().__init__(lab, memory_mb=memory_mb, cpus=cpus, **options)

    def __enter__(self) -> Self:
        for path in linux_guest.files(self.lab.arch):
            assert not self.lab.run(f"test -e {path}").rc, f"no {path} in the lab: make guest"
        return super().__enter__()

    def check_memory(self) -> None:
        super().check_memory()
        self.check_logs()

    def counts_at_switch(self) -> dict[str, int]:
        """The counters of threads when the source's guest was stopped: the guest's last report is older,
        and while no page is missing, the threads do much in little time."""
        until(lambda: not self.source.cmd("query-status")["running"], "the source's guest is stopped")
        report = self.source.report()
        assert report.addresses, "the guest's init is an old one: make guest"
        counts = {kind: sum(struct.unpack("<64Q", self.source.memory(address, 64 * 8)))
                  for kind, address in report.addresses.items()}
        for kind, count in counts.items():
            least = sum(n for name, n in report.lines[-1].items() if name.startswith(kind))
            assert count >= least, f"{kind}: {count} in memory, {least} reported: the kernel has moved the page"
        return counts

    def until_reports(self, n: int = 10) -> list[dict[str, int]]:
        """Wait for n reports from the destination: by then, pages that the guest and its console touch all the time
        have been received, so that QEMU's main thread misses no page if the source sends no data."""
        return until(lambda: len(lines := self.destination.report().lines) >= n and lines,
                     f"{n} reports from the destination", timeout=60)

    def async_counts(self) -> Any:
        return self.destination.cmd("query-migrate").get("postcopy-async")

    def until_outstanding(self) -> Any:
        """Stop the source at a time at which guest tasks sleep for pages. By chance, all vCPUs may wait in the
        guest's kernel."""
        for _ in range(40):
            self.source.signal("STOP")
            self.until_quiet()
            counts = self.async_counts()
            if counts["outstanding"]:
                return counts
            self.source.signal("CONT")
            time.sleep(0.3)
        raise AssertionError(f"no task waits for a page: {counts}")

    def check_logs(self) -> None:
        for side in self.sides:
            side.check_log()

    def check_threads(self) -> None:
        """Each thread runs: its counter advances."""
        first = self.until_reports(1)[-1]
        names = [k for k in first if k.rstrip("0123456789") in
                 ("writer", "computer", "forker", "copier", "clock", "disk")]

        def advanced() -> bool:
            last = self.destination.report().lines[-1]
            return all(last[name] != first[name] for name in names)
        until(advanced, f"each of {', '.join(names)} goes on after {first}", timeout=10)


# With async page faults

def guest_with(lab: Place, **options: Any) -> LinuxPair:
    """A pair whose guest has async page faults, and is under load."""
    on = ASYNC_PF[lab.arch]
    return LinuxPair(lab, **LOAD | {"exits": "on", "source_options": on, "destination_options": on} | options)


def finish(pair: LinuxPair) -> None:
    pair.finish_fast()
    pair.check_threads()


def until_announced(pair: LinuxPair) -> None:
    """The time depends on the guest's speed, and on whether requests queue behind the background."""
    pair.until_faults()
    until(lambda: pair.async_counts()["announced"] > 5, "tasks wait", timeout=90)


def all_delivered(pair: LinuxPair) -> Any:
    """Each task that was notified to wait has been notified to resume."""
    counts = until(lambda: not (counts := pair.async_counts())["outstanding"] and counts,
                   "no task waits any more")
    assert counts["delivered"] + counts["forgotten"] == counts["announced"], counts
    return counts
