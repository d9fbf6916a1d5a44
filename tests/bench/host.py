# SPDX-License-Identifier: GPL-2.0-or-later
"""This machine in place of the lab's first-level machine, for pair.Pair: its kernel, its KVM."""
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.lab.cli import ProgramError, say
from tests.lab.lab import CommandFailed, CommandTimeout, Result
from tests.lab.paths import ROOT

EXIT_ON_MISSING = Path("/sys/module/kvm/parameters/exit_on_missing")
HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
# 41: PR_SET_THP_DISABLE
WITHOUT_HUGE_PAGES = """import ctypes, os, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])"""


class Job:
    """A command that runs on this machine, as lab.Job does in the lab."""

    def __init__(self, cmd):
        self.cmd = cmd
        self._data = bytearray()
        self._process = subprocess.Popen(["/bin/sh", "-c", cmd], cwd=ROOT, stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         start_new_session=True)
        # Alone writes _data; whoever wants all of it joins the thread first.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        assert self._process.stdout
        while part := os.read(self._process.stdout.fileno(), 1 << 16):
            self._data += part

    @property
    def raw(self):
        return bytes(self._data)

    @property
    def output(self):
        return self.raw.decode(errors="replace")

    @property
    def running(self):
        return self._process.poll() is None

    def kill(self):
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout=60):
        try:
            rc = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise CommandTimeout(f"no end after {timeout} s: {self.cmd}",
                                 Result(None, self.output)) from None
        except KeyboardInterrupt:
            self.kill()
            raise
        self._reader.join()
        return Result(rc if rc >= 0 else 128 - rc, self.output)


class Host:
    """A context manager, as lab.Lab is; accelerator: kvm, tcg, or None for what there is."""

    name = "host"
    arch = "x86_64"
    address = "127.0.0.1"
    serial_log = "dmesg"
    wait_us = 20

    def __init__(self, accelerator=None, hugepages=0):
        usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
        if accelerator == "kvm" and not usable:
            raise ProgramError("no access to /dev/kvm: as root, or in the group kvm; or --accel tcg")
        self.accelerator = accelerator or ("kvm" if usable else "tcg")
        # No more than PVM has
        self.qemu_words = ("-accel", self.accelerator,
                           "-cpu", "qemu64" if self.accelerator == "kvm" else "max")
        self.cpus = os.cpu_count()
        self.hugepages = hugepages
        self.exit_on_missing = self.accelerator == "kvm" and EXIT_ON_MISSING.exists()
        self.kernel = platform.release()
        self._ports = {}

    def __enter__(self):
        free = HUGEPAGES / "free_hugepages"
        if self.hugepages and (not free.exists() or int(free.read_text()) < self.hugepages):
            raise ProgramError(f"{self.hugepages} free huge pages of 2 MiB are needed; as root: "
                             f"echo {self.hugepages} >{HUGEPAGES}/nr_hugepages")
        self._tmp = tempfile.TemporaryDirectory(prefix="bench-")
        self.tmp = self._tmp.name
        say(f"this machine's kernel {self.kernel}, -accel {self.accelerator}")
        return self

    def __exit__(self, *_):
        self._tmp.cleanup()

    def job(self, cmd):
        return Job(cmd)

    def run(self, cmd, timeout=60, check=False):
        result = self.job(cmd).wait(timeout)
        if check and result.rc:
            raise CommandFailed(f"exit status {result.rc}: {cmd}", result)
        return result

    def read_file(self, path):
        return Path(path).read_bytes()

    @staticmethod
    def huge_pages(wanted):
        """Words before a command that is to have transparent huge pages, as the host sets them, or none."""
        return () if wanted else (sys.executable, "-c", WITHOUT_HUGE_PAGES)

    def host_port(self, port):
        return port

    def port(self, number):
        """A port that is free, always the same one for a number."""
        if number not in self._ports:
            with socket.socket() as s:
                s.bind((self.address, 0))
                self._ports[number] = s.getsockname()[1]
        return self._ports[number]
