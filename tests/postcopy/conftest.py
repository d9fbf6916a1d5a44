# SPDX-License-Identifier: GPL-2.0-or-later
"""Each test once by each kernel interface for exits; the second time it is slow."""
import contextlib
from pathlib import Path

import pytest

from tests.lab import interface

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, params=[interface.EXIT_ON_MISSING,
                                      pytest.param(interface.USERFAULT, marks=pytest.mark.slow)])
def by(request, monkeypatch):
    """The interface that L1 offers, also one that the test boots."""
    with contextlib.ExitStack() as stack:
        if "lab" in request.fixturenames:
            stack.enter_context(interface.offered(request.getfixturevalue("lab"), request.param))
        monkeypatch.setenv("INTERFACE", request.param)
        yield request.param


def pytest_collection_modifyitems(config, items):
    """Without exits, there is no second time."""
    def needless(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return (item.path.parent == HERE and params.get("by") == interface.USERFAULT
                and params.get("exits") == "off")
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        (dropped if needless(item) else kept).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
