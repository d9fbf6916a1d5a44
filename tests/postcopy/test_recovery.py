# SPDX-License-Identifier: GPL-2.0-or-later
"""Post-copy that loses its connection while vCPUs wait for pages, and goes on."""
import pytest

from pair import Pair


def pause(pair):
    """By the administrator's command."""
    pair.source.cmd("migrate-pause")


def reset(pair):
    """The connection breaks."""
    pair.cut()


def silence(pair):
    """Nothing comes through, and nothing tells; the administrator gives up on both sides."""
    pair.black_hole()
    pair.until_all_wait()
    for side in pair.sides:
        assert side.status() == "postcopy-active"
        side.cmd("migrate-pause")


@pytest.mark.parametrize("preempt", [True, False], ids=["preempt", "one-channel"])
@pytest.mark.parametrize("exits", ["on", "off"])
@pytest.mark.parametrize("trouble", [pause, reset, silence])
def test_recovery(lab, trouble, exits, preempt):
    capabilities = ("postcopy-preempt",) if preempt else ()
    with Pair(lab, exits=exits, capabilities=capabilities, pattern="shared", mem=16) as pair:
        pair.postcopy(pair.through_proxy(pair.listen()))
        pair.destination.wait_event("timing")
        trouble(pair)
        pair.wait_paused()
        counts = pair.until_all_wait()
        assert pair.destination.cmd("query-status")["status"] == "running"
        if exits == "on":
            # vCPUs that wait for the recovery do what else they are asked to do.
            assert pair.destination.hmp("info registers -a").count("RIP=") == 4
            assert pair.faults()["exits"] == counts["exits"]
        pair.recover()
        pair.finish()
        assert pair.faults()["requests"] > counts["requests"]
        if exits == "on":
            assert "postcopy_fault_ask_again" in dict(pair.destination.trace())


def test_recovery_while_the_guest_is_stopped(lab):
    with Pair(lab, exits="on", pattern="shared", mem=16) as pair:
        pair.postcopy()
        pair.destination.wait_event("timing")
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
        pair.until_all_wait()
        pair.destination.cmd("stop")
        pair.recover()
        pair.destination.cmd("cont")
        pair.finish()
