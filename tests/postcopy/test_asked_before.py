# SPDX-License-Identifier: GPL-2.0-or-later
"""The connection breaks while the source sends a huge page that was asked for."""
import pytest

from tests.lab.pair import INJECT, MIB, Pair

POINT = "save-within-page"


@pytest.mark.slow
def test_recovery_within_a_requested_page(lab):
    """A part of the request has been served: the page is sent from its beginning again."""
    with Pair(lab, source=INJECT, exits="on", capabilities=(), cpus=1, memory_mb=64, mem=48, pattern="samehuge",
              backend="memory-backend-memfd,hugetlb=on,hugetlbsize=2M") as pair:
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=8 * MIB)
        pair.start()
        # The only vCPU has nothing else that it could have asked for.
        pair.source.inject.arm(POINT)
        pair.source.cmd("migrate-start-postcopy")
        pair.wait_paused()
        assert pair.source.inject.passed(POINT)
        pair.recover()
        pair.finish()
