# SPDX-License-Identifier: GPL-2.0-or-later
"""Steps that several tests of post-copy take."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab import guest
from tests.lab.failures import PhaseWire
from tests.lab.pair import Pair, until
from tests.lab.paths import PATIENCE
from tests.lab.proxy import MAIN, Endless
from tests.lab.qtest import Qtest

# Freed memory gets other contents.
PERTURB = ("env", "MALLOC_PERTURB_=165")
FAR_MB = 8
DIMM = ("-object", f"memory-backend-ram,id=far,size={FAR_MB}M", "-device", "pc-dimm,id=dimm,memdev=far")


def assert_refused(side, reason, command, **arguments):
    """QEMU answers the command with an error that names the reason."""
    with pytest.raises(ExecuteError, match=reason):
        side.cmd(command, **arguments)


def succeeds(side, command, **arguments):
    try:
        side.cmd(command, **arguments)
    except ExecuteError:
        return False
    return True


def events(side):
    """The names of QEMU's events since the last call."""
    return [event["event"] for event in side.qmp.get_events()]


def ram(pair):
    """The source's counts of what it has sent."""
    return pair.source.cmd("query-migrate")["ram"]


def held_at(pair, phase="switch", part=0.5, mute=False):
    """Migrate until a PhaseWire holds the main channel at the phase; returns the wire."""
    wire = pair.wire_of(PhaseWire, pair.listen(), phase=phase, part=part, mute=mute)
    # Some memory must be missing when the connection breaks.
    pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=64 << 10)
    pair.start(wire.uri)
    pair.source.cmd("migrate-start-postcopy")
    assert wire.reached.wait(60 * PATIENCE)
    return wire


def until_all_sent(pair):
    until(lambda: "migration_completion_postcopy_end_after_complete" in dict(pair.source.trace()),
          "the source has sent all")


def far_pair(lab, device, **options):
    """A pair whose guest does not touch the device's memory before let_go()."""
    return Pair(lab, memory_mb="32,slots=1,maxmem=1G", cpus=1, payload=guest.payload("far"), mem=FAR_MB,
                both_options=device, destination_options=Qtest.arguments(lab, "destination"), **options)


def receive_all(pair):
    """Migrate all memory of a far_pair(), and not the end: post-copy continues."""
    pair.postcopy(pair.wire(pair.listen(), lie=Endless(), lying=MAIN).uri, bandwidth=0)
    until_all_sent(pair)
    pair.destination.wait_event("timing")
    until(lambda: not pair.faults()["awaited"], "all has come")


def let_go(pair):
    until(lambda: pair.destination.cmd("query-status")["running"], "the guest runs")
    pair.destination.hmp("o/b 0x70 0x40")
    pair.destination.hmp("o/b 0x71 1")
