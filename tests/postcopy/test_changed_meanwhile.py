# SPDX-License-Identifier: GPL-2.0-or-later
"""Settings on which a migration in progress depends cannot be changed, on either side."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab.pair import MIB, Pair

IN_PROGRESS = "in progress"


def test_capabilities_of_a_destination(place):
    """Capabilities decide the meaning of a stream's end: without postcopy-ram, no page is missing."""
    with Pair(place, mem=8) as pair:
        pair.start()

        def assert_refused():
            for name in "postcopy-preempt", "postcopy-ram":
                with pytest.raises(ExecuteError, match=IN_PROGRESS):
                    pair.destination.set_capabilities(name, state=False)

        assert_refused()
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=64 << 10)
        pair.source.cmd("migrate-start-postcopy")
        pair.until_faults()
        assert_refused()
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
        assert_refused()
        pair.recover_and_finish()
        pair.destination.set_capabilities("postcopy-preempt", state=False)


def test_number_of_channels(place):
    """All loops over the channels end at the parameter's value."""
    with Pair(place, mem=16, capabilities=None) as pair:
        pair.use_multifd()
        pair.start(bandwidth=MIB)
        for side in pair.sides:
            for value in 1, 255:
                with pytest.raises(ExecuteError, match=f"multifd-channels.*{IN_PROGRESS}"):
                    side.cmd("migrate-set-parameters", multifd_channels=value)
            with pytest.raises(ExecuteError, match=f"mode.*{IN_PROGRESS}"):
                side.cmd("migrate-set-parameters", mode="cpr-reboot")
            # Other parameters, and the same number, can be set.
            side.cmd("migrate-set-parameters", multifd_channels=2, announce_rounds=3)
        pair.source.cmd("migrate-set-parameters", max_bandwidth=128 * MIB, downtime_limit=20000)
        pair.finish()
        pair.destination.cmd("migrate-set-parameters", multifd_channels=4)
