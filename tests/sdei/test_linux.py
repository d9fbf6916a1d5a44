# SPDX-License-Identifier: GPL-2.0-or-later
"""Linux's own SDEI driver in a guest, before, during and after a migration.

The guest is the lab's Linux 7.3, whose service for NMIs (CONFIG_ARM_SDEI_NMI) lets one CPU signal the others
by event 0.
"""
import re

import pytest

from tests.lab.initramfs import tool
from tests.lab.lab import Lab
from tests.lab.pair import BasePair, BaseSide, until
from tests.lab.paths import LAB

ON = ("-global", "arm-cpu.kvm-sdei=on")
CPUS = 2
INITRD = "/tmp/sdei.cpio"
# Each CPU computes in user space; one of them requests backtraces of both, and CPU 1 goes off and on.
INIT = b"""#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
echo 7 >/proc/sys/kernel/printk
for i in 0 1; do
    while :; do :; done &
done
while :; do
    echo l >/proc/sysrq-trigger
    sleep 1
    echo 0 >/sys/devices/system/cpu/cpu1/online
    echo 1 >/sys/devices/system/cpu/cpu1/online
done
"""
COMPLAINTS = re.compile(r"sdei.*(fail|broken|disabling|conflict|unsafe|error)|WARNING:|BUG:|Oops", re.I)


class LinuxSide(BaseSide):
    def guest_arguments(self, options):
        return ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "virt,gic-version=3",
                "-smp", str(CPUS), "-m", "256", "-kernel", options["kernel"], "-initrd", INITRD,
                "-append", "console=ttyAMA0 panic=-1", "-serial", f"file:{self.console}"]

    def log(self):
        self.check()
        log = self.lab.run(f"cat {self.console}").output
        assert not COMPLAINTS.search(log), log
        return log

    def wait_ready(self):
        self.wait_backtraces(1)

    def wait_backtraces(self, number):
        """Wait for this number of backtraces of each CPU."""
        until(lambda: all(self.log().count(f"NMI backtrace for cpu {cpu}") >= number for cpu in range(CPUS)),
              f"{number} backtraces of each CPU on the {self.name}", timeout=120)


class LinuxPair(BasePair[LinuxSide]):
    side_type = LinuxSide

    def check_memory(self):
        pass


# From an empty cache it compiles a Linux
@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.aarch64
@pytest.mark.parametrize("way", ["precopy", "postcopy"])
def test_driver(way):
    image = tool("env", "LINUX=7.3", LAB / "kernel" / "build", "aarch64").strip()
    with Lab(name="sdei-linux", arch="aarch64", extra=[image]) as lab:
        lab.run("mkdir -p /tmp/guest/bin /tmp/guest/proc /tmp/guest/sys", check=True)
        lab.write_file("/tmp/guest/init", INIT, 0o755)
        lab.run("cd /tmp/guest && cp /bin/busybox bin && "
                "for a in sh mount echo sleep; do ln -s busybox bin/$a; done && "
                f"find . | cpio -o -H newc >{INITRD}", check=True)
        with LinuxPair(lab, capabilities=None if way == "precopy" else ("postcopy-preempt",), cpus=CPUS,
                       source_options=ON, destination_options=ON, kernel=image) as both:
            both.source.wait_backtraces(3)
            log = both.source.log()
            assert "sdei: SDEIv1.0 (0x0) detected in firmware." in log
            assert "sdei_nmi: using SDEI cross-CPU NMI" in log
            getattr(both, way)()
            both.wait_completed()
            both.destination.wait_backtraces(5)
