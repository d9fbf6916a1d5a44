# SPDX-License-Identifier: GPL-2.0-or-later
"""A short run of the fuzzer."""
import subprocess
import sys

import pytest

from tests.lab.paths import ROOT

SECONDS = 60


@pytest.mark.slow
def test_short_run():
    subprocess.run([ROOT / "scripts/setup", "fuzz"], check=True)
    subprocess.run([ROOT / "scripts/ninja", "build/fuzz", "qemu-fuzz-x86_64"], cwd=ROOT, check=True)
    done = subprocess.run([sys.executable, ROOT / "tests/fuzz/fuzz.py", f"--seconds={SECONDS}"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
