# SPDX-License-Identifier: GPL-2.0-or-later
"""On this machine's own KVM, if it accepts TSC offsets and ignores them, as PVM does."""
import ctypes
import fcntl
import os
import shlex
import subprocess
import time
from typing import Any

import pytest
from qemu.qmp.legacy import QEMUMonitorProtocol

from tests.lab import guest
from tests.lab.clocks import CLOCK
from tests.lab.pair import until
from tests.lab.paths import ROOT, qemu

KVM_CREATE_VM = 0xAE01
KVM_CREATE_VCPU = 0xAE41
KVM_SET_DEVICE_ATTR = 0x4018AEE1
KVM_GET_DEVICE_ATTR = 0x4018AEE2
GAP_S = 2


class Attr(ctypes.Structure):
    """Of KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET"""
    _fields_ = [("flags", ctypes.c_uint32), ("group", ctypes.c_uint32),
                ("attr", ctypes.c_uint64), ("addr", ctypes.c_uint64)]


def offset_after_setting(wanted):
    """The offset that a vCPU of this machine has after it was set; None if KVM refuses."""
    kvm = os.open("/dev/kvm", os.O_RDWR)
    vm = fcntl.ioctl(kvm, KVM_CREATE_VM, 0)
    vcpu = fcntl.ioctl(vm, KVM_CREATE_VCPU, 0)
    value = ctypes.c_uint64(wanted)
    attr = Attr(addr=ctypes.addressof(value))
    try:
        fcntl.ioctl(vcpu, KVM_SET_DEVICE_ATTR, attr)
        value.value = 0
        fcntl.ioctl(vcpu, KVM_GET_DEVICE_ATTR, attr)
        return value.value
    except OSError:
        return None
    finally:
        for fd in vcpu, vm, kvm:
            os.close(fd)


class Qemu:
    """A QEMU of the fork on this machine."""

    def __init__(self, name, directory, *words):
        self.console = directory / f"{name}.console"
        self.output = directory / f"{name}.output"
        socket = str(directory / f"{name}.qmp")
        argv = [ROOT / qemu("x86_64"), "-accel", "kvm", "-cpu", "qemu64", "-qmp", f"unix:{socket},server=on,wait=off",
                *guest.arguments(name, self.console, cpus=2, memory_mb=32, payload=ROOT / CLOCK), *words]
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(list(map(str, argv)), stdout=output, stderr=output)
        until(lambda: os.path.exists(socket) or self.process.poll() is not None, shlex.join(map(str, argv)))
        self.qmp = QEMUMonitorProtocol(socket)
        self.qmp.connect()

    def cmd(self, name, **arguments) -> Any:
        return self.qmp.cmd(name, **arguments)

    def wait_completed(self):
        until(lambda: self.cmd("query-migrate").get("status") == "completed", "migration")

    def report(self):
        return guest.Report(self.console.read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.qmp.close()


@pytest.mark.parametrize("policy", ["continuous-unchecked", pytest.param("stopped", marks=pytest.mark.slow)])
def test_both_clocks_fall_back(tmp_path, policy):
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("this machine has no /dev/kvm; the lab has one that takes TSC offsets")
    if offset_after_setting(123456) != 0:
        pytest.skip("this machine's KVM takes TSC offsets, or refuses them: the lab shows what is done then")
    stream = f"unix:{tmp_path}/stream"
    with (Qemu("source", tmp_path, "-machine", "guest-time=on") as source,
          Qemu("destination", tmp_path, "-S", "-global", f"migration.guest-time={policy}",
               "-incoming", stream) as destination):
        until(lambda: source.report().first("ready"), "the guest runs")
        source.cmd("migrate", uri=stream)
        for side in source, destination:
            side.wait_completed()
        time.sleep(GAP_S)
        destination.cmd("cont")
        until(lambda: len([e for e in destination.report().all("clock") if e["move"] == 1]) >= 2,
              "the guest runs on the destination")
        last = source.report().all("clock")[-1]
        after = [e for e in destination.report().all("clock") if e["move"] == 1]
        lines = [line for line in destination.output.read_text().splitlines() if "guest-time" in line]
    assert len(lines) == 1 and "KVM ignores TSC offsets" in lines[0], lines
    # The kvmclock is not advanced while the TSC cannot be
    assert min(event["step_clock"] for event in after) < GAP_S * 1e9 / 2, after
    for event in after:
        assert last["clock"] < event["clock"]
        assert event["back_tsc"] == event["back_clock"] == 0, event
