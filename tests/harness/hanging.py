# SPDX-License-Identifier: GPL-2.0-or-later
"""Tests that hang, each in another call: only for test_limits.py."""
import threading

import pytest

from tests.lab.pair import Pair

booted: list[int] = []     # first-level machines


@pytest.mark.timeout(20)
def test_monitor(lab):
    """The source stops during post-copy, and its monitor with it."""
    booted.append(lab.process.pid)
    with Pair(lab, exits="on", mem=8) as pair:
        pair.midst(bandwidth=64 << 10)
        pair.source.signal("STOP")
        pair.until_all_wait()
        pair.source.cmd("query-status")


def test_next(lab):
    assert booted != [lab.process.pid]
    assert lab.run("echo booted anew").output == "booted anew\n"


@pytest.mark.timeout(1)
def test_thread():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()


@pytest.fixture
def hangs():
    threading.Event().wait()


@pytest.mark.timeout(1)
@pytest.mark.usefixtures("hangs")
def test_setup():
    pass


@pytest.mark.timeout(1)
def test_teardown(request):
    request.addfinalizer(threading.Event().wait)
    raise AssertionError("this is no hang")
