# SPDX-License-Identifier: GPL-2.0-or-later
"""Where things lie in the checkout; what lies in build/ has the same path below /lab in the lab."""
import os
from pathlib import Path

LAB = Path(__file__).resolve().parent
ROOT = LAB.parent.parent
BUILD = ROOT / "build"
REPORTS = BUILD / "reports"

FORK = BUILD / "fork"
# Of scripts/setup: the build that takes the fork's place in the tests, "asan" for example.
TESTED = os.environ.get("TESTED", "fork")
# A sanitizer makes QEMU slow, and lets it use memory of its own.
SANITIZED = TESTED in ("asan", "tsan")
# Times the seconds after which until() takes something for hung: other machines are slow, or busy.
PATIENCE = 10 if SANITIZED else 3


def below(name: str, arch: str) -> str:
    """A directory of build/ for an architecture: fork, fork-aarch64."""
    return name if arch == "x86_64" else f"{name}-{arch}"


def qemu(arch: str, name: str = "fork") -> str:
    """Path of a QEMU, in the checkout and below /lab."""
    return f"build/{below(name, arch)}/qemu-system-{arch}"
