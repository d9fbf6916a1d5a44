# SPDX-License-Identifier: GPL-2.0-or-later
"""Paths in the checkout; files in build/ have the same path below /lab in the lab."""
import os
from pathlib import Path

LAB = Path(__file__).resolve().parent
ROOT = LAB.parent.parent
BUILD = ROOT / "build"
REPORTS = BUILD / "reports"

FORK = BUILD / "fork"
# Set by scripts/setup's users: the build that replaces the fork in the tests, "asan" for example.
TESTED = os.environ.get("TESTED", "fork")
# A sanitizer makes QEMU slow, and makes it use memory of its own.
SANITIZED = TESTED in ("asan", "tsan")
# A factor for the seconds after which until() treats something as hung: other machines are slow, or busy.
PATIENCE = 10 if SANITIZED else 3


def below(name: str, arch: str) -> str:
    """A directory of build/ for an architecture: fork, fork-aarch64."""
    return name if arch == "x86_64" else f"{name}-{arch}"


def qemu(arch: str, name: str = "fork") -> str:
    """Path of a QEMU, in the checkout and below /lab."""
    return f"build/{below(name, arch)}/qemu-system-{arch}"
