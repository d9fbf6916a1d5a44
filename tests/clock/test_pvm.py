# SPDX-License-Identifier: GPL-2.0-or-later
"""On this machine's own KVM, if it accepts TSC offsets and ignores them, as PVM does."""
import ctypes
import fcntl
import os

import pytest

from tests.lab.clocks import CLOCK, migrate
from tests.lab.host import Host
from tests.lab.pair import Pair, until

KVM_CREATE_VM = 0xAE01
KVM_CREATE_VCPU = 0xAE41
KVM_SET_DEVICE_ATTR = 0x4018AEE1
KVM_GET_DEVICE_ATTR = 0x4018AEE2
GAP_S = 2


class Attr(ctypes.Structure):
    """The argument of KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET"""
    _fields_ = [("flags", ctypes.c_uint32), ("group", ctypes.c_uint32),
                ("attr", ctypes.c_uint64), ("addr", ctypes.c_uint64)]


def offset_after_setting(wanted):
    """The offset that a vCPU of this machine has after a change to wanted; None if KVM refuses."""
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


@pytest.mark.parametrize("policy", ["continuous-unchecked", pytest.param("stopped", marks=pytest.mark.slow)])
def test_both_clocks_fall_back(policy):
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("this machine has no /dev/kvm; the lab has one that takes TSC offsets")
    if offset_after_setting(123456) != 0:
        pytest.skip("this machine's KVM takes TSC offsets, or refuses them: the lab shows what is done then")
    with Host("kvm") as host, Pair(
            host, capabilities=None, cpus=2, payload=CLOCK, source_options=("-machine", "guest-time=on"),
            destination_options=("-S", "-global", f"migration.guest-time={policy}")) as pair:
        pair.source.wait_ready()
        migrate(pair, GAP_S, postcopy=False)

        def moved():
            return [event for event in pair.destination.report().all("clock") if event["move"] == 1]
        after = until(lambda: len(moved()) >= 2 and moved(), "the guest runs on the destination")
        last = pair.source.report().all("clock")[-1]
        lines = [line for line in pair.destination.job.output.splitlines() if "guest-time" in line]
    assert len(lines) == 1 and "KVM ignores TSC offsets" in lines[0], lines
    # QEMU does not advance the kvmclock if it cannot advance the TSC
    assert min(event["step_clock"] for event in after) < GAP_S * 1e9 / 2, after
    for event in after:
        assert last["clock"] < event["clock"]
        assert event["back_tsc"] == event["back_clock"] == 0, event
