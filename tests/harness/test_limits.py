# SPDX-License-Identifier: GPL-2.0-or-later
"""A test that hangs is ended, and reports where the threads of its QEMUs sleep; the next test runs."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.paths import ROOT
from tests.lab.text import search


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_hanging(workers):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-rA", *workers, "tests/harness/hanging.py"], cwd=ROOT,
                          text=True, stdout=subprocess.PIPE, env=environment | {"TESTS": ""})
    said = done.stdout
    print(said)
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) tests/harness/hanging.py::(\w+)", said, re.M)
    assert set(outcomes) == {("FAILED", "test_monitor"), ("PASSED", "test_next"), ("FAILED", "test_thread"),
                             ("ERROR", "test_setup"), ("FAILED", "test_teardown"), ("ERROR", "test_teardown")}
    for thread in ("source: CPU 0/KVM: do_signal_stop", "destination: CPU 0/KVM: futex_wait", "lab: qemu-system-x86: "):
        assert re.search(f"^E +{thread}", said, re.M), thread
    logs = Path(search(r"logs of this test's QEMUs and guest: (\S+);", said)[1])
    assert (logs / "source.output").exists() and (logs / "destination.trace").exists()
