# SPDX-License-Identifier: GPL-2.0-or-later
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "lab"))

from lab import Lab  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: not in make check, but in make check-slow")


@pytest.fixture(scope="session")
def _lab():
    machine = Lab(name=os.environ.get("PYTEST_XDIST_WORKER", "pytest"), memory_mb=3072, hugepages=256)
    yield machine
    machine.kill()


@pytest.fixture
def lab(_lab):
    """The first-level machine that all tests share; one that died is booted again."""
    if not _lab.alive:
        _lab.start()
    yield _lab
    _lab.check_kernel()
