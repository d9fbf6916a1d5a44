# SPDX-License-Identifier: GPL-2.0-or-later
"""Async page faults of x86 by their rules: a guest that counts its tokens, for each kind of fault. Linux guests:
test_async.py."""
import re
import threading
from typing import Any

import pytest

from tests.lab import guest
from tests.lab.arches import both_interfaces
from tests.lab.pair import INJECT, MIB, Pair, until
from tests.lab.paths import TESTED

slow = pytest.mark.slow
# tests/guest/x86_64/async.h
KERNEL, ANEW, SMM, NESTED, REFUSED = 1, 2, 4, 8, 16
MEM = 8


def pair_with(lab, how=0, payload="async", **options):
    return Pair(lab, **{"exits": "on", "cpus": 1, "memory_mb": 48, "mem": MEM, "async": how,
                        "payload": guest.payload(payload)} | options)


def counts(pair):
    return pair.destination.cmd("query-migrate")["postcopy-async"]


def ends(pair, least=100) -> tuple[guest.Event, Any, int]:
    """The guest's counts, QEMU's counts, and how many pages were missed. The background brings the others: QEMU sends
    some 300 a second, however low the limit, as it counts flushed bytes."""
    pair.destination.wait_event("end")
    told, qemu = pair.destination.report().the("async"), counts(pair)
    exits = pair.faults()["exits"]
    print(told, qemu, f"{exits} exits")
    assert exits > least
    pair.finish_fast()
    assert told["unknown"] == 0, told
    return told, qemu, exits


@both_interfaces
@pytest.mark.parametrize("how", [0, pytest.param(SMM, marks=slow), pytest.param(ANEW, marks=slow)])
def test_tasks(lab, how):
    """In ring 3: each task is notified once to wait and once to resume, and another one runs meanwhile."""
    with pair_with(lab, how) as pair:
        pair.postcopy(bandwidth=64 << 10)
        told, qemu, exits = ends(pair)
        assert told["announced"] == qemu["announced"] > exits / 2
        assert told["come"] + told["forgotten"] == told["announced"]
        assert qemu["delivered"] + qemu["forgotten"] == qemu["announced"]
        assert told["counter"] > 0
        # By KVM, when it enters the guest for the first time after they were enabled
        assert told["woken_all"] == (3 if how == ANEW else 2)
        assert told["forgotten"] == (4 if how == ANEW else 0)
        # One of the last four tokens may be in the slot when the guest disables them
        assert told["forgotten"] - qemu["forgotten"] in ((0, 1) if how == ANEW else (0,))
        if how == SMM:
            # The handler's page lies behind the others
            assert missed(pair, (16 + MEM) * MIB)


@slow
def test_enabled_on_a_device(lab):
    """KVM refuses the address, but keeps it in the MSR: QEMU accesses nothing there, and notifies no task."""
    with pair_with(lab, REFUSED, destination_options=("-trace", "hpet_ram_*")) as pair:
        pair.postcopy(bandwidth=64 << 10)
        told, qemu, _ = ends(pair)
        assert (told["refused"], told["forgotten"]) == (1, 4) and told["announced"] < 16
        assert qemu["delivered"] + qemu["forgotten"] == qemu["announced"]
        assert not re.findall("hpet_ram_.*", lab.run(f"cat {pair.destination.trace_log}").output)


def traced(pair, event):
    return sum(name == event for name, _ in pair.destination.trace())


@slow
def test_kicked_before_it_is_told(lab):
    """KVM_RUN returns before it enters the guest: the exception is withdrawn, and delivered with the next exit."""
    with pair_with(lab, destination=INJECT) as pair:
        pair.destination.inject.arm("async-announced")
        pair.postcopy(bandwidth=64 << 10)
        pair.destination.inject.wait_held("async-announced")
        pair.source.signal("STOP")
        # The source withholds the page of this exit
        pair.destination.inject.hold_next("async-announced")
        before = traced(pair, "kvm_async_pf_withdraw")
        pair.destination.release_when_awaited("async-announced")
        pair.destination.cmd("stop")
        # With ThreadSanitizer, a kick is a signal, which KVM notices when it has begun to deliver the exception
        assert traced(pair, "kvm_async_pf_withdraw") == before + (TESTED != "tsan")
        pair.destination.cmd("cont")
        pair.source.signal("CONT")
        told, qemu, _ = ends(pair)
        assert told["announced"] == qemu["announced"]


def test_page_comes_before_it_is_told(lab):
    """The guest is notified neither of the missing page nor of its placement."""
    with pair_with(lab, destination=INJECT) as pair:
        pair.destination.inject.arm("async-announced")
        pair.postcopy(bandwidth=64 << 10)
        pair.destination.inject.wait_held("async-announced")
        until(lambda: not pair.faults()["awaited"], "the page has come")
        pair.destination.inject.release("async-announced")
        told, qemu, _ = ends(pair)
        # As in the test above
        assert traced(pair, "kvm_async_pf_withdraw") or TESTED == "tsan"
        assert told["announced"] == qemu["announced"]


@pytest.mark.parametrize("flag", [pytest.param(False, marks=slow), True])
def test_named_model(lab, flag):
    """The guest ignores CPUID, but QEMU does not."""
    words = ("-cpu", "qemu64", *("-global", "x86_64-cpu.kvm-asyncpf-int=on") * flag)
    with pair_with(lab, source_options=words, destination_options=words) as pair:
        pair.postcopy(bandwidth=64 << 10)
        pair.destination.wait_event("end")
        qemu = counts(pair)
        assert bool(qemu["announced"]) == flag and bool(qemu["refused-without"]) != flag, qemu
        pair.finish_fast()


@pytest.mark.parametrize("irqchip", ["on", pytest.param("split", marks=slow)])
def test_main_thread_is_busy(lab, irqchip):
    """The main thread holds the BQL all the time, and the guest is still notified of pages and of their placement."""
    with pair_with(lab, destination=INJECT, machine=f"pc,kernel-irqchip={irqchip}") as pair:
        pair.postcopy(bandwidth=64 << 10)
        until(lambda: counts(pair)["delivered"] > 4, "pages come")
        pair.destination.inject.arm("async-info")
        asks = threading.Thread(target=counts, args=(pair,))
        asks.start()
        pair.destination.inject.wait_held("async-info")
        before = traced(pair, "kvm_async_pf_send")
        until(lambda: traced(pair, "kvm_async_pf_send") > before + 100, "pages come while the main thread has the BQL",
              timeout=20)
        pair.destination.inject.release("async-info")
        asks.join()
        ends(pair)


def missed(pair, address):
    return [text for name, text in pair.destination.trace() if name == "kvm_exit_on_missing"
            and f"gpa {address:#x}," in text]


def test_kernel(lab):
    """The kernel waits, can be interrupted, and QEMU requests the pages around its page, too."""
    with pair_with(lab, KERNEL) as pair:
        pair.postcopy(bandwidth=64 << 10)
        told, qemu, exits = ends(pair, 4)
        ahead = pair.faults()["ahead"]
        assert told["announced"] == qemu["announced"] == 0
        assert qemu["refused-kernel"] > exits / 2 and qemu["halted"] > exits / 4
        assert ahead > 8 * exits, ahead


@slow
def test_nested_guest(lab):
    """Like KVM, QEMU notifies neither a nested guest nor the guest that runs it."""
    with pair_with(lab, NESTED, payload="nested", cpus=2, mem=16) as pair:
        pair.midst(bandwidth=64 << 10)
        assert missed(pair, 32 * MIB - 4096)
        assert counts(pair)["halted"] > 0 and counts(pair)["announced"] == 0
        pair.finish_fast()


def test_blackout_waits_for_no_filter(lab):
    """KVM needs tens of milliseconds to install an MSR filter."""
    with pair_with(lab, traced=False, destination_options=["-trace", "kvm_vm_ioctl", "-trace", "loadvm_process_command",
                                                           "-D", f"{lab.tmp}/log"]) as pair:
        pair.postcopy()
        pair.finish_fast()
        log = lab.read_file(f"{lab.tmp}/log").decode()
        [listens] = [m.start() for m in re.finditer("com=POSTCOPY_LISTEN", log)]
        # KVM_X86_SET_MSR_FILTER: one call of upstream, and one for each of two MSRs
        filters = [m.start() for m in re.finditer("kvm_vm_ioctl type 0x4[0-9a-f]{3}aec6", log)]
        assert len(filters) == 3 and max(filters) < listens
