# SPDX-License-Identifier: GPL-2.0-or-later
"""Each test once by each kernel interface for exits; the second time it is slow."""
from pathlib import Path

import pytest

from tests.lab import interface

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, params=[interface.EXIT_ON_MISSING,
                                      pytest.param(interface.USERFAULT, marks=pytest.mark.slow)])
def by(request, monkeypatch):
    """The interface that L1 offers, also one that the test boots."""
    before = interface.chosen()
    monkeypatch.setenv("INTERFACE", request.param)
    if "lab" not in request.fixturenames:
        yield request.param
        return
    lab = request.getfixturevalue("lab")
    interface.offer(lab, request.param)
    yield request.param
    interface.offer(lab, before)


def pytest_collection_modifyitems(config, items):
    """Without exits, there is no second time."""
    def needless(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return (item.path.parent == HERE and params.get("by") == interface.USERFAULT
                and params.get("exits") == "off")
    drop = [item for item in items if needless(item)]
    if drop:
        config.hook.pytest_deselected(items=drop)
        items[:] = [item for item in items if not needless(item)]
