# SPDX-License-Identifier: GPL-2.0-or-later
"""No test function is left out: each has a case with the kernel interface that QEMU prefers."""
import ast
import os
import re
import subprocess
import sys

from tests.lab.kvm_interface import EXIT_ON_MISSING, USERFAULT
from tests.lab.paths import ROOT


def collected(interface=EXIT_ON_MISSING, tests=""):
    """{test function: its cases' names}, of all tests or of those that TESTS selects."""
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, env=os.environ | {"INTERFACE": interface, "TESTS": tests})
    assert done.returncode == 0, done.stdout
    functions: dict[str, list[str]] = {}
    for function, case in re.findall(r"^(tests/\S+?\.py::\w+)(.*)", done.stdout, re.M):
        functions.setdefault(function, []).append(case)
    return functions


def written():
    """All test functions in the files."""
    return {f"{path.relative_to(ROOT)}::{node.name}" for path in ROOT.glob("tests/**/test_*.py")
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def by(interface, case):
    return interface in re.split(r"\W", case)


def test_each_function_runs_with_the_preferred_interface():
    functions = collected()
    holes = {function for function in written()
             if all(by(USERFAULT, case) for case in functions.get(function, ()))}
    assert not holes, f"no case with exit-on-missing: {sorted(holes)}"
    second = {function for function, cases in functions.items() if any(by(USERFAULT, case) for case in cases)}
    assert len(second) > 20, "@both_interfaces has no effect"


def test_the_other_interface_can_be_the_first():
    functions = collected(USERFAULT)
    assert not [f for f, cases in functions.items() if all(by(EXIT_ON_MISSING, case) for case in cases)]
    assert [f for f, cases in functions.items() if any(by(EXIT_ON_MISSING, case) for case in cases)]


def test_expressions_may_name_directories():
    """The checkout also has a directory named migration."""
    functions = collected(tests="test_sdei and not migration")
    assert functions and all("sdei" in name and "migration" not in name for name in functions), functions
    assert set(collected(tests="tests/sdei/test_sdei.py tests/async")) > set(functions)
