# SPDX-License-Identifier: GPL-2.0-or-later
"""Failures of a migration at each of its phases, and the ways in which it may end.

    precopy     while the guest runs on the source
    switch      the packaged device state is in flight
    listen      the destination has received the packaged device state, and loads it
    postcopy    the guest runs on the destination
    eof         the source has sent all memory, or the end of the stream, too
    end         the destination has received all, and its last message is held

Failures.carry_through() returns one of Ended, or raises: Hang if nothing changes for HANG_S in a state without a
reason, AssertionError if the guest is damaged, runs twice, or is lost without a message.
"""
import contextlib
import enum
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from qemu.qmp import ExecuteError, QMPError

from tests.lab import limits
from tests.lab.lab import CommandFailed
from tests.lab.pair import MIB, BasePair, BaseSide, Seen, Side
from tests.lab.proxy import MAIN, PACKAGE_LENGTH, VM_EOF, Close, Copy, Page, Send, Wire

HANG_S = 60
KILLED = "killed"
# Statuses that do not change by themselves; "exited" and KILLED are ours.
LASTING = ("completed", "failed", "cancelled", "postcopy-paused", "exited", KILLED)
ACTIONS = {
    "precopy": ("cut", "kill-source", "kill-destination", "cancel"),
    "switch": ("cut", "kill-source", "kill-destination"),
    "listen": ("cut", "kill-source", "kill-destination"),
    "postcopy": ("cut", "pause", "kill-source", "kill-destination"),
    "eof": ("cut", "pause", "kill-source", "kill-destination"),
    "end": ("cut", "kill-source", "kill-destination"),
}
PHASES = tuple(ACTIONS)
HELD = ("switch", "listen", "eof", "end")       # phases at which PhaseWire holds


class Ended(enum.Enum):
    DESTINATION = "the guest is whole on the destination"
    SOURCE = "the guest is whole on the source"
    SPLIT = "one side was killed after the guest had begun to run there: the other one says postcopy-paused"
    WITH_SOURCE = "the guest was killed with the source; the destination says that the stream ended"
    WITH_DESTINATION = "the guest was killed with the destination, after the source had completed"


class Hang(Exception):
    """Nothing changes, and no status has a reason for it."""


class PhaseWire(Wire):
    """Holds the main channel at a phase. switch: at a part (0 to 1) of the packaged device state; listen: behind it;
    eof: before the end of the stream, or right behind it with part > 0.5; end: the destination's messages after that.
    Sets reached at the phase; go() continues."""

    def __init__(self, to: int, phase: str, part: float, mute: bool) -> None:
        self.phase = phase
        self.part = part
        self.mute = mute        # From the phase on, the source receives nothing.
        self.reached = threading.Event()
        self._go = threading.Event()
        self._hold_back = False
        super().__init__(to)
        self.kept = bytearray()

    def go(self) -> None:
        self._go.set()

    def cut(self) -> None:
        super().cut()
        self.go()

    def _hold(self) -> None:
        self.reached.set()
        self._go.wait()
        if self.is_cut:
            raise Close

    def _back(self, a: socket.socket, b: socket.socket) -> None:
        while data := a.recv(16 << 10):
            if self._hold_back:
                self._hold()
            if not (self.mute and self.reached.is_set()):
                b.sendall(data)

    def _forward(self, channel: int) -> Copy:
        return self._main if channel == MAIN else self._copy

    def _send_package(self, package: bytes, send: Send) -> None:
        """self.part is of the package without its length."""
        sent = len(package)
        if self.phase == "switch":
            sent = PACKAGE_LENGTH + int(self.part * (sent - PACKAGE_LENGTH))
        send(package[:sent])
        if self.phase in ("switch", "listen"):
            self._hold()
        send(package[sent:])

    def _send(self, items: Iterable[Page | bytes], send: Send) -> None:
        for item in items:
            data = item.pack() if isinstance(item, Page) else item
            at_end = data == bytes([VM_EOF])
            self._hold_back |= at_end and self.phase == "end"
            if at_end and self.phase == "eof" and self.part <= 0.5:
                self._hold()
            send(data)
            if at_end and self.phase == "eof":
                self._hold()


def output(side: BaseSide) -> str:
    """QEMU's last line of output."""
    return (side.job.output.strip().splitlines() or ["nothing"])[-1]


def diagnosis(pair: BasePair[Any]) -> str:
    """Information about a pair that hangs."""
    text = []
    for side in pair.sides:
        text.append(f"--- {side.name}, {'runs' if side.job.running else 'has ended'}; its last words: {output(side)}")
        if not side.job.running:
            continue
        # Threads first, without QMP, which may hang.
        with contextlib.suppress(CommandFailed):
            text.append(limits.threads(pair.lab, f"$(cat {side.pidfile})"))
        try:
            side.qmp.settimeout(10)
            for command in "query-status", "query-migrate":
                text.append(f"  {command}: {json.dumps(side.qmp.cmd(command))}")
        except Exception as e:
            text.append(f"  QMP does not answer: {e!r}")
    return "\n".join(text)


class Failures:
    """The failures of one migration of a pair; note: a function that is called with a note of each action; locked: the
    guest has a disk with an image lock; stop: the side on which the guest is stopped, before or after the switch."""

    def __init__(self, pair: BasePair[Any], note: Callable[[str], None] = lambda text: None, locked: bool = False,
                 stop: str | None = None) -> None:
        self.pair = pair
        self.note = note
        self.locked = locked
        self.stop = stop
        self.stopped = False            # the guest is stopped
        self.killed: BaseSide | None = None
        self.recoveries = 0
        self.said: str | None = None    # the survivor's message about a guest that is lost

    # State

    def ask(self, side: BaseSide, command: str = "query-migrate") -> Any:
        """None if the QEMU has exited."""
        try:
            return side.cmd(command)
        except (QMPError, EOFError, OSError, AssertionError) as e:
            if isinstance(e, TimeoutError):
                raise Hang(f"{command} on the {side.name} has not been answered") from None
            end = time.monotonic() + 5
            while side.job.running:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
            return None

    def status(self, side: BaseSide) -> str:
        if side is self.killed:
            return KILLED
        info = self.ask(side)
        return "exited" if info is None else str(info.get("status", "none"))

    def statuses(self) -> tuple[str, str]:
        return self.status(self.pair.source), self.status(self.pair.destination)

    def run_state(self, side: BaseSide) -> str:
        """The state of the guest on a side; empty if the QEMU has exited."""
        info = self.ask(side, "query-status") if side is not self.killed else None
        return str(info["status"]) if info else ""

    def runs(self, side: BaseSide) -> bool:
        return self.run_state(side) == "running"

    def progress(self) -> object:
        """A value that changes as long as the migration or the guest proceeds."""
        sides = [side for side in self.pair.sides if side is not self.killed]
        # Linux reports all the time.
        consoles = [side.console for side in sides if isinstance(side, Side)]
        sizes = self.pair.lab.run(f"wc -c /dev/null {' '.join(consoles)}").output
        infos = [self.ask(side) or {} for side in sides]
        moving = [(info.get("status"), info.get("ram", {}).get("transferred"),
                   *[(info.get("postcopy-faults") or {}).get(k) for k in ("requests", "awaited", "wakes-saved")])
                  for info in infos]
        return sizes, moving

    def until(self, condition: Callable[[], Seen | Literal[False] | None], what: str) -> Seen:
        """Like pair.until, without a limit as long as progress() changes."""
        last: object = None
        since = time.monotonic()
        while not (result := condition()):
            if (now := self.progress()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > HANG_S:
                raise Hang(f"nothing has moved for {HANG_S} s; waiting for: {what}")
            time.sleep(0.1)
        return result

    def settled(self) -> tuple[str, str]:
        """Wait until nothing changes by itself any more; returns the statuses."""
        def lasting() -> tuple[str, str] | None:
            s, d = self.statuses()
            # A destination whose source was cancelled or failed before the migration reached it
            last = d in LASTING or (s in ("failed", "cancelled") and d in ("none", "setup"))
            return (s, d) if s in LASTING and last else None
        return self.until(lasting, "an end on both sides")

    def until_reached(self, wire: Wire) -> None:
        assert isinstance(wire, PhaseWire), "this phase needs a PhaseWire"
        self.until(wire.reached.is_set, f"phase {wire.phase}")

    # Actions

    def act(self, action: str | None, wire: Wire, under_way_lost: bool = False) -> None:
        pair = self.pair
        if action == "cancel":
            pair.source.cmd("migrate_cancel")
        elif action == "pause":
            # The migration may have completed since.
            with contextlib.suppress(ExecuteError):
                pair.source.cmd("migrate-pause")
            wire.cut()
        elif action == "cut":
            if isinstance(wire, PhaseWire) and wire.mute:
                wire.go()
                self.until(lambda: self.run_state(pair.destination) != "inmigrate", "the guest has come")
            wire.cut()
        else:
            side = pair.source if action == "kill-source" else pair.destination
            self.killed = side
            side.signal("KILL")
            if under_way_lost and action == "kill-source":
                wire.cut()
        if isinstance(wire, PhaseWire):
            wire.go()

    def recover(self) -> Wire:
        """Recover, as both sides are paused."""
        wire = self.pair.wire(self.pair.listen("migrate-recover"))
        self.pair.source.cmd("migrate", uri=wire.uri, resume=True)
        self.until(lambda: all(s in ("postcopy-active", "completed") for s in self.statuses()), "recovery")
        self.recoveries += 1
        self.note("recovered")
        return wire

    def stop_and_go_on(self) -> None:
        """Stop and continue the guest if it runs on the destination."""
        side = self.pair.destination
        if self.stop != "destination" or not self.runs(side):
            return
        try:
            side.cmd("stop")
        except ExecuteError as e:
            assert "cannot stop before" in str(e), str(e)
            self.note("stop refused")
            return
        assert self.run_state(side) == "paused"
        side.cmd("cont")
        self.note("stopped and continued")

    def goes_on(self, side: BaseSide) -> None:
        """The guest resumes on this side, or is still stopped there and is continued."""
        if self.stopped:
            self.until(lambda: self.run_state(side) == "paused", f"the guest is stopped on the {side.name}")
            side.cmd("cont")
            self.stopped = False
            self.note(f"continued on the {side.name}")
        self.until(lambda: self.runs(side), f"the guest resumes on the {side.name}")

    # The end

    def assert_one_runs(self) -> None:
        assert sum(self.runs(side) for side in self.pair.sides) < 2, "the guest runs on both sides"

    def assert_source_stays_out(self) -> None:
        """A guest that runs on the destination cannot be resumed on the source, whatever the source has received."""
        if not self.runs(self.pair.destination):
            return
        words: list[dict[str, bool]] = [{}, {"destination_dead": True}]
        for arguments in words[:1 + self.locked]:
            try:
                self.pair.source.cmd("migrate_cancel", **arguments)
            except ExecuteError as e:
                self.note(f"migrate_cancel: {str(e)[:60]}")
            else:
                raise AssertionError(f"the source takes back a guest that the destination runs: {arguments}")
        assert self.status(self.pair.source) == "postcopy-paused"
        self.assert_one_runs()

    def assert_way_back(self, side: BaseSide) -> str:
        """The message of a paused side names the command."""
        said = str(self.ask(side).get("error-desc"))
        assert "migrate-recover on the destination" in said, f"the {side.name} is paused, and says: {said}"
        return said

    def ended(self) -> Ended | None:
        """Wait for settled(); returns how the migration has ended, or None if it is to be recovered."""
        pair = self.pair
        s, d = self.settled()
        self.note(f"source {s}, destination {d}")
        self.assert_one_runs()
        if d == "completed":
            self.goes_on(pair.destination)
            self.until(pair.destination.checked, "the guest's check of its memory")
            assert s in ("completed", "postcopy-paused", KILLED), f"the source says {s} of what has completed"
            return Ended.DESTINATION
        left = s == "postcopy-paused" and d in ("exited", KILLED)
        if s in ("failed", "cancelled") or (left and self.returned()):
            # The status changes before the guest resumes
            self.goes_on(pair.source)
            self.check_by_another()
            return Ended.SOURCE
        if (s, d) == ("postcopy-paused", "postcopy-paused"):
            for side in pair.sides:
                self.assert_way_back(side)
            self.assert_source_stays_out()
            self.stop_and_go_on()
            return None
        if self.killed is pair.destination:
            if s == "completed":
                return Ended.WITH_DESTINATION
            return self.named(pair.source, s)
        if self.killed is pair.source:
            if d == "exited" and not pair.destination.reported():
                self.said = output(pair.destination)
                assert self.said != "nothing", "the destination has ended without a word"
                return Ended.WITH_SOURCE
            return self.named(pair.destination, d)
        raise AssertionError(f"the guest is nowhere: source {s}, destination {d}")

    def returned(self) -> bool:
        """The guest resumes on the source, unless the destination has reported that it may run the guest."""
        source = self.pair.source
        try:
            source.cmd("migrate_cancel", destination_dead=True)
        except ExecuteError as e:
            assert str(e) == "Postcopy migration in progress, cannot cancel.", str(e)
            return False
        self.until(lambda: self.status(source) == "cancelled", "the migration is cancelled")
        self.note("cancelled")
        return True

    def named(self, side: BaseSide, status: str) -> Ended:
        assert status == "postcopy-paused", f"the {side.name}, which is left with a part of the guest, says {status}"
        self.said = f"{status}: {self.assert_way_back(side)}"
        side.cmd("quit")
        assert side.job.wait(20).rc == 0
        return Ended.SPLIT

    def check_by_another(self, bandwidth: int = 128 * MIB,
                         meanwhile: Callable[[], None] = lambda: None) -> None:
        """Migrate the guest, which has stayed on the source, to another destination, where it checks its memory."""
        pair = self.pair
        pair.destination.end()
        pair.destination = pair.sides[1] = pair.launch(pair.lab, pair.plans[1])
        self.killed = None
        pair.destination.connect()
        for side in pair.sides:
            side.set_capabilities(*pair.capabilities, "multifd", state=False)
        pair.source.cmd("migrate-set-parameters", max_bandwidth=bandwidth, downtime_limit=2000)
        pair.source.cmd("migrate", uri=pair.listen())
        meanwhile()
        self.until(lambda: self.statuses() == ("completed", "completed"), "the migration to another destination")
        self.until(pair.destination.checked, "the guest's check of its memory")

    # The whole migration

    def carry_through(self, wire: Wire, troubles: Iterable[tuple[str, float]], phase: str | None, action: str | None,
                      delay_s: float, under_way_lost: bool, meanwhile: Callable[[], None]) -> Ended:
        """Carry a migration that was started through that wire to its end.

        troubles: (pause or cut, seconds after the guest has run on), each followed by a recovery; then comes the
        fault at the phase, if one is given; under_way_lost: data in flight are lost with a killed source.
        meanwhile: called when the guest has moved."""
        pair = self.pair

        def fault() -> Ended:
            time.sleep(delay_s)
            self.act(action, wire, under_way_lost)
            return self.recovered_to_the_end()

        if self.stop == "source":
            pair.source.cmd("stop")
            self.stopped = True
        if phase == "precopy":
            return fault()
        pair.source.cmd("migrate-start-postcopy")
        if phase in ("switch", "listen"):
            self.until_reached(wire)
            return fault()

        if self.stopped:
            self.goes_on(pair.destination)
        self.until(pair.destination.reported, "the guest runs on the destination")
        self.stop_and_go_on()
        meanwhile()
        for trouble, after_s in troubles:
            time.sleep(after_s)
            if set(self.statuses()) != {"postcopy-active"}:
                break
            self.act(trouble, wire)
            if self.settled() != ("postcopy-paused", "postcopy-paused"):
                return self.recovered_to_the_end()
            wire = self.recover()
        if not phase:
            return self.recovered_to_the_end()
        if phase != "postcopy":
            pair.fast()
            self.until_reached(wire)
        return fault()

    def recovered_to_the_end(self) -> Ended:
        while not (end := self.ended()):
            self.recover()
            # There are no more failures.
            self.pair.fast()
        return end
