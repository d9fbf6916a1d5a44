# SPDX-License-Identifier: GPL-2.0-or-later
"""A short run of the fuzzer, and its earlier findings.

findings/SIDE-NAME.xz are inputs that crashed or hung QEMU before a patch.
"""
import lzma
import os
import subprocess
import sys

import pytest

from tests.fuzz.fuzz import BINARY, SANITIZER, command
from tests.lab.paths import ROOT

SECONDS = 60
# The first test builds the fuzzer.
pytestmark = pytest.mark.timeout(3600)
FINDINGS = sorted((ROOT / "tests/fuzz/findings").glob("*.xz"))


@pytest.fixture(scope="module", autouse=True)
def fuzzer():
    subprocess.run([ROOT / "scripts/setup", "fuzz"], check=True)
    subprocess.run([ROOT / "scripts/ninja", "build/fuzz", BINARY.name], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_finding(tmp_path, path):
    script = tmp_path / "input"
    script.write_bytes(lzma.decompress(path.read_bytes()))
    done = subprocess.run(command(path.name.partition("-")[0], script), text=True, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=os.environ | {"ASAN_OPTIONS": SANITIZER})
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_short_run():
    done = subprocess.run([sys.executable, ROOT / "tests/fuzz/fuzz.py", f"--seconds={SECONDS}"], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
