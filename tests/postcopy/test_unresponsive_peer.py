# SPDX-License-Identifier: GPL-2.0-or-later
"""A peer that connects and sends no data, or only a part: QEMU does not wait for it."""
import socket
import time

import pytest

from tests.lab import tls
from tests.lab.pair import Pair, until
from tests.lab.paths import SANITIZED
from tests.lab.proxy import Unheard
from tests.postcopy.steps import succeeds

MAGIC_OF_MULTIFD = bytes.fromhex("11223344")
# The beginning of a client's first record
HELLO = bytes.fromhex("16030100ff")


@pytest.mark.parametrize("encrypted, says", [
    pytest.param(False, b"", id="multifd-nothing", marks=pytest.mark.slow),
    pytest.param(False, MAGIC_OF_MULTIFD[:1], id="multifd-a-byte"),
    pytest.param(False, MAGIC_OF_MULTIFD, id="multifd-magic-alone", marks=pytest.mark.slow),
    pytest.param(True, b"", id="tls-nothing", marks=pytest.mark.slow),
    # This client occupies the first channel for 20 s.
    pytest.param(True, HELLO, id="tls-a-part", marks=pytest.mark.slow),
])
def test_destination_does_not_wait(place, encrypted, says):
    """The migration ignores the unrelated client, which then closes its connection, and the guest runs."""
    with Pair(place, capabilities=None, mem=8, tls=tls.directory(place) if encrypted else None) as pair:
        for side in pair.sides:
            # With a sanitizer, the switch, which cannot be interrupted, can take the whole downtime limit.
            side.qmp.settimeout(60 if SANITIZED else 20)
        pair.use_multifd()
        uri = pair.listen()
        with socket.create_connection(("127.0.0.1", pair.host_port_of(uri)), timeout=60) as client:
            client.sendall(says)
            connected(pair.lab, uri)
            assert pair.destination.cmd("query-migrate")["status"] == "setup"
            pair.start(uri, bandwidth=64 << 20)
            pair.source.cmd("migrate-set-parameters", downtime_limit=20000)
            pair.wait_completed()
        pair.check_memory()
        assert pair.destination.status() == "completed"
        pair.source.cmd("quit")
        pair.destination.cmd("quit")
        assert pair.destination.job.wait(20).rc == 0


def connected(place, uri):
    """Wait until L1's QEMU has accepted the connection, and one second more."""
    port = int(uri.rsplit(":", 1)[1])
    # Local address, state and inode: an established connection that is not accepted yet has the inode 0.
    found = f"awk '$2 ~ /:{port:04X}$/ && $4 == \"01\" && $10 != 0 {{n++}} END {{exit !n}}' /proc/net/tcp"
    until(lambda: not place.run(found).rc, "the connection")
    time.sleep(1)


def test_source_does_not_wait(place):
    """The server accepts, and sends no data: the guest runs, and the migration can be cancelled."""
    with listening() as server, Pair(place, capabilities=None, mem=8, tls=tls.directory(place)) as pair:
        pair.source.qmp.settimeout(20)
        pair.source.wait_ready()
        pair.source.cmd("migrate", uri=pair.uri_of_server(server))
        with accepted(server) as connection:
            assert connection.recv(1)
            # There is nothing to pause
            assert not succeeds(pair.source, "migrate-pause")
            time.sleep(1)
            assert pair.source.status() == "setup"
            assert pair.source.cmd("query-status")["running"]
            pair.source.cmd("migrate_cancel")
            pair.source.wait_status("cancelled")
            # Another migration can begin while the server is still connected.
            uri = pair.listen()
            pair.source.cmd("migrate-set-parameters", downtime_limit=20000)
            until(lambda: succeeds(pair.source, "migrate", uri=uri), "another migration begins")
            pair.source.wait_status("completed")
            pair.check_memory()


def test_cancelled_while_it_connects(place):
    """The server's queue is full, so that its kernel answers late: QEMU sends it no data then."""
    with listening(backlog=0) as server, Pair(place, capabilities=None, mem=8) as pair:
        pair.source.wait_ready()
        pair.source.cmd("migrate-set-parameters", downtime_limit=20000)
        with socket.create_connection(server.getsockname()):
            pair.source.cmd("migrate", uri=pair.uri_of_server(server))
            assert pair.source.status() == "setup"
            pair.source.cmd("migrate_cancel")
            pair.source.wait_status("cancelled")
            uri = pair.listen()
            assert not succeeds(pair.source, "migrate", uri=uri)
            accepted(server).close()
            with accepted(server) as connection:
                assert not connection.recv(1)
        until(lambda: succeeds(pair.source, "migrate", uri=uri), "another migration begins")
        pair.source.wait_status("completed")
        pair.check_memory()


def test_answer_is_of_this_migration(place):
    """An answer to an earlier migration must not count for this one: before the destination has accepted the main
    channel, the source does not open the preempt channel."""
    # With guest-time, the source would wait for the same answer earlier
    with listening() as server, Pair(place, machine="pc,guest-time=off", mem=8) as pair:
        pair.source.wait_ready()
        pair.source.cmd("migrate", uri=pair.uri_of_server(server))
        with accepted(server):
            pair.source.wait_status("active")
            pair.source.cmd("migrate_cancel")
            pair.source.wait_status("cancelled", "failed")
        wire = pair.wire_of(Unheard, pair.listen())
        pair.start(wire.uri)
        pair.source.cmd("migrate-start-postcopy")
        pair.until_stuck()
        assert len(wire.channels) == 1
        wire.heard.set()
        pair.finish_fast()
        assert len(wire.channels) == 2


def listening(**options):
    """A server of this process, whose waits last a minute at most."""
    server = socket.create_server(("127.0.0.1", 0), **options)
    server.settimeout(60)
    return server


def accepted(server):
    connection, _ = server.accept()
    connection.settimeout(60)
    return connection


def test_recovery_can_be_paused(place):
    """The source tries to recover at a server that sends no data in its TLS handshake."""
    with listening() as server, \
            Pair(place, capabilities=(), mem=16, tls=tls.directory(place)) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri)
        wire.cut()
        pair.wait_paused()
        pair.source.cmd("migrate", uri=pair.uri_of_server(server), resume=True)
        with accepted(server) as connection:
            assert connection.recv(1)
            assert pair.source.status() == "postcopy-recover-setup"
            pair.source.cmd("migrate-pause")
            pair.source.wait_status("postcopy-paused")
        pair.recover_and_finish()


def test_recovery_is_awaited_anew(place):
    """An unrelated client connects to the destination, which awaits the source, and sends no data. A second
    migrate-recover does not wait until its handshake is given up."""
    with Pair(place, capabilities=(), mem=16, tls=tls.directory(place)) as pair:
        pair.midst()
        pair.pause()
        uri = pair.listen("migrate-recover")
        with socket.create_connection(("127.0.0.1", pair.host_port_of(uri)), timeout=60) as client:
            connected(pair.lab, uri)
            again = pair.listen("migrate-recover")
            assert not client.recv(1)
            pair.source.cmd("migrate", uri=again, resume=True)
            until(lambda: pair.source.status() == "postcopy-active", "recovery", timeout=10)
        pair.finish_fast()
