# SPDX-License-Identifier: GPL-2.0-or-later
"""postcopy-fault-exits on a kernel with the feature, and on one without it."""
import pytest
from qemu.qmp import ExecuteError

from tests.lab import guest, kvm_interface
from tests.lab.arches import both_interfaces, on_both
from tests.lab.pair import Pair, until
from tests.lab.paths import qemu

NEITHER = "the host kernel has neither KVM_MEM_EXIT_ON_MISSING nor KVM_MEM_USERFAULT"
MISSING = f"postcopy-fault-exits=on: {NEITHER}"
REMEDY = "Set postcopy-fault-exits to 'auto' or 'off', or run on a host kernel that has the feature."


@pytest.fixture
def old_kernel(lab):
    """As QEMU sees it, an old kernel: 236 is KVM_CAP_PRE_FAULT_MEMORY, and exit-on-missing does not exist.
    tests/lab/kvm-exit-on-missing.c --hidden checks that."""
    with kvm_interface.offered(lab):
        yield lab


def served(pair):
    """The faults of a guest that misses its memory before the background sends it, however slow the guest is."""
    pair.postcopy(bandwidth=64 << 10)
    pair.check_memory()
    pair.finish_fast()
    return pair.faults()


def served_by_uffd_alone(pair):
    faults = served(pair)
    assert faults["exits"] == faults["populated"] == 0 and faults["uffd"] > 300, faults


@both_interfaces
@on_both()
def test_probe(lab):
    """The default looks for the feature in a scratch VM while the source's guest runs."""
    with Pair(lab, mem=2) as pair:
        pair.start()
        until(lambda: "kvm_exit_on_missing_probe" in dict(pair.destination.trace()), "the probe")
        assert pair.source.cmd("query-status")["status"] == "running"
        assert pair.source.status() == "active"


@both_interfaces
@on_both()
def test_auto_is_on_where_the_kernel_has_it(lab):
    with Pair(lab, mem=2) as pair:
        assert served(pair)["exits"] > 300
        assert "postcopy-fault-exits: auto" in pair.destination.hmp("info migrate_parameters")


@on_both()
def test_auto_is_off_where_the_kernel_has_it_not(old_kernel):
    with Pair(old_kernel, mem=2) as pair:
        served_by_uffd_alone(pair)
        assert ("postcopy_fault_exits_off", NEITHER) in pair.destination.trace()


@on_both()
def test_on_is_refused_at_migrate_incoming(old_kernel):
    with Pair(old_kernel, exits="on", mem=2) as pair:
        with pytest.raises(ExecuteError, match=MISSING):
            pair.listen()
        # The destination accepts another value, and the source is unaffected.
        assert pair.destination.hmp("migrate_set_parameter postcopy-fault-exits auto") == ""
        served_by_uffd_alone(pair)


@on_both(quick=True)
def test_on_is_refused_on_the_command_line(old_kernel):
    result = old_kernel.run(f"{qemu(old_kernel.arch)} -accel kvm -cpu max "
                            f"-machine {guest.MACHINE[old_kernel.arch]} -nodefaults -display none "
                            "-global migration.postcopy-fault-exits=on "
                            "-global migration.x-postcopy-ram=on -incoming tcp:127.0.0.1:4900")
    assert result.rc == 1
    assert MISSING in result.output and REMEDY in result.output


@on_both()
def test_on_is_refused_when_postcopy_is_announced(old_kernel):
    """QEMU checks a value that is set after migrate-incoming when the source announces post-copy."""
    with Pair(old_kernel, mem=2) as pair:
        uri = pair.listen()
        pair.destination.cmd("migrate-set-parameters", postcopy_fault_exits="on")
        pair.source.wait_event("ready")
        pair.source.cmd("migrate", uri=uri)
        pair.source.wait_status("failed")
        assert MISSING in pair.destination.job.wait().output
        # The guest stays on the source.
        assert pair.source.cmd("query-status")["status"] == "running"
