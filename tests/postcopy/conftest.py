# SPDX-License-Identifier: GPL-2.0-or-later
"""The tests that make check runs, once more by the other kernel interface for exits in make check-slow; those that
only that runs, on one of the two, by turns. What -k asks for by an interface's name is run with it."""
import contextlib
import zlib
from pathlib import Path

import pytest

from tests.lab import kvm_interface

HERE = Path(__file__).parent
FIRST = kvm_interface.chosen()
SECOND, = (name for name in kvm_interface.ALL if name != FIRST)


@pytest.fixture(autouse=True, params=[FIRST, pytest.param(SECOND, marks=pytest.mark.slow)])
def by(request, monkeypatch):
    """The interface that L1 offers, also one that the test boots."""
    with contextlib.ExitStack() as stack:
        if "lab" in request.fixturenames:
            stack.enter_context(kvm_interface.offered(request.getfixturevalue("lab"), request.param))
        monkeypatch.setenv("INTERFACE", request.param)
        yield request.param


def pytest_collection_modifyitems(config, items):
    """Without exits, there is no second time."""
    def case(item):
        """The same for both interfaces."""
        return item.nodeid.replace(f"[{item.callspec.params['by']}", "[", 1)

    ours = [item for item in items if item.path.parent == HERE and "by" in item.callspec.params]
    slow = {case(item) for item in ours if item.callspec.params["by"] == FIRST
            and item.get_closest_marker("slow")}
    asked = any(name in config.option.keyword for name in kvm_interface.ALL)

    def needless(item):
        params = item.callspec.params
        if params.get("exits") == "off":
            return params["by"] == SECOND
        chosen = kvm_interface.ALL[zlib.crc32(case(item).encode()) % 2]
        return case(item) in slow and not asked and params["by"] != chosen
    dropped = {item for item in ours if needless(item)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]
