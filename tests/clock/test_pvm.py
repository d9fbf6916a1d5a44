# SPDX-License-Identifier: GPL-2.0-or-later
"""On this machine's own KVM, if that is PVM, which accepts TSC offsets and ignores them."""
import os
import re
from pathlib import Path

import pytest

from tests.lab.clocks import CLOCK, migrate
from tests.lab.host import Host
from tests.lab.pair import Pair, until

GAP_S = 2


@pytest.mark.parametrize("policy", ["continuous-unchecked", pytest.param("stopped", marks=pytest.mark.slow)])
def test_both_clocks_fall_back(policy):
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("this machine has no /dev/kvm; the lab has one that takes TSC offsets")
    if re.search(r"\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text()):
        pytest.skip("this machine's KVM uses VMX or SVM, and takes TSC offsets: the lab shows what is done then")
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
