# SPDX-License-Identifier: GPL-2.0-or-later
"""A short run of the fuzzer, and its earlier findings.

findings/SIDE-NAME.xz are inputs that crashed or hung QEMU before a patch.
"""
import lzma
import os
import sys

import pytest

from tests.fuzz.fuzz import BINARY, SANITIZER, command
from tests.lab.paths import ROOT
from tests.static.test_style import run

# The first test builds the fuzzer.
pytestmark = pytest.mark.timeout(3600)
FINDINGS = sorted((ROOT / "tests/fuzz/findings").glob("*.xz"))


@pytest.fixture(scope="module", autouse=True)
def fuzzer():
    run("scripts/setup", "fuzz")
    run("scripts/ninja", "build/fuzz", BINARY.name)


@pytest.mark.slow
@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_finding(tmp_path, path):
    script = tmp_path / "input"
    script.write_bytes(lzma.decompress(path.read_bytes()))
    run(*command(path.name.partition("-")[0], script), timeout=300, env=os.environ | {"ASAN_OPTIONS": SANITIZER})


@pytest.mark.slow
def test_short_run():
    run(sys.executable, "tests/fuzz/fuzz.py")
