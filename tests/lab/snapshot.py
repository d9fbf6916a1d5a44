# SPDX-License-Identifier: GPL-2.0-or-later
"""A QEMU in the lab of which background snapshots are taken, and another that restores them.

    with Machine(lab, backend="memfd") as machine:
        info = machine.take()
        machine.restore()

The guest writes continuously. Each page counts its touches, and another page counts them too
(tests/guest/memory.c), so that a page of another moment than the rest is found: restore() lets the
guest run on and check all its memory. If the body fails, all output of the QEMUs and the guest is kept.
"""
import re
from collections.abc import Sequence
from typing import Any, Self

from tests.lab import guest
from tests.lab.backends import memory
from tests.lab.host import Place
from tests.lab.pair import FORK, Side, keep_logs, until
from tests.lab.qtest import Qtest
from tests.lab.text import search


class Machine:
    """backend: of BACKENDS; capabilities: beside background-snapshot; arguments: more
    words of both command lines, taker: of the first one's; wrapper: words before it; other
    options: as for guest.arguments()."""
    # LinuxSide for a Linux guest, with options of linux_guest.arguments()
    side_type: Any = Side
    how: tuple[str, ...] = ("background-snapshot",)

    def __init__(self, lab: Place, qemu: str = FORK, backend: str = "anonymous", memory_mb: int | str = 64,
                 cpus: int = 4, machine: str | None = None, capabilities: Sequence[str] = (),
                 arguments: Sequence[str] = (), taker: Sequence[str] = (), wrapper: Sequence[str] = (),
                 **options: int | str) -> None:
        self.lab = lab
        self.file = f"{lab.tmp}/snapshot"
        self.arguments = [*memory(backend, memory_mb), *arguments]
        self.options: dict[str, Any] = {"machine": machine, "memory_mb": memory_mb, "cpus": cpus, **options}
        self.capabilities = ("events", *capabilities)
        self.sides: list[Side] = []
        self._start = (qemu, list(taker), tuple(wrapper))

    def __enter__(self) -> Self:
        qemu, arguments, wrapper = self._start
        try:
            self.side = self._side("source", qemu, arguments, wrapper)
            self.side.wait_ready()
            self.side.set_capabilities(*self.how, *self.capabilities)
        except BaseException as e:
            self.__exit__(type(e), e, None)
            raise
        return self

    def _side(self, name: str, qemu: str, arguments: Sequence[str], wrapper: Sequence[str] = ()) -> Any:
        side = self.side_type(self.lab, name, qemu, [*self.arguments, *arguments], self.options, traced=False,
                              wrapper=wrapper)
        self.sides.append(side)
        side.connect()
        return side

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for side in self.sides:
            side.end()
        if error:
            error.add_note(keep_logs("snapshot", self.sides, {}))
        self.lab.run(f"rm -f {self.file}")

    def start(self, uri: str = "") -> None:
        self.side.qmp.clear_events()
        self.side.cmd("migrate", uri=uri or f"file:{self.file}")

    def wait_running(self) -> None:
        """Wait until memory is protected and the guest runs on."""
        until(lambda: any(event["event"] == "RESUME" for event in self.side.qmp.get_events()),
              "the guest has been stopped, and runs on")

    def wait(self, *wanted: str) -> Any:
        """Wait for the snapshot's end, which must be as wanted ("completed"); returns query-migrate."""
        wanted = wanted or ("completed",)

        def ended() -> Any:
            self.side.check()
            info = self.side.cmd("query-migrate")
            return info["status"] in ("completed", "failed", "cancelled") and info
        info = until(ended, f"snapshot {' or '.join(wanted)}")
        assert info["status"] in wanted, info
        return info

    def take(self, uri: str = "", status: str = "completed") -> Any:
        """Take a snapshot of the running guest; returns query-migrate."""
        self.start(uri)
        return self.wait(status)

    def take_while_written(self) -> Any:
        """Like take(), until a vCPU has had to wait; on a busy machine, vCPUs may not run during a snapshot."""
        for _ in range(10):
            info = self.take()
            if info["background-snapshot"]["faults"]:
                return info
        raise AssertionError("the guest did not write while the snapshots were taken")

    def save(self, uri: str = "") -> None:
        """Stop the guest, and save it to the file of a snapshot, or to uri."""
        self.side.cmd("stop")
        self.side.set_capabilities("background-snapshot", state=False)
        self.take(uri)

    def start_destination(self, qemu: str, arguments: Sequence[str] = (), wrapper: Sequence[str] = (),
                          name: str = "destination") -> Any:
        return self._side(name, qemu, ["-incoming", "defer", *arguments], wrapper)

    def load(self, qemu: str = FORK, capabilities: Sequence[str] = (), arguments: Sequence[str] = ()) -> Side:
        """Restore the snapshot in another QEMU."""
        side: Side = self.start_destination(qemu, arguments)
        side.set_capabilities(*capabilities)
        side.cmd("migrate-incoming", uri=f"file:{self.file}")
        return side

    def restore(self, qemu: str = FORK, capabilities: Sequence[str] = (), keep: bool = False,
                status: str = "") -> guest.Report:
        """Restore the snapshot in another QEMU, and let the guest there check its memory.

        keep: leave it there, for Qtest; status: of a guest that does not run by itself."""
        side = self.load(qemu, capabilities, Qtest.arguments(self.lab, "destination") if keep else ())
        if status:
            until(lambda: side.cmd("query-status")["status"] == status, f"the restored guest is {status}")
            side.cmd("cont")
        side.wait_event("end")
        report = side.report()
        assert report.intact, f"not of one instant: {report.all('bad')}, {report.all('end')}"
        if not keep:
            side.end()
            self.sides.remove(side)
        return report

    def snapshot_bytes(self) -> int:
        return int(self.lab.run(f"stat -c %s {self.file}", check=True).output)

    def touches(self) -> int:
        """How often the guest has touched 64 pages of its memory."""
        boot = self.side.report().the("boot")
        pages = min(boot["test_pages"], 64)
        data = self.side.memory(boot["test_address"], pages * 4096)
        return sum(int.from_bytes(data[i:i + 4], "little") for i in range(0, len(data), 4096))

    def assert_goes_on(self) -> None:
        assert self.side.cmd("query-status")["status"] == "running"
        before = self.touches()
        until(lambda: self.touches() > before + 64, "the guest resumes")

    def assert_whole(self) -> None:
        """The guest runs, no memory is protected any more, and its contents are right."""
        self.assert_goes_on()
        assert not self.protected()
        self.take()
        self.restore()
        self.assert_goes_on()

    def proc(self, name: str) -> str:
        return self.lab.run(f"cat /proc/$(cat {self.side.pidfile})/{name}", check=True).output

    def protected(self) -> list[str]:
        """Mappings that are registered with a userfaultfd for write protection."""
        return re.findall(r"^VmFlags:.*\buw\b", self.proc("smaps"), re.M)

    def huge_kib(self) -> int:
        """KiB of anonymous memory in use, in huge pages."""
        return int(search(r"^AnonHugePages:\s+(\d+) kB", self.proc("smaps_rollup"))[1])

    def resident_kib(self) -> int:
        """KiB of memory in use, with the tables that map it."""
        # VmRSS lacks pages that a processor has not added yet
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", self.proc("status") + self.proc("smaps_rollup"), re.M))
        return sum(int(fields[key]) for key in ("Rss", "VmPTE", "VmSwap"))
