# SPDX-License-Identifier: GPL-2.0-or-later
import os
import re
import zlib

import pytest

from tests.lab import sanitizer
from tests.lab.lab import Lab
from tests.lab.paths import below


def pytest_collection_modifyitems(config, items):
    """PART=2/4 in the environment: of four parts of the tests, which have nothing in common, the second."""
    part = os.environ.get("PART")
    if not part:
        return
    match = re.fullmatch("([0-9]+)/([0-9]+)", part)
    if not match or not 0 < int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"PART is {part}: it must be like 2/4, the second of four parts")
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        number = zlib.crc32(item.nodeid.encode()) % int(match[2]) + 1
        (kept if number == int(match[1]) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.fixture(scope="session")
def _labs():
    """The first-level machines of this process, as far as they were asked for, by architecture."""
    machines: dict[str, Lab] = {}
    yield machines
    for machine in machines.values():
        machine.kill()


@pytest.fixture
def lab(request, _labs):
    """The first-level machine that all tests share; one that died is booted again.
    x86-64's, unless the test has a mark of arches.py."""
    arch = getattr(request, "param", "x86_64")
    if arch not in _labs:
        name = os.environ.get("PYTEST_XDIST_WORKER", "pytest")
        _labs[arch] = Lab(name=below(name, arch), arch=arch, memory_mb=3072, hugepages=256)
    machine = _labs[arch]
    if not machine.alive:
        machine.start()
    if sanitizer.ENVIRONMENT:
        # Some sanitizers do not cope with random addresses.
        machine.run("echo 0 >/proc/sys/kernel/randomize_va_space", check=True)
    yield machine
    machine.check_kernel()
    if sanitizer.ENVIRONMENT:
        reports = machine.run(f"cat {sanitizer.REPORTS}.*; rm -f {sanitizer.REPORTS}.*").output
        found = sanitizer.failures(reports, request.node.name)
        assert not found, "\n\n".join(found)
