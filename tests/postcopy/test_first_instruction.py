# SPDX-License-Identifier: GPL-2.0-or-later
"""Pages that vCPUs miss before the guest's programs run again, in the trace of the lab's kernel."""
import re
import statistics

import pytest

from tests.lab.backends import CHANNELS
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import NO_FIRST

pytestmark = pytest.mark.slow
CPUS = 4
TRACING = "/sys/kernel/debug/tracing"
EVENTS = ("kvm_exit", "kvm_userspace_exit", "kvm_inj_virq")
MISSING = "error (14)"    # KVM_RUN returns EFAULT, with KVM_EXIT_MEMORY_FAULT
USER = 1 << 47            # Linux's own addresses are above


def missed_first(log, tid):
    """For a vCPU: pages that the guest's kernel has missed, and the first instruction of a program, until the handler
    of an interrupt has returned to one."""
    missed, rip, first = 0, 0, None
    injected = delivers = kernel = False
    for event, text in re.findall(rf"-{tid} .*? (\w+): (.*)", log):
        if event == "kvm_inj_virq":
            injected = True
        elif event == "kvm_exit":
            rip = int(re.findall(r"rip 0x(\w+)", text)[0], 16)
            delivers = "intr_info 0x00000000" not in text
            if rip >= USER:
                kernel = True
            elif not delivers:
                if injected and kernel:
                    return missed
                first = first or rip
        elif MISSING in text:
            missed += rip >= USER or delivers or rip == first
    raise AssertionError(f"no program runs behind an interrupt:\n{log[-2000:]}")


def missed_by_vcpus(lab, options, channels):
    with LinuxPair(lab, exits="on", cpus=CPUS, computers=CPUS, mem=48, memory_mb=224, source_options=options,
                   **CHANNELS[channels]) as pair:
        uri = pair.listen()
        pair.source.wait_ready()
        tids = [cpu["thread-id"] for cpu in pair.destination.cmd("query-cpus-fast")]
        on = [f"echo 1 >{TRACING}/events/kvm/{event}/enable" for event in EVENTS]
        try:
            lab.run(" && ".join([f"echo >{TRACING}/trace", f"echo {' '.join(map(str, tids))} >{TRACING}/set_event_pid",
                                 f"echo 4096 >{TRACING}/buffer_size_kb", *on]), check=True)
            pair.postcopy(uri, bandwidth=0)
            pair.destination.wait_status("completed")
            pair.until_reports(3)
            log = lab.run(f"cat {TRACING}/trace", check=True).output
        finally:
            lab.run(f"echo 0 >{TRACING}/events/enable; echo >{TRACING}/set_event_pid; echo 1 >{TRACING}/buffer_size_kb")
        pair.check_memory()
        # A vCPU in a system call stays in the kernel for long
        return [missed_first(log, tid) for cpu, tid in enumerate(tids) if "CPL=3" in pair.source.cmd(
            "human-monitor-command", command_line="info registers", cpu_index=cpu)]


@pytest.mark.parametrize("channels", CHANNELS)
def test_before_the_first_instruction(lab, channels):
    """The vCPU's code, stack and tables, the devices' rings and the handlers of interrupts are received by then."""
    missed = missed_by_vcpus(lab, (), channels)
    assert missed, "all vCPUs were within system calls"
    # Behind its interrupt, a vCPU may also run another thread of the kernel.
    assert statistics.median_low(missed) <= 2, missed


def test_without_what_must_be_touched_first(lab):
    """Without x-postcopy-first, each vCPU misses several pages in turn: the count above can fail."""
    missed = missed_by_vcpus(lab, NO_FIRST, "fetch")
    assert missed and min(missed) > 4, missed
