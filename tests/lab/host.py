# SPDX-License-Identifier: GPL-2.0-or-later
"""This machine in place of the lab's first-level machine: its kernel, and its KVM or TCG."""
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from tests.lab.cli import ProgramError
from tests.lab.lab import TIMEOUT_S, Lab, Result, Running
from tests.lab.paths import ROOT, qemu

EXIT_ON_MISSING = Path("/sys/module/kvm/parameters/exit_on_missing")
HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
# In the environment of all processes of a Host.
MARK = "QEMU_TEST_PLACE"
# 41: PR_SET_THP_DISABLE
WITHOUT_HUGE_PAGES = """import ctypes, os, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])"""
# QEMU's answers show what the kernel lacks for post-copy and for background snapshots.
ASK = """{"execute": "qmp_capabilities"}
{"execute": "migrate-set-capabilities", "arguments": {"capabilities": [{"capability": "postcopy-ram", "state": true}]}}
{"execute": "migrate-set-capabilities", "arguments": {"capabilities": [
    {"capability": "postcopy-ram", "state": false}, {"capability": "background-snapshot", "state": true}]}}
{"execute": "quit"}"""


class Job(Running):
    def __init__(self, cmd: str, environment: dict[str, str]) -> None:
        self.cmd = cmd
        self._output = tempfile.TemporaryFile()     # noqa: SIM115 - it is read as long as there is a Job
        # The command dies with this process.
        self._process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "/bin/sh", "-c", cmd], cwd=ROOT,
                                         stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
                                         start_new_session=True, env=os.environ | environment)

    @property
    def raw(self) -> bytes:
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _status(self, timeout: float) -> int | None:
        rc = self._process.wait(timeout)
        return rc if rc >= 0 else 128 - rc


class Host:
    """A context manager, like lab.Lab; accelerator: kvm, tcg, or None for the better one available; exits: use the
    build for tests as the fork, whose TCG exits for missing memory if postcopy-fault-exits is on."""

    address = host = "127.0.0.1"
    serial_log = Path("/dev/kmsg")
    wait_us = 20

    def __init__(self, accelerator: str | None = None, hugepages: int = 0, arch: str = "x86_64",
                 name: str = "host", *, exits: bool = False) -> None:
        usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
        if accelerator == "kvm" and not usable:
            raise ProgramError("no access to /dev/kvm: as root, or in the group kvm; or --accel tcg")
        self.accelerator = "tcg" if exits else accelerator or ("kvm" if usable else "tcg")
        # A processor without features that PVM lacks
        self.qemu_words: tuple[str, ...] = ("-accel", self.accelerator,
                           "-cpu", "qemu64" if self.accelerator == "kvm" else "max")
        self.arch = arch
        self.name = name
        self.cpus = os.cpu_count() or 1
        self.hugepages = hugepages
        self._exits = exits
        self.exit_on_missing = exits or (self.accelerator == "kvm" and EXIT_ON_MISSING.exists())
        self._ports: dict[int, socket.socket] = {}

    def __enter__(self) -> Self:
        free = HUGEPAGES / "free_hugepages"
        if self.hugepages and (not free.exists() or int(free.read_text()) < self.hugepages):
            raise ProgramError(f"{self.hugepages} free huge pages of 2 MiB are needed; as root: "
                             f"echo {self.hugepages} >{HUGEPAGES}/nr_hugepages")
        self._tmp = tempfile.TemporaryDirectory(prefix="qemu-")
        self.tmp = self._tmp.name
        return self

    def __exit__(self, *_: object) -> None:
        self.leftovers()
        for reserved in self._ports.values():
            reserved.close()
        self._tmp.cleanup()

    def qemu(self, name: str) -> str:
        """The fork for arm64 is a program of arm64 hosts: here another QEMU emulates arm64."""
        if self._exits and name == "fork":
            name = "inject"
        return qemu(self.arch, name) if self.arch == "x86_64" else f"qemu-system-{self.arch}"

    def job(self, cmd: str) -> Job:
        return Job(cmd, {MARK: self.tmp})

    def run(self, cmd: str, timeout: float = TIMEOUT_S, *, check: bool = False) -> Result:
        return self.job(cmd).wait(timeout, check)

    def read_file(self, path: str) -> bytes:
        return Path(path).read_bytes()

    @staticmethod
    def huge_pages(wanted: bool) -> tuple[str, ...]:
        """Words before a command that is to have transparent huge pages, by the host's setting, or none."""
        return () if wanted else (sys.executable, "-c", WITHOUT_HUGE_PAGES)

    def host_port(self, port: int) -> int:
        return port

    def port(self, number: int) -> int:
        """A port that no other process gets, always the same for a number: this process binds it, and QEMU, which sets
        SO_REUSEADDR as well, may listen there."""
        if number not in self._ports:
            self._ports[number] = reserved = socket.socket()
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((self.address, 0))
        return int(self._ports[number].getsockname()[1])

    def leftovers(self) -> list[str]:
        """Kill the remaining processes of all jobs; returns their commands."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # A zombie has no environment.
                if f"\0{MARK}={self.tmp}\0" in f"\0{(process / 'environ').read_text(errors='replace')}":
                    os.kill(int(process.name), signal.SIGKILL)
                    found.append((process / "cmdline").read_text(errors="replace").replace("\0", " "))
        return found

    def why_not(self) -> str:
        """Rights that this kernel denies to QEMU, or to tests that look where its threads sleep; empty if none."""
        answers = self.run(f"echo {shlex.quote(ASK)} | {self.qemu('fork')} -M none -nodefaults -display none "
                           "-accel tcg -incoming defer -qmp stdio").output
        if answers.count('"return"') != ASK.count("execute"):
            return answers
        where = self.run("sleep 60 & sleep 0.3; cat /proc/$!/wchan; kill $!").output
        return "" if "sleep" in where else f"/proc/PID/wchan of one that sleeps: {where}"


Place = Lab | Host
