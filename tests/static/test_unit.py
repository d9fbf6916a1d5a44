# SPDX-License-Identifier: GPL-2.0-or-later
"""The unit tests that tests/meson.build lists, and one of them with a rule broken on purpose."""
import json
import os
import subprocess

import pytest

from tests.lab.paths import BUILD, FORK, ROOT

LIST = BUILD / "tests/meson-info/intro-tests.json"
SKIPPED = 77  # the exit status that Meson takes for it


def unit_tests():
    """make check does not build those with ThreadSanitizer: another 480 files of QEMU's."""
    tests = json.loads(LIST.read_text()) if LIST.exists() else []
    return [pytest.param(t["cmd"], id=t["name"], marks=pytest.mark.slow if "ThreadSanitizer" in t["name"] else ())
            for t in tests if "fault-exits:unit" in t["suite"]]


def run(command, rc=0, **environment):
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=os.environ | environment, timeout=120)
    if done.returncode == SKIPPED and rc == 0:
        pytest.skip(done.stdout)
    assert done.returncode == rc, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("command", unit_tests())
def test_unit(command):
    tap = run(command)
    assert "\nok 1 " in tap and "not ok" not in tap, tap
    assert "WARNING: ThreadSanitizer" not in tap, tap


def test_all_are_listed():
    assert LIST.exists(), "no build/tests: make guest"
    listed = {str(test.id).split()[0] for test in unit_tests()}
    assert listed == {path.stem for path in ROOT.glob("tests/unit/*.c")}


def test_a_broken_wake_rule_is_found():
    """A reader of a fault whose page is received does not wake: its thread hangs."""
    out = run([FORK / "tests/unit/test-postcopy-place"], rc=1, TEST_BREAK_WAKE_RULE="1")
    assert "Bail out! A reader hangs" in out
