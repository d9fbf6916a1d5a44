# SPDX-License-Identifier: GPL-2.0-or-later
"""The lab itself: its kernel and its driver."""
import os
import re
import select
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab import kvm_interface, limits
from tests.lab.arches import on_both
from tests.lab.kvm_interface import EXIT_ON_MISSING, USERFAULT
from tests.lab.lab import CommandFailed, Lab, LabError
from tests.lab.paths import LAB, below
from tests.lab.text import search

pytestmark = pytest.mark.slow

CLI = LAB / "lab"


def abi(lab, option=""):
    """Run the test program of the kernel's interface."""
    return lab.run(f"build/{below('tests', lab.arch)}/kvm-exit-on-missing {option}")


def tap(result):
    """All tests of a TAP run passed, and all were run."""
    oks = re.findall(r"^ok \d+", result.output, re.M)
    assert result.rc == 0 and f"\n1..{len(oks)}\n" in result.output, result.output
    assert "not ok" not in result.output
    return len(oks)


# The lab's time

def test_time_by_instructions():
    """Work takes as long beside a host's other processes as without them."""
    with Lab(name="icount", icount=True) as lab:
        lab.run("head -c 32m /dev/zero >/tmp/zeros", check=True)

        def took_s(work):
            return float(search(r"^real ([\d.]+)$", lab.run(f"time -p {work}", check=True).output)[1])

        summing = "sha256sum /tmp/zeros"
        alone = took_s(summing)
        others = [subprocess.Popen(["yes"], stdout=subprocess.DEVNULL) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            beside = took_s(summing)
        finally:
            for other in others:
                other.kill()
                other.wait()
        assert alone > 0.5
        assert beside == pytest.approx(alone, rel=0.05)

        # One instruction copies more than a byte
        n = 32
        copying = f"sh -c 'for i in $(seq {n}); do dd if=/tmp/zeros of=/dev/null bs=64k; done'"
        assert took_s(copying) < 0.75 * n * (32 << 20) / 1e9


# The kernel

@on_both("offered, option, least", [
    (EXIT_ON_MISSING, "", 60), ("none", "--hidden", 20), (USERFAULT, "--userfault", 60)], quick=True)
def test_kernel_interface(lab, offered, option, least):
    with kvm_interface.offered(lab, offered):
        assert tap(abi(lab, option)) > least
    # The test program distinguishes both interfaces.
    assert offered != USERFAULT or abi(lab, option).rc == 1


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_kernel_interface_hidden_at_boot(arch):
    with Lab(name="hidden", append="kvm.exit_on_missing=0", arch=arch) as lab:
        tap(abi(lab, "--hidden"))
        # The test program distinguishes both interfaces.
        assert abi(lab).rc == 1


@on_both()
def test_clock_is_the_counter(lab):
    clock = lab.run("cat /sys/devices/system/clocksource/clocksource0/current_clocksource")
    assert clock.output == {"x86_64": "tsc\n", "aarch64": "arch_sys_counter\n"}[lab.arch]


# Commands

@pytest.mark.parametrize("cmd, rc, output", [
    ("echo out; echo err >&2; exit 7", 7, "out\nerr\n"),
    ("no-such-command", 127, None),
    ("kill -KILL $$", 128 + 9, ""),
    ("printf 'no newline'", 0, "no newline"),
])
def test_status_and_output(lab, cmd, rc, output):
    result = lab.run(cmd)
    assert result.rc == rc
    assert output is None or result.output == output


def test_files(lab):
    data = os.urandom(3_000_000)
    lab.write_file("/tmp/a file", data, mode=0o755)
    assert lab.read_file("/tmp/a file") == data
    assert lab.run("test -x '/tmp/a file'").rc == 0
    with pytest.raises(CommandFailed, match=r"exit status 1(.|\n)*No such file"):
        lab.read_file("/tmp/none")


def test_timeout(lab):
    start = time.monotonic()
    with pytest.raises(CommandFailed) as e:
        lab.run("echo before; sleep 12345; echo after", timeout=5)
    assert time.monotonic() - start < 30
    assert e.value.result.output == "before\n" and e.value.result.rc is None
    time.sleep(0.5)
    assert lab.run("ps | grep '[s]leep 12345'").output == ""


def test_what_is_left_in_the_background_is_not_waited_for(lab):
    assert lab.run("sleep 1000 & echo done", timeout=10).output == "done\n"
    lab.run("killall sleep")


def test_port(lab):
    """Of a command that runs beside others."""
    job = lab.job("echo started; exec nc -l -p 4444 -e cat")
    while lab.run("netstat -ltn | grep -q :4444").rc:
        assert job.running
        time.sleep(0.1)
    assert lab.host_port(4444) == lab.host_port(4444)
    with socket.create_connection(("127.0.0.1", lab.host_port(4444)), timeout=10) as s:
        s.sendall(b"hello")
        assert s.recv(5) == b"hello"
        job.kill()
    assert not job.running and job.output == "started\n" and job.wait().rc is None


# Trouble

def test_kernel_complaints_are_noticed(lab):
    lab.check_kernel()
    lab.run("echo '<4>WARNING: only a test' >/dev/kmsg")
    time.sleep(0.2)
    with pytest.raises(LabError, match=r"kernel says.*only a test"):
        lab.check_kernel()
    lab.check_kernel()  # reported once


def test_kernel_complaints_at_the_end():
    with pytest.raises(LabError, match=r"kernel says.*only a test"), Lab(name="complaint") as lab:
        lab.run("echo '<4>WARNING: only a test' >/dev/kmsg; sleep 0.2")


def test_panic():
    with pytest.raises(LabError, match=r"(?s)died while it ran.*Kernel panic"), Lab(name="panic") as lab:
        lab.run("echo c >/proc/sysrq-trigger; sleep 100")
    assert "Kernel panic" in lab.serial_log.read_text()


def test_panic_at_boot():
    with pytest.raises(LabError, match=r"(?s)died while it booted.*Kernel panic"):
        Lab(name="panic", append="rdinit=/none init=/none").__enter__()


def test_boot_timeout():
    lab = Lab(name="hang", append="rdinit=/bin/cat", boot_timeout=15)
    with pytest.raises(LabError, match=r"(?s)did not boot in 15 s; CPU#0, .*; the end of \S+serial.log:\n\["):
        lab.__enter__()
    assert not lab.alive


# Command line

def test_command_line():
    p = subprocess.run([CLI, "run", "echo hello; exit 3"], capture_output=True, text=True)
    assert (p.returncode, p.stdout) == (3, "hello\n")


@pytest.mark.parametrize("sig, rc", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_no_machine_outlives_its_driver(sig, rc):
    # A shell starts background commands with SIGINT ignored, which they inherit.
    with subprocess.Popen([CLI, "run", "echo up; sleep 1000"], stdout=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as p:
        assert p.stdout and p.stdout.readline() == "up\n"
        qemu, = limits.descendants(p.pid)
        assert Path(f"/proc/{qemu}/comm").read_text().startswith("qemu-system")
        ended = os.pidfd_open(qemu)
        p.send_signal(sig)
        try:
            assert p.wait(20) == rc
        finally:
            p.kill()
    try:
        assert select.select([ended], [], [], 5)[0], "QEMU is still there"
    finally:
        os.close(ended)
