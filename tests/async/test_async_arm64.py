# SPDX-License-Identifier: GPL-2.0-or-later
"""Async page faults of arm64: options that QEMU refuses on the command line, and QEMU's service for a guest without
async page faults. Linux guests: test_async.py."""
from tests.lab.arches import on_aarch64
from tests.lab.async_guest import LOAD, all_delivered, finish, guest_with, until_announced
from tests.lab.linux_guest import ASYNC_PF
from tests.lab.linux_pair import LinuxPair, LinuxSide
from tests.lab.pair import FORK, MIB, STOCK, until

ON = ASYNC_PF["aarch64"]
SDEI, ASYNC = ON[:2], ON[2:]


@on_aarch64("words, machine, reason", [
    (ASYNC, None, "x-kvm-async-pf=on needs kvm-sdei=on"),
    (ON, "virt,gic-version=2,kernel-irqchip=off", "x-kvm-async-pf=on needs a GIC in the kernel"),
], quick=True)
def test_cannot_be_had(lab, words, machine, reason):
    ended = LinuxSide(lab, "source", FORK, words, {"machine": machine}).job.wait()
    assert ended.rc == 1
    assert reason in ended.output


def is_refused(pair, reason):
    pair.source.cmd("migrate", uri=pair.listen())
    until(lambda: pair.source.status() == "failed", "the migration fails")
    pair.destination.wait_says(reason)
    until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on the source")


@on_aarch64("words, reason", [
    (SDEI, "x-kvm-async-pf"),
    ((), "kvm-sdei"),
], quick=[((), "kvm-sdei")])
def test_the_other_side_is_without(lab, words, reason):
    with guest_with(lab, destination_options=words) as pair:
        pair.source.wait_ready()
        is_refused(pair, f"CPU property {reason} is on on the source: start the destination with the same")


@on_aarch64("has", ["nothing", "sdei"])
def test_guest_without(lab, has):
    """The guest is not notified of missing pages, but its vCPU serves interrupts while it waits."""
    words = SDEI if has == "sdei" else ()
    with guest_with(lab, source_options=words, destination_options=words) as pair:
        pair.postcopy(bandwidth=8 * MIB)
        pair.until_faults()
        counts = until(lambda: (counts := pair.async_counts())["halted"] > 5 and counts, "the vCPU is suspended")
        assert counts["refused-without"] > 0, counts
        finish(pair)
        assert pair.async_counts()["announced"] == 0


@on_aarch64("source, destination", [(FORK, STOCK), (STOCK, FORK)])
def test_stock(lab, source, destination):
    """The properties are off: the stream is that of stock QEMU."""
    with LinuxPair(lab, source=source, destination=destination, **LOAD) as pair:
        pair.postcopy()
        finish(pair)


@on_aarch64("way", ["precopy", "postcopy"])
def test_told_after_it_has_moved(lab, way):
    """A guest that was moved once must wake all its tasks; then it is notified of missing pages again."""
    with guest_with(lab, cpus=2) as pair:
        if way == "postcopy":
            pair.postcopy()
            finish(pair)
        else:
            pair.source.wait_ready()
            pair.precopy()
            pair.wait_completed()
        pair.until_reports(2)
        taken = [text for name, text in pair.destination.trace() if name == "kvm_arm_async_pf_taken"]
        assert sum("token 0xffffffff" in text for text in taken) == 2, taken
        pair.next()
        pair.postcopy(bandwidth=8 * MIB)
        until_announced(pair)
        finish(pair)
        all_delivered(pair)
