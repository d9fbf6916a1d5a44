# SPDX-License-Identifier: GPL-2.0-or-later
"""A vCPU misses a page, and is not scheduled for so long that post-copy is over when it continues."""
import contextlib

import pytest

from tests.lab.arches import both_interfaces
from tests.lab.pair import INJECT, Pair, until

# Freed memory gets other contents.
PERTURB = ("env", "MALLOC_PERTURB_=165")


def has_listen_thread(side):
    return "mig/dst/listen" in side.lab.run(f"cat /proc/$(cat {side.pidfile})/task/*/comm").output


@contextlib.contextmanager
def held_vcpu(lab, point, blocktime):
    """A pair with a vCPU of the destination held at the point when all pages are received."""
    capabilities = ("postcopy-preempt", "postcopy-blocktime") if blocktime else ("postcopy-preempt",)
    with Pair(lab, exits="on", source=INJECT, destination=INJECT, capabilities=capabilities,
              mem=16, wrapper=PERTURB) as pair:
        pair.midst(bandwidth=64 << 10)
        pair.destination.inject.arm(point)
        pair.destination.inject.wait_held(point)
        yield pair
        pair.finish()


def may_come(condition):
    """Wait some seconds for the condition, but continue without it: another order is right, too."""
    with contextlib.suppress(AssertionError):
        until(condition, "what may come", timeout=5)


@both_interfaces
@pytest.mark.parametrize("point, blocktime", [
    pytest.param("postcopy-exit", True, marks=pytest.mark.slow),
    ("postcopy-ask", True),
    pytest.param("postcopy-exit", False, marks=pytest.mark.slow),
    pytest.param("postcopy-ask", False, marks=pytest.mark.slow),
])
def test_after_the_end(lab, point, blocktime):
    """The page was received without a request."""
    with held_vcpu(lab, point, blocktime) as pair:
        pair.fast()
        may_come(lambda: not has_listen_thread(pair.destination))
        pair.destination.inject.release(point)


@pytest.mark.slow
def test_while_the_return_path_is_closed(lab):
    """The vCPU requests its page."""
    with held_vcpu(lab, "postcopy-ask", False) as pair:
        inject = pair.destination.inject
        inject.arm("rp-close")
        pair.fast()
        inject.wait_held("rp-close")
        inject.arm("rp-message")
        inject.release("postcopy-ask")
        may_come(lambda: inject.held("rp-message"))
        inject.release("rp-close")
        may_come(lambda: not has_listen_thread(pair.destination))
        inject.release("rp-message")
