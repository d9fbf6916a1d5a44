# SPDX-License-Identifier: GPL-2.0-or-later
"""Two sides that share a disk never both run the guest: its image lock decides, or the operator does."""
import shlex
import time

import pytest

from tests.lab import tls
from tests.lab.backends import shared_disk
from tests.lab.failures import Failures
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import INJECT, MIB, Pair, until
from tests.lab.proxy import Unheard
from tests.postcopy.steps import assert_refused, events, held_at

LOCK = 'Failed to get "write" lock'
CANNOT_CHECK = "QEMU cannot check that"


def to_the_package(pair):
    """The source has stopped the guest and deactivated its disks, and receives nothing more; the destination has not
    received the packaged device state yet."""
    return held_at(pair, part=0, mute=True)


def cut(pair, wire):
    wire.cut()
    pair.source.wait_status("postcopy-paused")


def status(side):
    return side.cmd("query-status")["status"]


def runs(side):
    return status(side) == "running"


def test_source_does_not_take_disks_that_are_in_use(place):
    """The destination runs the guest, without an answer to the source, which cannot be made to run it as well."""
    _, words = shared_disk(place)
    with Pair(place, mem=8, both_options=words) as pair:
        wire = to_the_package(pair)
        wire.go()
        until(lambda: runs(pair.destination), "the guest runs on the destination")
        cut(pair, wire)
        for arguments in {}, {"destination_dead": True}:
            assert_refused(pair.source, LOCK, "migrate_cancel", **arguments)
            assert pair.source.status() == "postcopy-paused"
            assert not runs(pair.source)
        assert LOCK in pair.source.hmp("migrate_cancel")
        pair.destination.wait_status("postcopy-paused")
        pair.recover_and_finish()
        assert not runs(pair.source)


def test_source_takes_its_disks_back(place):
    """The lock is free: no QEMU uses the disks."""
    _, words = shared_disk(place)
    with Pair(place, mem=8, both_options=words) as pair:
        wire = to_the_package(pair)
        pair.destination.signal("KILL")
        cut(pair, wire)
        faults = Failures(pair)
        pair.source.cmd("migrate_cancel")
        until(lambda: pair.source.status() == "cancelled" and runs(pair.source), "the guest runs on the source")
        faults.check_by_another()


@pytest.mark.parametrize("by", ["QMP", "HMP"])
@pytest.mark.parametrize("disk", [("file.locking=off",), ("", "share-rw=on"), None],
                         ids=["locking-off", "share-rw", "none"])
def test_word_of_the_operator(place, disk, by):
    """Without a lock, the operator decides."""
    words = shared_disk(place, *disk)[1] if disk else ()
    with Pair(place, mem=8, both_options=words) as pair:
        wire = to_the_package(pair)
        pair.destination.signal("KILL")
        cut(pair, wire)
        assert_refused(pair.source, CANNOT_CHECK, "migrate_cancel")
        assert CANNOT_CHECK in pair.source.hmp("migrate_cancel")
        assert pair.source.status() == "postcopy-paused"
        if by == "QMP":
            pair.source.cmd("migrate_cancel", destination_dead=True)
        else:
            assert not pair.source.hmp("migrate_cancel -d")
        until(lambda: pair.source.status() == "cancelled" and runs(pair.source), "the guest runs on the source")


@pytest.fixture
def in_use(place):
    """Lets another process use an image; returns a function that ends it."""
    jobs = []

    def use(image):
        # Bytes that QEMU locks in an image: 101 and 201 mean that one process writes, and no other may.
        lock = ("import fcntl,os,struct,sys,time; f=os.open(sys.argv[1],os.O_RDWR);"
                "[fcntl.fcntl(f,37,struct.pack('hhqqi',fcntl.F_RDLCK,0,n,1,0)) for n in (101,201)];"
                "print('locked',flush=True); time.sleep(10000)")
        jobs.append(job := place.job(f"exec python3 -c {shlex.quote(lock)} {image}"))
        until(lambda: "locked" in job.output or not job.running, "the image is locked")
        assert job.running, job.output
        return job.kill
    yield use
    for job in jobs:
        job.kill()


@pytest.mark.parametrize("start", ["by-itself", "cont"])
@pytest.mark.parametrize("way", ["post-copy", "pre-copy"])
def test_destination_cannot_take_its_disks(place, in_use, way, start):
    """Another process uses them: the guest is paused, and cont fails with the reason. cont: QEMU was started with -S,
    and cont was used before the guest was received."""
    image, words = shared_disk(place)
    stopped = ("-S",) if start == "cont" else ()
    with Pair(place, mem=8, both_options=words, destination_options=stopped,
              capabilities=() if way == "post-copy" else None) as pair:
        if stopped:
            pair.destination.cmd("cont")
        pair.source.wait_ready()
        # The source has its own locks, and requests no more.
        free = in_use(image)
        if way == "post-copy":
            pair.postcopy()
        else:
            pair.precopy()
        until(lambda: status(pair.destination) == "paused", "the guest is paused")
        pair.destination.wait_says(LOCK)
        assert "STOP" in events(pair.destination)
        assert_refused(pair.destination, LOCK, "cont")
        assert status(pair.destination) == "paused"
        free()
        pair.destination.cmd("cont")
        assert runs(pair.destination)
        pair.fast()
        pair.finish()


def test_source_that_failed_does_not_run_without_its_disks(place, in_use):
    """The destination cannot load the devices: otherwise the source would resume the guest by itself."""
    image, words = shared_disk(place)
    with Pair(place, mem=8, both_options=words, source_options=("-device", "pvpanic-pci")) as pair:
        pair.source.wait_ready()
        free = in_use(image)
        pair.start()
        pair.source.cmd("migrate-start-postcopy")
        pair.source.wait_status("failed")
        until(lambda: status(pair.source) == "paused", "the guest is paused")
        assert_refused(pair.source, LOCK, "cont")
        assert status(pair.source) == "paused"
        free()
        pair.source.cmd("cont")
        assert runs(pair.source)


@pytest.mark.parametrize("way, runs_early", [("post-copy", False), ("post-copy", True), ("pre-copy", False)])
def test_guest_that_is_stopped_stays_so(place, way, runs_early):
    """A stopped guest's memory is received like another's, and the guest can run before all is received."""
    with Pair(place, mem=8, zero=0, capabilities=() if way == "post-copy" else None) as pair:
        pair.source.wait_ready()
        pair.source.cmd("stop")
        if way == "pre-copy":
            pair.precopy()
        else:
            pair.postcopy(bandwidth=64 << 10 if runs_early else MIB)
            until(lambda: status(pair.destination) == "paused", "the guest has come")
            pair.until_faults()
            if runs_early:
                pair.destination.cmd("cont")
                pair.until_requests(0)
            else:
                before = pair.faults()["copied-bytes"]
                until(lambda: pair.faults()["copied-bytes"] > before, "memory comes")
            pair.fast()
        pair.destination.wait_status("completed")
        if not runs_early:
            assert status(pair.destination) == "paused"
            assert not pair.destination.report().events
            pair.destination.cmd("cont")
        pair.finish()


@pytest.mark.slow
def test_guest_that_is_stopped_goes_on_to_a_third_host(lab):
    """Nothing has activated its disk meanwhile."""
    _, words = shared_disk(lab)
    with LinuxPair(lab, mem=16, both_options=words) as pair:
        pair.source.wait_ready()
        pair.source.cmd("stop")
        for hop in range(2):
            if hop:
                pair.next()
            pair.source.cmd("migrate-set-parameters", max_bandwidth=MIB, max_postcopy_bandwidth=0)
            pair.source.cmd("migrate", uri=pair.listen())
            pair.source.cmd("migrate-start-postcopy")
            pair.wait_completed()
            assert status(pair.destination) == "paused"
        pair.destination.cmd("cont")
        pair.check_threads()
        pair.check_memory()


def test_disk_is_copied_beside_postcopy(place):
    """By NBD and TLS, as where hosts share no storage: the mirror ends while the guest is stopped for the switch."""
    keys = tls.directory(place)
    with Pair(place, exits=None, mem=16, pattern="shared", tls=keys) as pair:
        for side in pair.sides:
            side.add_disk(8 * MIB)
        source, destination = pair.sides
        address = {"host": "127.0.0.1", "port": str(pair.port())}
        destination.cmd("nbd-server-start", addr={"type": "inet", "data": address}, tls_creds="tls")
        destination.cmd("block-export-add", id="export", type="nbd", node_name="disk", writable=True)
        source.cmd("blockdev-add", driver="nbd", node_name="there", export="disk", tls_creds="tls",
                   server={"type": "inet", **address})
        source.cmd("blockdev-mirror", job_id="mirror", device="disk", target="there", sync="full")
        until(lambda: source.cmd("query-jobs")[0]["status"] == "ready", "the mirror is ready")
        source.set_capabilities("pause-before-switchover")
        pair.start()
        source.cmd("migrate-start-postcopy")
        until(lambda: source.status() == "pre-switchover", "the guest is stopped for the switch")
        source.cmd("block-job-cancel", device="mirror")
        until(lambda: not source.cmd("query-jobs"), "the mirror ends")
        destination.cmd("nbd-server-stop")
        source.cmd("migrate-continue", state="pre-switchover")
        source.wait_status("postcopy-active", "completed")
        pair.finish_fast()


def test_quit_in_a_recovery(place):
    """The migration thread waits for an answer of the destination, which does not come."""
    with Pair(place, mem=8) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri, bandwidth=64 << 10)
        wire.cut()
        pair.wait_paused()
        wire = pair.wire_of(Unheard, pair.listen("migrate-recover"))
        pair.source.cmd("migrate", uri=wire.uri, resume=True)
        pair.source.wait_status("postcopy-recover")
        pair.source.cmd("quit")
        assert pair.source.job.wait(20).rc == 0
        wire.heard.set()


@pytest.mark.parametrize("when", ["pre-copy", "post-copy", pytest.param("paused", marks=pytest.mark.slow)])
def test_quit_waits_for_the_migration_thread(place, when):
    """The thread uses the disks, which QEMU would close; and it resumes no guest that the destination may run."""
    _, words = shared_disk(place)
    with Pair(place, source=INJECT, mem=8, both_options=words) as pair:
        inject = pair.source.inject
        if when == "pre-copy":
            pair.start()
        else:
            wire = pair.wire(pair.listen())
            pair.midst(wire.uri, bandwidth=64 << 10)
        if when == "paused":
            cut(pair, wire)
        before = pair.source.report().events
        inject.arm("migration-ends")
        pair.source.cmd("quit")
        until(lambda: inject.held("migration-ends") or not pair.source.job.running, "the thread ends, or QEMU")
        time.sleep(2)
        assert pair.source.job.running, pair.source.job.output
        assert pair.source.has_open("shared.raw")
        inject.release("migration-ends")
        assert pair.source.job.wait().rc == 0, pair.source.job.output
        if when != "pre-copy":
            assert pair.source.report().events == before
