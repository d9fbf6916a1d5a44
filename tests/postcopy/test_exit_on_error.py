# SPDX-License-Identifier: GPL-2.0-or-later
"""A destination that fails before it runs the guest, with exit-on-error=false: it stays, and reports the reason."""
from tests.lab.missing_at_load import QUEUE_PAGES, SLOT, set_queue
from tests.lab.pair import Pair, until
from tests.lab.proxy import MAIN, Nothing


def asked_to_stay(pair):
    """Let the destination listen; returns the URI for the source."""
    port = pair.port()
    pair.destination.cmd("migrate-incoming", uri=f"tcp:{pair.lab.address}:{port}", exit_on_error=False)
    return pair.uri_of(port)


def assert_stays(pair):
    """The destination has failed and reports that; nothing of post-copy is left there."""
    pair.destination.wait_status("failed")
    assert "load of migration failed" in pair.destination.cmd("query-migrate")["error-desc"]
    until(lambda: not pair.destination.has_open("[userfaultfd]"), "memory is not missing any more")
    until(lambda: "mig/dst/listen" not in [thread.name for thread in pair.destination.threads()], "the thread ends")
    assert not pair.destination.cmd("query-status")["running"]
    pair.destination.cmd("quit")
    assert pair.destination.job.wait().rc == 0


def test_destination_stays_if_it_is_asked_to(place):
    """The source resumes the guest at once, though it has memory for hours to send."""
    options = ("-device", "pvpanic-pci")
    with Pair(place, mem=8, source_options=options) as pair:
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=1 << 10)
        pair.start(asked_to_stay(pair))
        pair.source.cmd("migrate-start-postcopy")
        pair.source.wait_status("failed")
        until(lambda: pair.source.cmd("query-status")["running"], "the guest runs on")
        assert_stays(pair)


def test_destination_stays_if_its_source_ends(place):
    """The source exits while the destination's main thread waits for a page of the devices."""
    words = ("-device", f"virtio-rng-pci,addr={SLOT:#x},disable-modern=on")
    with Pair(place, mem=16, zero=0, source_options=words, destination_options=words, capabilities=()) as pair:
        pair.source.wait_event("ready")
        boot = pair.source.report().the("boot")
        set_queue(pair.source, (boot["test_address"] >> 12) + boot["test_pages"] - QUEUE_PAGES)
        wire = pair.wire(asked_to_stay(pair), lie=Nothing(), lying=MAIN)
        pair.postcopy(wire.uri, bandwidth=64 << 10)
        until(pair.destination.main_thread_waits, "the main thread waits for a page")
        pair.source.signal("KILL")
        assert_stays(pair)
