# SPDX-License-Identifier: GPL-2.0-or-later
"""The lab: a first-level machine (L1) whose KVM exits for missing memory.

    with Lab() as lab:
        print(lab.run("dmesg | tail -n 3").output)

The checkout's programs are below /lab, the working directory of all commands:
build/fork/qemu-system-x86_64, ... See docs/devel/testing.md.
"""
import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.lab import initramfs, kvm_interface
from tests.lab.paths import BUILD, FORK, LAB, PATIENCE, qemu
from tests.lab.text import search

AGENT_PORT = 1
READY = "lab: ready"
TIMEOUT_S = 60 * PATIENCE      # for a command


@dataclass
class Machine:
    """L1 by architecture: words of its QEMU's command line, and of its Linux's."""

    qemu: Path | str
    machine: str
    cpu: str
    linux: tuple[str, ...]


# A word of Linux's command line, instead of ticks of 10 ms: netem needs it.
HIGHRES = "highres=on"

MACHINES = {
    "x86_64": Machine(
        qemu=FORK / "qemu-system-x86_64",
        machine="q35",
        cpu="max,tsc-scale=off",
        # An emulated timer is slow to set, on a busy host even more so: a tick is better. Page tables of five levels
        # cost time in emulation. Without another timer, Linux uses the TSC frequency of tsc_khz(), and does not measure
        # it again. Nor does Linux test the tick: on a busy host it may get too few, and would panic.
        linux=("console=ttyS0", "tsc=reliable", "hpet=disable", "pmtmr=0", "highres=off", "no5lvl", "no_timer_check"),
    ),
    "aarch64": Machine(
        qemu="qemu-system-aarch64",
        machine="virt,virtualization=on,gic-version=3",
        # "max" of QEMU 10.0 has CNTPOFF_EL2, which QEMU's emulation ignores.
        cpu="neoverse-n1",
        linux=("console=ttyAMA0",),
    ),
}
# Linux copies by "rep movsb" on a processor with fast strings. By icount, that takes an instruction per byte, 4 us a
# page, unlike any real processor: without the flags, Linux copies by words.
NO_REP_MOVSB = ",-erms,-fsrm"
# Errors in the kernel's log.
COMPLAINTS = re.compile(r"WARNING:|BUG:|Oops|Call Trace|Kernel panic|general protection fault")


@functools.cache
def tsc_khz() -> int:
    """L1's TSC is the host's. On a busy host, L1's Linux measures its frequency with an error of
    hundreds of ppm, and if it corrects that later, KVM refuses to run guests at the old one."""
    return int(initramfs.tool(initramfs.programs()["tsc-khz"]))


class LabError(Exception):
    """L1 did not boot, or is gone, or its kernel wrote a warning or worse."""


@dataclass
class Result:
    rc: int | None  # exit status, 128 + N after signal N; None if it was killed by us
    output: str     # standard output and error


class CommandFailed(Exception):
    def __init__(self, message: str, result: Result) -> None:
        super().__init__(f"{message}; its output:\n{result.output}")
        self.result = result


class Running(ABC):
    """A command of a place. It may be left running, waited for, or killed."""

    cmd: str

    @property
    @abstractmethod
    def raw(self) -> bytes:
        """The output so far, which any thread may read."""

    @property
    def output(self) -> str:
        return self.raw.decode(errors="replace")

    @property
    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def _status(self, timeout: float) -> int | None:
        """Wait for the command; returns Result.rc, or raises TimeoutExpired."""

    def wait(self, timeout: float = TIMEOUT_S, check: bool = False) -> Result:
        """Wait for the command. CommandFailed if it takes longer, with the output so far; with check, also if its exit
        status is not 0."""
        try:
            result = Result(self._status(timeout), self.output)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CommandFailed(f"no end after {timeout} s: {self.cmd}", Result(None, self.output)) from None
        except KeyboardInterrupt:
            self.kill()
            raise
        if check and result.rc:
            raise CommandFailed(f"exit status {result.rc}: {self.cmd}", result)
        return result


class Job(Running):
    def __init__(self, lab: "Lab", cmd: str, stdin: bytes, on_output: Callable[[bytes], None] | None) -> None:
        self.lab = lab
        self.cmd = cmd
        self._on_output = on_output
        self._rc: int | None = None
        self._killed = False
        self._data = bytearray()
        self._done = threading.Event()
        self._sock = socket.create_connection(("127.0.0.1", lab.host_port(AGENT_PORT)))
        data = cmd.encode()
        self._sock.sendall(struct.pack(">I", len(data)) + data + struct.pack(">I", len(stdin)) + stdin)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        # The data end early if the job is killed, or L1 is gone: wait() reports it.
        with contextlib.suppress(OSError), self._sock, self._sock.makefile("rb") as stream:
            while len(head := stream.read(5)) == 5:
                kind, length = struct.unpack(">cI", head)
                data = stream.read(length)
                if kind == b"X":
                    self._rc = int(data) if len(data) == length else None
                    break
                self._data += data
                if self._on_output:
                    self._on_output(data)
        self._done.set()

    @property
    def raw(self) -> bytes:
        return bytes(self._data)

    @property
    def running(self) -> bool:
        return not self._done.is_set()

    def kill(self) -> None:
        """Kill the command's session, and wait for its end; processes that have left it stay."""
        self._killed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            if not self._done.wait(10):  # L1 hangs
                self._sock.shutdown(socket.SHUT_RDWR)
        self._done.wait()

    def _status(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        while not self._done.wait(max(0, min(1, end - time.monotonic()))) and self.lab.alive:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.cmd, timeout)
        if self._rc is None and not self._killed:
            self.lab.died(f"while it ran: {self.cmd}")
        return self._rc


# The labs of this process
RUNNING: "set[Lab]" = set()


class Lab:
    """L1 as a context manager; Lab(shell=True) gives the terminal to a shell in L1.

    name: the serial log is build/lab/NAME/serial.log. hugepages: of 2 MiB, mounted at
    /dev/hugepages. extra: more files of the checkout below /lab, and programs of the
    host. append: words for Linux's command line. shared: a file of the host that is a PCI device's memory
    in all labs that have it. cpu: of L1's QEMU, if not as in MACHINES; only "max" lets x86's KVM scale TSCs.
    icount: L1's time is the number of instructions that its processors have executed, 10^9 a second together,
    so that no figure depends on the host's speed; while all sleep, it is the host's time.
    """

    # Words for QEMUs in L1
    qemu_words: tuple[str, ...] = ("-accel", "kvm", "-cpu", "max")
    address = "0.0.0.0"     # of servers to which host_port() leads
    host = "10.0.2.2"       # of the driver's own servers
    tmp = "/tmp"
    exit_on_missing = True      # L1's KVM has it
    # A faster touch has not waited for another process; on huge pages that KVM has
    # mapped, it is no fault at all.
    wait_us = 100

    def __init__(self, name: str = "lab", cpus: int = 2, memory_mb: int = 2048, hugepages: int = 0,
                 extra: Iterable[str] = (), append: str = "", shell: bool = False, boot_timeout: float = 120,
                 shared: Path | None = None, cpu: str | None = None, arch: str = "x86_64",
                 icount: bool = False) -> None:
        self.name = name
        self.cpus = cpus
        self.memory_mb = memory_mb
        self.hugepages = hugepages
        self.extra = list(extra)
        self.append = append
        self.shell = shell
        self.boot_timeout = 5 * boot_timeout if icount else boot_timeout
        self.shared = shared
        self.arch = arch
        self.icount = icount
        if icount:
            self.wait_us = 20
        self.machine = MACHINES[arch]
        self.cpu = cpu or self.machine.cpu + (NO_REP_MOVSB if icount and arch == "x86_64" else "")
        self.process: subprocess.Popen[bytes] | None = None
        self.dir: Path | None = None
        self._lock = threading.RLock()

    # Start and end

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.kill()
        if not error:
            self.check_kernel()

    def _take_dir(self) -> Path:
        """build/lab/NAME, or NAME-2, ... while others of that name run."""
        for n in itertools.count(1):
            taken = BUILD / "lab" / (self.name if n == 1 else f"{self.name}-{n}")
            taken.mkdir(parents=True, exist_ok=True)
            self._dir_lock = open(taken / ".lock", "w")     # noqa: SIM115 - open as long as it is held
            try:
                fcntl.flock(self._dir_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                self._dir_lock.close()
        return taken

    def start(self) -> None:
        self._ports: dict[int, int] = {}
        self._checked = 0  # lines of the log
        if self.dir is None:
            self.dir = self._take_dir()
        self.serial_log = self.dir / "serial.log"
        self.serial_log.unlink(missing_ok=True)
        kernel = subprocess.run([LAB / "kernel" / "build", self.arch], stdout=subprocess.PIPE, text=True)
        if kernel.returncode:
            raise LabError("the lab's kernel could not be built (see above)")
        archive = self.dir / "initramfs.cpio"
        initramfs.build(archive, self.extra, self.arch)

        # panic=-1 makes the machine exit.
        append = [*self.machine.linux, "panic=-1", f"hugepages={self.hugepages}",
                  *(f"kvm.{name}=0" for name in kvm_interface.ALL if name != kvm_interface.chosen())]
        if self.icount:
            append += [HIGHRES]     # Timers only cost instructions.
        if self.arch == "x86_64":
            append += [f"tsc_early_khz={1_000_000 if self.icount else tsc_khz()}"]
        serial = f"file,path={self.serial_log}"
        if self.shell:
            size = os.get_terminal_size()
            append += ["quiet", f"lab.shell={size.lines}x{size.columns}"]
            serial = f"stdio,signal=off,logfile={self.serial_log}"
        ours, theirs = socket.socketpair()
        argv: list[str | Path] = [
            # L1 dies with this process.
            *("setpriv", "--pdeathsig", "KILL"), self.machine.qemu,
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-name", "lab", "-machine", self.machine.machine),
            *(("-accel", "tcg", "-icount", "shift=0") if self.icount else ("-accel", "tcg,thread=multi")),
            *("-cpu", self.cpu),
            *("-smp", str(self.cpus), "-m", str(self.memory_mb)),
            *("-kernel", kernel.stdout.strip(), "-initrd", archive),
            *("-append", " ".join(append + self.append.split())),
            *("-chardev", f"{serial},id=serial", "-serial", "chardev:serial"),
            *("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="),
            *("-chardev", f"socket,id=qmp,fd={theirs.fileno()}", "-mon", "qmp,mode=control"),
        ]
        if self.shared:
            argv += ["-object", f"memory-backend-file,id=shared,share=on,size=1M,mem-path={self.shared}",
                     "-device", "ivshmem-plain,memdev=shared"]
        with theirs, open(self.dir / "qemu.log", "wb") as log:
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stderr=log,
                                            stdin=None if self.shell else subprocess.DEVNULL)
        RUNNING.add(self)
        self._qmp_sock = ours
        self._qmp_file = ours.makefile("r")
        try:
            self._qmp("qmp_capabilities")
        except (OSError, LabError):
            self.process.kill()
            self.died("at once")
        if self.shell:
            return  # the user sees it
        end = time.monotonic() + self.boot_timeout
        while READY not in self.log():
            if not self.alive:
                self.died("while it booted")
            if time.monotonic() > end:
                # What the processors execute, for System.map
                where = re.findall(r"^(CPU#\d+|RIP=\S+|.*\bPC=\w+|.*HLT=\d)", self._hmp("info registers -a"), re.M)
                raise LabError(f"L1 did not boot in {self.boot_timeout} s; {', '.join(where)}; {self._tail()}")
            time.sleep(0.05)
        archive.unlink()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """End L1 at once. There is nothing in it to save."""
        RUNNING.discard(self)
        if self.process:
            self.process.kill()
            self.process.wait()
        if self.dir:
            (self.dir / "initramfs.cpio").unlink(missing_ok=True)
            self._dir_lock.close()
            self.dir = None

    # Commands

    def job(self, cmd: str, stdin: bytes = b"", on_output: Callable[[bytes], None] | None = None) -> Job:
        """Start a command of /bin/sh in /lab; the job ends when the shell exits."""
        return Job(self, cmd, stdin, on_output)

    def run(self, cmd: str, timeout: float = TIMEOUT_S, stdin: bytes = b"", check: bool = False) -> Result:
        return self.job(cmd, stdin).wait(timeout, check)

    def qemu(self, name: str) -> str:
        return qemu(self.arch, name)

    def read_file(self, path: str) -> bytes:
        job = self.job(f"cat {shlex.quote(path)}")
        job.wait(check=True)
        return job.raw

    def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        q = shlex.quote(path)
        self.run(f"cat >{q} && chmod {mode:o} {q}", stdin=data, check=True)

    def huge_pages(self, wanted: bool) -> tuple[str, ...]:
        """Let anonymous memory have transparent huge pages, or not; returns words to put before a command, here
        none."""
        self.run(f"echo {'always' if wanted else 'never'} >/sys/kernel/mm/transparent_hugepage/enabled", check=True)
        return ()

    # Ports

    @staticmethod
    def port(number: int) -> int:
        """L1 has all ports for itself."""
        return number

    def host_port(self, port: int) -> int:
        """The port of 127.0.0.1 on the host that leads to a port of all L1's addresses."""
        with self._lock:
            if port not in self._ports:
                self._hmp(f"hostfwd_add net tcp:127.0.0.1:0-:{port}")
                # Protocol[State] fd source-address source-port dest-address dest-port
                found = search(rf"TCP\[HOST_FORWARD\] +\S+ +\S+ +(\d+) +\S+ +{port}\b", self._hmp("info usernet"))
                self._ports[port] = int(found[1])
            return self._ports[port]

    def _hmp(self, line: str) -> str:
        return str(self._qmp("human-monitor-command", {"command-line": line}))

    def _qmp(self, execute: str, arguments: dict[str, object] | None = None) -> Any:
        command = {"execute": execute, "arguments": arguments or {}}
        with self._lock:
            self._qmp_sock.sendall(json.dumps(command).encode())
            while line := self._qmp_file.readline():
                answer = json.loads(line)
                if "error" in answer:
                    raise LabError(f"L1's QEMU: {answer['error']['desc']}")
                if "return" in answer:
                    return answer["return"]
        raise LabError("L1's QEMU is gone")

    # Trouble

    def log(self) -> str:
        return self.serial_log.read_text(errors="replace") if self.serial_log.exists() else ""

    def _tail(self) -> str:
        lines = self.log().splitlines()[-40:]
        return f"the end of {self.serial_log}:\n" + "\n".join(lines)

    def died(self, when: str) -> NoReturn:
        assert self.dir and self.process
        said = (self.dir / "qemu.log").read_text(errors="replace").strip() or "nothing"
        raise LabError(f"L1 died {when}\nQEMU ended with {self.process.wait()} and said: {said}\n{self._tail()}")

    def check_kernel(self) -> None:
        """Raise LabError if L1's kernel has complained since the last call."""
        lines = self.log().splitlines()
        new, self._checked = lines[self._checked:], len(lines)
        for line in new:
            if COMPLAINTS.search(line):
                raise LabError(f"L1's kernel says: {line}\n{self._tail()}")
