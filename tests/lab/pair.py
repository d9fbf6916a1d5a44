# SPDX-License-Identifier: GPL-2.0-or-later
"""Two QEMUs in the lab, and the migration of a guest from one to the other.

    with Pair(lab, pattern="shared") as pair:
        pair.postcopy()
        pair.finish()
        assert pair.faults()["exits"] > 0

If the body fails, all output of the two QEMUs and the guest is kept, and the failure says where.
"""
import contextlib
import itertools
import logging
import re
import shlex
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from qemu.qmp import ConnectError, QMPError, StateError
from qemu.qmp.legacy import QEMUMonitorProtocol

from tests.lab import guest
from tests.lab.backends import memory
from tests.lab.host import Place
from tests.lab.lab import CommandFailed, LabError
from tests.lab.paths import BUILD, PATIENCE, TESTED
from tests.lab.proxy import Wire
from tests.lab.sanitizer import ENVIRONMENT
from tests.lab.text import search

# Builds of QEMU, for the lab's architecture
FORK = TESTED
STOCK = "stock"
# The fork with points at which its threads can be held or fail: Side.inject. Sanitizers have them, too.
INJECT = "inject" if FORK == "fork" else FORK

QMP_PORT = {"source": 4001, "destination": 4002}
FIRST_MIGRATION_PORT = 4010
# Words for a source
NO_WINDOW = ("-global", "migration.x-postcopy-window=off")
NO_FIRST = ("-global", "migration.x-postcopy-first=off")
MIB = 1 << 20

TRACE = ("kvm_set_user_memory", "kvm_exit_on_missing*", "kvm_async_pf_*", "kvm_arm_async_pf_*", "kvm_guest_time_*",
         "kvm_arm_guest_time_*", "guest_time_*", "vmclock_update",
         "postcopy_start", "postcopy_discard_send_finish", "postcopy_fault_*", "postcopy_async_*", "postcopy_along",
         "postcopy_mirror*", "postcopy_no_mirror", "postcopy_preempt_hit", "postcopy_receive_twice",
         "postcopy_not_received", "postcopy_request_shared_page", "vhost_user_postcopy_end_entry",
         "migration_rate_limit_post", "migration_completion_postcopy_end_after_complete", "peer_pong",
         "source_return_path_thread_pong", "loadvm_handle_cmd_packaged_received", "qemu_loadvm_state_section")


Seen = TypeVar("Seen")


def until(condition: Callable[[], Seen | Literal[False] | None], what: str, timeout: float = 60,
          pause: float = 0.1) -> Seen:
    """Wait until condition() is true, and return its result."""
    timeout *= PATIENCE
    end = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(pause)
    return result


def event_us(event: Mapping[str, Any]) -> int:
    """The time at which QEMU emitted the event, in microseconds since the epoch."""
    at = event["timestamp"]
    return int(at["seconds"] * 10**6 + at["microseconds"])


def listens(lab: Place, port: int) -> bool:
    return not lab.run(f"grep -qs ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6").rc


class Thread(NamedTuple):
    name: str
    where: str      # the function of the kernel in which it sleeps; "0" while it runs


def threads(place: Place, pid: int | str) -> list[Thread]:
    """The main thread is the first; none if the process has ended. pid: may be words of a shell, $(cat FILE)."""
    # Without a process for each file, which takes long in L1.
    output = place.run(f"p={pid}; cd /proc/$p/task && for t in $p *; do n= w=; read -r n <$t/comm; "
                       'read -r w <$t/wchan; echo "$t $w $n"; done 2>/dev/null').output
    by_id = dict(line.split(" ", 1) for line in output.splitlines() if line[:1].isdigit())
    return [Thread(name, where) for where, _, name in (text.partition(" ") for text in by_id.values())]


class Heard(logging.Handler):
    """The last messages of QMP."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: deque[str] = deque(maxlen=60)
        self.setFormatter(logging.Formatter("%(relativeCreated)d ms %(name)s %(message)s"))
        logger = logging.getLogger("qemu.qmp")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record)[:2000])


HEARD = Heard()


class Inject:
    """The points of migration/inject.h in one QEMU."""

    def __init__(self, lab: Place, directory: str) -> None:
        self.lab = lab
        self.directory = directory
        lab.run(f"rm -rf {directory}; mkdir {directory}", check=True)

    def arm(self, point: str) -> None:
        """Let the next thread that gets to the point be held there, or fail there."""
        self.lab.run(f"touch {self.directory}/{point}", check=True)

    def held(self, point: str) -> bool:
        """Whether a thread is held at the point."""
        return not self.lab.run(f"test -e {self.directory}/{point}.held").rc

    def passed(self, point: str) -> bool:
        """Whether a thread has got to the point since arm()."""
        return bool(self.lab.run(f"test -e {self.directory}/{point}").rc)

    def wait_held(self, point: str) -> None:
        until(lambda: self.held(point), f"a thread at the point {point}")

    def hold_next(self, point: str) -> None:
        """Release the thread, and hold the next one that gets to the point."""
        self.lab.run(f"touch {self.directory}/{point}; rm -f {self.directory}/{point}.held", check=True)
        self.wait_held(point)

    def release(self, point: str) -> None:
        """Release the thread, and hold no other one."""
        self.lab.run(f"rm -f {self.directory}/{point} {self.directory}/{point}.held", check=True)


class BaseSide(ABC):
    """One QEMU in the lab, with a guest in it."""

    def __init__(self, lab: Place, name: str, qemu: str, arguments: Sequence[str], options: dict[str, Any],
                 traced: bool = True, wrapper: Sequence[str] = ()) -> None:
        self.lab = lab
        self.name = name
        self.qemu = qemu
        self.console = f"{lab.tmp}/{name}.console"
        self.trace_log = f"{lab.tmp}/{name}.trace"
        self.logs = [self.console, self.trace_log]      # files to keep if a test fails
        self.pidfile = f"{lab.tmp}/{name}.pid"
        self.port = lab.port(QMP_PORT[name])
        self._qmp: QEMUMonitorProtocol | None = None
        self.inject = Inject(lab, f"{lab.tmp}/{name}.inject")
        lab.run(f"rm -f {self.console} {self.trace_log} {self.pidfile}")
        argv = [
            *wrapper, lab.qemu(qemu), *("-name", f"{name},debug-threads=on", *lab.qemu_words),
            *self.guest_arguments(options),
            *("-qmp", f"tcp:{lab.address}:{self.port},server=on,wait=off"),
            *("-pidfile", self.pidfile),
            *arguments,
        ]
        if traced and qemu in (FORK, INJECT):
            argv += [word for event in TRACE for word in ("-trace", event)] + ["-D", self.trace_log]
        self.job = lab.job(f"{ENVIRONMENT} QEMU_INJECT={self.inject.directory} exec " + shlex.join(argv))

    @abstractmethod
    def guest_arguments(self, options: dict[str, Any]) -> list[str]:
        """QEMU's arguments, without accelerator and monitor."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until the guest runs its load."""

    def reported(self) -> bool:
        """Whether the guest has reported here: on a destination, whether it has run here."""
        raise NotImplementedError

    def checked(self) -> bool:
        """Whether the guest has checked its memory here, which must be whole."""
        raise NotImplementedError

    @property
    def qmp(self) -> QEMUMonitorProtocol:
        assert self._qmp, f"QMP of the {self.name} is not connected"
        return self._qmp

    def connect(self) -> None:
        # L1's QEMU accepts connections before the QEMU in L1 does.
        until(lambda: not self.job.running or listens(self.lab, self.port), f"QMP of the {self.name}")
        self.check()
        self._qmp = QEMUMonitorProtocol(("127.0.0.1", self.lab.host_port(self.port)),
                                        nickname=f"{self.lab.name}-{self.name}")
        try:
            self.qmp.connect()
        except ConnectError:
            # QMP mistakes an event before the answer to qmp_capabilities for the answer.
            self.qmp.close()
            self.qmp.connect()
        self.qmp.settimeout(60)

    def check(self) -> None:
        if not self.job.running:
            result = self.job.wait()
            raise AssertionError(f"QEMU of the {self.name} has ended, status {result.rc}:\n{result.output}")

    def cmd(self, name: str, **arguments: object) -> Any:
        try:
            return self.qmp.cmd(name, **{k.replace("_", "-"): v for k, v in arguments.items()})
        except StateError:
            self.check()
            self.qmp.close()  # raises the error of the connection
            raise

    def set_capabilities(self, *names: str, state: bool = True) -> None:
        self.cmd("migrate-set-capabilities", capabilities=[{"capability": name, "state": state} for name in names])

    def cmd_out_of_band(self, name: str, **arguments: object) -> str:
        """Works even if QEMU's main thread is busy; returns the error, or an empty string."""
        answer = self.qmp.cmd_obj({"exec-oob": name, "arguments": arguments})
        return answer["error"]["desc"] if "error" in answer else ""

    def run_job(self, command: str, **arguments: object) -> str:
        """Run a command that is a job, to its end; returns its error, or an empty string."""
        self.cmd(command, job_id="job", **arguments)

        def ended() -> dict[str, Any] | None:
            [info] = self.cmd("query-jobs")
            return info if info["status"] == "concluded" else None
        error: str = until(ended, command).get("error", "")
        self.cmd("job-dismiss", id="job")
        return error

    def add_disk(self, size: int = 1 << 20) -> str:
        """Add an empty disk named "disk", for snapshots; returns its image."""
        image = f"{self.lab.tmp}/{self.name}.qcow2"
        file = {"driver": "file", "filename": image}
        for options in file | {"size": 0}, {"driver": "qcow2", "file": file, "size": size}:
            error = self.run_job("blockdev-create", options=options)
            assert not error, error
        self.cmd("blockdev-add", driver="qcow2", node_name="disk", file=file)
        return image

    def hmp(self, line: str) -> str:
        return str(self.cmd("human-monitor-command", command_line=line))

    def registers_of_all(self) -> int:
        """The number of vCPUs whose registers are reported."""
        return len(re.findall(r"\b(?:RIP|PC)=", self.hmp("info registers -a")))

    def status(self) -> Any:
        return self.cmd("query-migrate").get("status")

    def migration(self, *wanted: str) -> dict[str, Any]:
        """query-migrate, of a migration that has not failed, or whose status is as wanted."""
        self.check()
        info: dict[str, Any] = self.cmd("query-migrate")
        status = info.get("status")
        assert status in wanted or status not in ("failed", "cancelled", "postcopy-paused"), \
            f"migration {status} on the {self.name}: {info}"
        return info

    def wait_status(self, *wanted: str) -> str:
        def reached() -> str | None:
            status = self.migration(*wanted).get("status")
            assert status in wanted or status != "completed", \
                f"the {self.name} has completed, never {' or '.join(wanted)}"
            return status if status in wanted else None
        return until(reached, f"migration {' or '.join(wanted)} on the {self.name}")

    def trace(self) -> list[tuple[str, str]]:
        """The events of the trace in order: (name, text)."""
        names = "|".join(TRACE).replace("*", r"\w*")
        return re.findall(rf"\b({names}) (.*)", self.lab.run(f"cat {self.trace_log}").output)

    def threads(self) -> list[Thread]:
        return threads(self.lab, f"$(cat {self.pidfile})")

    def sleeps_in(self, function: str, *names: str) -> bool:
        """Whether all threads whose names begin so, or the main thread, sleep in a function of the kernel."""
        there = self.threads()
        wanted = [thread for thread in there if thread.name.startswith(names)] if names else there[:1]
        return len(wanted) >= max(1, len(names)) and all(function in thread.where for thread in wanted)

    def main_thread_waits(self) -> bool:
        """Whether the main thread waits in the kernel for a page."""
        return self.sleeps_in("handle_userfault")

    def cpu_seconds(self, thread: str = "") -> float:
        """The processor time of the whole QEMU, with threads that have ended, or of a thread of this name."""
        folder = f"/proc/$(cat {self.pidfile})"
        if thread:
            folder = f"$(dirname $(grep -lx {thread} {folder}/task/*/comm))"
        ticks = self.lab.run(f"cut -d ' ' -f 14,15 {folder}/stat", check=True).output
        return sum(map(int, ticks.split())) / 100

    def release_when_awaited(self, point: str) -> None:
        """Release the thread at the point as soon as the main thread waits for it."""
        self.lab.job(f"p=$(cat {self.pidfile}); "
                     "until grep -q futex /proc/$p/task/$p/wchan || ! test -d /proc/$p; do sleep 0.1; done; "
                     f"rm -f {self.inject.directory}/{point}.held")

    def has_open(self, what: str) -> bool:
        """Whether a file is open whose name contains this."""
        return what in self.lab.run(f"ls -l /proc/$(cat {self.pidfile})/fd", check=True).output

    def waiting_vcpus(self) -> set[int]:
        """vCPUs that wait for a page: in QEMU after an exit, or in the kernel's userfaultfd."""
        waiting = {}
        for name, text in self.trace():
            if name in ("postcopy_fault_exit", "postcopy_fault_exit_end"):
                waiting[int(search(r"^cpu (\d+)", text)[1])] = name == "postcopy_fault_exit"
        missing = {thread.name for thread in self.threads() if "handle_userfault" in thread.where}
        return {cpu for cpu, waits in waiting.items() if waits} | {
            int(search(r"\d+", name)[0]) for name in missing if name.startswith("CPU ")}

    def memory(self, address: int, size: int) -> bytes:
        path = f"{self.lab.tmp}/{self.name}.memory"
        self.cmd("pmemsave", val=address, size=size, filename=path)
        return self.lab.read_file(path)

    def wait_says(self, text: str) -> None:
        """Wait for QEMU's message, which is received some time after QEMU has written it."""
        until(lambda: text in self.job.output, f"the {self.name} says: {text}", timeout=30)

    def signal(self, name: str) -> None:
        self.lab.run(f"kill -{name} $(cat {self.pidfile})", check=True)

    def end(self) -> None:
        if self._qmp:
            with contextlib.suppress(QMPError, EOFError, OSError):
                self._qmp.close()
        self.job.kill()


def keep_logs(what: str, sides: Sequence[BaseSide], more: Mapping[str, bytes]) -> str:
    """Keep the logs of a test that has failed; returns their place."""
    if not sides:
        return "no QEMU was started"
    lab = sides[0].lab
    to = BUILD / "lab" / what / lab.name
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    files = {"qmp.log": "\n".join(HEARD.lines).encode() + b"\n", **more}
    for side in sides:
        files[f"{side.name}.output"] = f"$ {side.job.cmd}\n{side.job.output}".encode()
        for path in side.logs:
            with contextlib.suppress(CommandFailed, LabError, OSError):
                files[path.rsplit("/", 1)[1]] = side.lab.read_file(path)
    for name, data in files.items():
        (to / name).write_bytes(data)
    return f"logs of this test's QEMUs and guest: {to}; of the kernel: {lab.serial_log}"


class Side(BaseSide):
    """A QEMU with the payload of tests/guest."""

    def guest_arguments(self, options: dict[str, Any]) -> list[str]:
        return guest.arguments(self.name, self.console, **options, arch=self.lab.arch)

    def wait_ready(self) -> None:
        self.wait_event("ready")

    def report(self) -> guest.Report:
        report = guest.Report(self.lab.run(f"cat {self.console}").output)
        assert not report.error, f"the guest gave up on the {self.name}: {report.error}"
        return report

    def reported(self) -> bool:
        return bool(self.report().events)

    def checked(self) -> bool:
        self.check()
        report = self.report()
        end = report.first("end")
        assert not end or report.intact, f"memory is damaged: {report.all('bad')}, {end}"
        return bool(end)

    def wait_event(self, event: str) -> guest.Event:
        def come() -> guest.Event | None:
            self.check()
            return self.report().first(event)
        return until(come, f"the guest's event '{event}' on the {self.name}")


@dataclass
class Plan:
    name: str
    qemu: str
    arguments: list[str]
    wrapper: Sequence[str] = ()


# A value of postcopy-fetch-channels
Fetch = int | str
AnySide = TypeVar("AnySide", bound=BaseSide)
AnyWire = TypeVar("AnyWire", bound=Wire)


class BasePair(ABC, Generic[AnySide]):
    """exits: postcopy-fault-exits of the destination; backend: as for backends.memory();
    capabilities: beside postcopy-ram, or None for pre-copy only; both_options, source_options,
    destination_options: more words of the command lines; tls: directory in L1 with keys.psk;
    traced: write a trace, for Side.trace(); wrapper, source_wrapper: words before a side's command;
    destination_lab: another L1 for it; fetch: postcopy-fetch-channels of both sides, or of each, if the QEMU has it;
    other options: as for guest.arguments()."""

    side_type: type[AnySide]

    def __init__(self, lab: Place, exits: str | None = None, source: str = FORK, destination: str = FORK,
                 machine: str | None = None, memory_mb: int | str = 32, backend: str = "anonymous",
                 capabilities: Sequence[str] | None = ("postcopy-preempt",), both_options: Sequence[str] = (),
                 source_options: Sequence[str] = (), destination_options: Sequence[str] = (), cpus: int = 4,
                 tls: str | None = None, traced: bool = True, wrapper: Sequence[str] = (),
                 source_wrapper: Sequence[str] = (), destination_lab: Place | None = None,
                 fetch: Fetch | tuple[Fetch, Fetch] = 0, **options: Any) -> None:
        self.lab = lab
        self.destination_lab = destination_lab or lab
        self.cpus = cpus
        self.exits = exits
        self.tls = tls
        self.fetch = fetch if isinstance(fetch, tuple) else (fetch, fetch)
        self.capabilities = () if capabilities is None else ("postcopy-ram", *capabilities)
        self.ports = itertools.count(FIRST_MIGRATION_PORT)
        # So slow that nearly all memory is left for post-copy; a page takes half a second at most.
        self.precopy_bandwidth = 4 * MIB if "huge" in backend else 64 << 10
        arguments = [*memory(backend, memory_mb), *both_options]
        options |= {"machine": machine, "memory_mb": memory_mb, "cpus": cpus}
        self.options = options
        self.traced = traced
        self.plans = [Plan("source", source, [*arguments, *source_options], source_wrapper),
                      Plan("destination", destination, [*arguments, *destination_options, "-incoming", "defer"],
                           wrapper)]
        if tls:
            for plan, endpoint in zip(self.plans, ("client", "server"), strict=True):
                plan.arguments += ["-object", f"tls-creds-psk,id=tls,endpoint={endpoint},dir={tls}"]
        self.sides: list[AnySide] = []
        self.wires: list[Wire] = []

    def launch(self, lab: Place, plan: Plan) -> AnySide:
        return self.side_type(lab, plan.name, plan.qemu, plan.arguments, self.options, self.traced, plan.wrapper)

    def __enter__(self) -> Self:
        try:
            for lab, plan in zip((self.lab, self.destination_lab), self.plans, strict=True):
                self.sides.append(self.launch(lab, plan))
            self.source, self.destination = self.sides
            for side in self.sides:
                side.connect()
                side.set_capabilities(*self.capabilities)
                if self.tls:
                    side.cmd("migrate-set-parameters", tls_creds="tls")
            for side, channels in zip(self.sides, self.fetch, strict=True):
                if channels != "auto" and side.qemu in (FORK, INJECT):
                    side.cmd("migrate-set-parameters", postcopy_fetch_channels=channels)
            if self.exits:
                self.destination.cmd("migrate-set-parameters", postcopy_fault_exits=self.exits)
        except BaseException as e:
            self.__exit__(type(e), e, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for side in self.sides:
            side.end()
        for wire in self.wires:
            wire.cut()
        if error:
            error.add_note(keep_logs("postcopy", self.sides, self.more_logs()))

    def next(self) -> None:
        """Make the destination the source of another migration."""
        end, self.source = self.source, self.destination
        end.end()
        plan = self.plans[0 if end.name == "source" else 1]
        self.destination = self.launch(self.lab, replace(plan, arguments=self.plans[1].arguments, wrapper=()))
        self.sides = [self.source, self.destination]
        self.destination.connect()
        for side in self.sides:
            side.set_capabilities(*self.capabilities)
        if self.exits:
            self.destination.cmd("migrate-set-parameters", postcopy_fault_exits=self.exits)

    def more_logs(self) -> dict[str, bytes]:
        return {f"wire{n}.stream": bytes(wire.kept) for n, wire in enumerate(self.wires) if wire.kept}

    def listen(self, command: str = "migrate-incoming") -> str:
        """Let the destination listen; returns the URI for the source."""
        port = self.port()
        self.destination.cmd(command, uri=f"tcp:{self.destination_lab.address}:{port}")
        return self.uri_of(port)

    def port(self) -> int:
        """Another port of the destination's place."""
        return self.destination_lab.port(next(self.ports))

    def uri_of(self, port: int) -> str:
        """The source's URI of the destination that listens at a port."""
        if self.destination_lab is not self.lab:
            return f"tcp:{self.lab.host}:{self.destination_lab.host_port(port)}"
        return f"tcp:127.0.0.1:{port}"

    def host_port_of(self, uri: str) -> int:
        """The host's port of the destination that listens at uri."""
        return self.lab.host_port(int(uri.rsplit(":", 1)[1]))

    def uri_of_server(self, server: socket.socket) -> str:
        """The source's URI of this process's server."""
        return f"tcp:{self.lab.host}:{server.getsockname()[1]}"

    def wire(self, uri: str, **options: Any) -> Wire:
        """Put a Wire before the destination that listens at uri."""
        return self.wire_of(Wire, uri, **options)

    def wire_of(self, kind: type[AnyWire], uri: str, **options: Any) -> AnyWire:
        """Like wire(), of another class."""
        wire = kind(self.host_port_of(uri), **options)
        wire.uri = self.uri_of_server(wire.listening)
        self.wires.append(wire)
        return wire

    def pause(self) -> None:
        self.source.cmd("migrate-pause")
        self.wait_paused()

    def wait_paused(self) -> None:
        for side in self.sides:
            side.wait_status("postcopy-paused")

    def recover(self) -> None:
        """Recover a migration that is paused on both sides."""
        self.source.cmd("migrate", uri=self.listen("migrate-recover"), resume=True)
        self.wait_recovered()

    def wait_recovered(self) -> None:
        until(lambda: all(side.status() in ("postcopy-active", "completed") for side in self.sides),
              "recovery")

    def until_quiet(self) -> None:
        """Wait until data that a stopped source has sent before are no longer in flight."""
        def quiet() -> bool:
            before = self.faults()["copied-bytes"]
            time.sleep(0.5)
            return bool(self.faults()["copied-bytes"] == before)
        until(quiet, "nothing comes")

    def until_all_wait(self) -> Any:
        """Wait until each vCPU of the destination waits for a missing page. Data that a stopped source has sent before
        may still be in flight. vCPUs that share all pages meet every so often: there, a vCPU waits for the others, and
        misses no page."""
        def all_wait() -> Any:
            before, waiting = self.faults(), self.destination.waiting_vcpus()
            all_miss = waiting == set(range(self.cpus))
            if not all_miss and (self.options.get("pattern") != "shared" or not waiting):
                return None
            time.sleep(0.5 if all_miss else 3)
            after = self.faults()
            return all(after[k] == before[k] for k in ("exits", "copied-bytes")) and after
        return until(all_wait, "all vCPUs wait for pages")

    def until_stuck(self) -> None:
        """Wait until the source cannot send any more, though it has more to send."""
        def stuck() -> bool:
            before = self.source.cmd("query-migrate")["ram"]
            time.sleep(1)
            after = self.source.cmd("query-migrate")["ram"]
            return bool(before["transferred"] == after["transferred"] and after["remaining"])
        until(stuck, "the source cannot send any more")

    def use_multifd(self, channels: int = 2) -> None:
        for side in self.sides:
            side.set_capabilities("multifd")
            side.cmd("migrate-set-parameters", multifd_channels=channels)

    def fetch_channels(self) -> list[int]:
        """The number of channels that each side uses."""
        return [len(side.cmd("query-migrate").get("postcopy-fetch", {"channels": ()})["channels"])
                for side in self.sides]

    def start(self, uri: str | None = None, bandwidth: int | None = None) -> None:
        """Start pre-copy."""
        uri = uri or self.listen()
        self.source.wait_ready()
        self.source.cmd("migrate-set-parameters", max_bandwidth=bandwidth or self.precopy_bandwidth,
                        downtime_limit=1)
        self.source.cmd("migrate", uri=uri)
        # A small guest may have moved at once
        self.source.wait_status("active", "device", "completed")

    def precopy(self) -> None:
        """Migrate by pre-copy only."""
        self.start(bandwidth=64 * MIB)
        # Any speed at which the guest writes is right
        self.source.cmd("migrate-set-parameters", downtime_limit=20000)

    def postcopy(self, uri: str | None = None, bandwidth: int = MIB) -> None:
        """Migrate to the point where the guest runs on the destination.

        bandwidth: of the background, whose pages were not requested.
        """
        self.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=bandwidth)
        self.start(uri)
        self.source.cmd("migrate-start-postcopy")
        # The default: the last pages are sent in another way
        self.source.cmd("migrate-set-parameters", downtime_limit=300)
        # With a wrong stream, it may have paused already.
        self.source.wait_status("postcopy-active", "postcopy-paused", "completed")

    def fast(self) -> None:
        """Let the source send all that is left, without a limit."""
        self.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)

    def wait_completed(self) -> None:
        for side in self.sides:
            side.wait_status("completed")

    def finish(self) -> None:
        """Wait for the end of the migration, and for the guest's check of its memory."""
        self.wait_completed()
        self.check_memory()
        lost = [text for name, text in self.destination.trace() if name == "postcopy_not_received"]
        assert not lost, f"pages that no side has any more: {lost}"

    def finish_fast(self) -> None:
        self.fast()
        self.finish()

    def recover_and_finish(self) -> None:
        self.recover()
        self.finish_fast()

    def check_memory(self) -> None:
        """Wait until the guest on the destination has checked its memory, which must be whole."""
        until(self.destination.checked, "the guest has checked its memory")

    def faults(self) -> Any:
        return self.destination.cmd("query-migrate").get("postcopy-faults")

    def until_faults(self) -> None:
        """Wait until the destination counts faults. Its part of post-copy begins after the source's."""
        until(self.faults, "the destination's part of post-copy")

    def until_requests(self, before: int) -> None:
        """Wait until the destination has requested more pages than before."""
        until(lambda: self.faults()["requests"] > before, "more page requests")


class Pair(BasePair[Side]):
    """A pair with the payload of tests/guest."""

    side_type = Side

    def midst(self, uri: str | None = None, bandwidth: int = MIB) -> None:
        """Like postcopy(), to the point where the guest touches its memory."""
        self.postcopy(uri, bandwidth)
        self.destination.wait_event("timing")

    def finish(self, limited: bool = False) -> None:
        """limited: the background keeps its limit to the end, and not only until the guest has touched its memory."""
        if not limited:
            self.destination.wait_event("end")
            self.fast()
        super().finish()
