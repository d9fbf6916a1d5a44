# SPDX-License-Identifier: GPL-2.0-or-later
"""What is done before the guest stops on the source."""
from tests.lab.arches import both_interfaces, on_both
from tests.lab.pair import Pair, until


@both_interfaces
@on_both()
def test_probe(lab):
    """The default looks for the feature in a scratch VM while the source's guest runs."""
    with Pair(lab, mem=8) as pair:
        pair.start()
        until(lambda: "kvm_exit_on_missing_probe" in dict(pair.destination.trace()), "the probe")
        assert pair.source.cmd("query-status")["status"] == "running"
        assert pair.source.status() == "active"
