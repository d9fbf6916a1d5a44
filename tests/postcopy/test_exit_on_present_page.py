# SPDX-License-Identifier: GPL-2.0-or-later
"""Exits for pages that are present: swapped out, or merged by KSM. With a bitmap, there are none."""
import contextlib
from typing import Any

import pytest
from qemu.qmp import ExecuteError

from tests.lab.arches import both_interfaces
from tests.lab.kvm_interface import USERFAULT
from tests.lab.pair import Pair, until
from tests.lab.text import search
from tests.postcopy.steps import DIMM, FAR_MB, far_pair, let_go, receive_all

TIMES = 150


@contextlib.contextmanager
def all_has_come(lab, **options):
    """A pair with all memory received, whose post-copy continues, because the destination does not get the end; and the
    faults, which are counted when the guest has ended."""
    faults: dict[str, Any] = {}
    with far_pair(lab, DIMM, exits="on", **options) as pair:
        receive_all(pair)
        yield pair, faults
        let_go(pair)
        pair.destination.wait_event("end")
        faults |= pair.faults()
        pair.pause()
        pair.recover_and_finish()


@both_interfaces
@pytest.mark.slow
def test_swapped_out_again_and_again(lab, swap, by):
    """The host reclaims the page that the guest executes, while post-copy continues without other faults."""
    with all_has_come(lab) as (pair, _):
        destination = pair.destination
        page = int(search(r"RIP=(\w+)", destination.hmp("info registers"))[1], 16) & -4096
        address = search(r" is (0x\w+)", destination.hmp(f"gpa2hva {page:#x}"))[1]
        before = pair.faults()["populated"]
        for _ in range(3):
            lab.run(f"p=$(cat {destination.pidfile}); for i in $(seq {TIMES // 3}); do "
                    f"build/tests/pageout $p {address} 4096; usleep 20000; done", check=True)
            assert destination.cmd("query-status")["status"] == "running", destination.job.output
        populated = pair.faults()["populated"] - before
        assert populated == 0 if by == USERFAULT else populated > 0.8 * TIMES


@both_interfaces
@pytest.mark.slow
def test_merged(lab, ksm, by):
    """All pages of the device are one, mapped read-only, until the guest writes to them."""
    pages = FAR_MB << 8
    with all_has_come(lab, seed=1) as (pair, faults):
        lab.run(f"echo 1 >{ksm}/run", check=True)
        merged = f"cat /proc/$(cat {pair.destination.pidfile})/ksm_merging_pages"
        until(lambda: int(lab.run(merged, check=True).output) > 0.9 * pages, "pages are merged")
        before = pair.faults()["populated"]
        lab.run(f"echo 0 >{ksm}/run", check=True)
    # One exit populates all received pages of its 64 KiB.
    populated = faults["populated"] - before
    assert populated == 0 if by == USERFAULT else populated > 0.9 * pages / 16


@pytest.mark.slow
@pytest.mark.parametrize("exits", ["auto", "on"])
def test_kernel_cannot_populate(lab, hide, exits):
    """MADV_POPULATE_WRITE is of Linux 5.14. Without it, a present page that is mapped read-only would
    end the guest."""
    hide("populate")
    with Pair(lab, exits=exits, mem=8, pattern="zerowrite", zero=60) as pair:
        if exits == "on":
            with pytest.raises(ExecuteError, match="MADV_POPULATE_WRITE"):
                pair.listen()
            return
        pair.postcopy()
        pair.finish()
        assert pair.faults()["exits"] == 0
