# SPDX-License-Identifier: GPL-2.0-or-later
"""The series applies, QEMU's style is kept, and linters find nothing."""
import subprocess
import sys

from tests.lab.paths import ROOT


def run(*command, cwd=ROOT, **options):
    done = subprocess.run([str(word) for word in command], cwd=cwd, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_series():
    assert "patches in" in run("scripts/series", "check")


def checkpatch(*words):
    run("build/src/scripts/checkpatch.pl", "--no-tree", "--terse", "-q", *words)


def test_sources():
    checkpatch("-f", *(name for name in run("scripts/series", "files").split() if name.endswith((".c", ".h"))))


def test_patches():
    """Not signed off: that is for the person who sends them."""
    checkpatch("--no-signoff", *sorted(ROOT.glob("patches/**/*.patch")))


def test_shellcheck():
    files = [ROOT / name for name in run("git", "ls-files", "-co", "--exclude-standard").splitlines()]
    run("shellcheck", *(file for file in files if file.is_file()
                        and (file.suffix == ".sh" or file.read_bytes().startswith(b"#!/bin/sh"))))


def test_ruff():
    run(sys.executable, "-m", "ruff", "check", "--quiet")


def test_mypy():
    run(sys.executable, "-m", "mypy", "--no-error-summary")
