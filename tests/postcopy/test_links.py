# SPDX-License-Identifier: GPL-2.0-or-later
"""Connections whose keys change, and connections that die without a reset."""
import contextlib
import ctypes
import os
import re
import socket
from pathlib import Path

import pytest

from tests.lab import tls
from tests.lab.arches import listed
from tests.lab.backends import CHANNELS
from tests.lab.host import Host
from tests.lab.pair import MIB, STOCK, Pair, until
from tests.lab.paths import SANITIZED


def rekeyed(place, **options):
    """A pair that renews keys after a number of TLS records of each connection. A destination sends few."""
    preload = "env", "LD_PRELOAD=build/tests/rekey.so"
    return Pair(place, tls=tls.directory(place), memory_mb=64, mem=48, pattern="shared",
                wrapper=(*preload, "REKEY=20"), source_wrapper=(*preload, "REKEY=200"), **options)


def assert_renewed(pair, result):
    """result: of GnuTLS, for all renewals of keys."""
    with pair:
        pair.midst()
        pair.finish_fast()
        for side in pair.sides:
            assert set(re.findall(r"^keys renewed: (-?\d+)", side.job.output, re.M)) == {result}, side.job.output


@pytest.mark.skipif(SANITIZED, reason="a sanitizer must be loaded before what is preloaded")
@pytest.mark.parametrize("channels", CHANNELS)
def test_keys_change(place, channels):
    """TLS 1.3 renews the keys of a connection by which one thread sends and another one receives, on both sides."""
    assert_renewed(rekeyed(place, **CHANNELS[channels]), "0")


@pytest.mark.skipif(SANITIZED, reason="the other side is stock QEMU, without its sanitizer")
@pytest.mark.parametrize("stock", ["source", "destination"])
def test_stock_does_not_change_keys_with_tls_1_2(place, stock):
    """Stock QEMU breaks when its keys change: docs/usage.md describes how one side can prevent that."""
    pair = rekeyed(place, capabilities=(), **{stock: STOCK})
    ours = pair.plans[stock == "source"]
    ours.arguments[-1] += ",priority=NORMAL:-VERS-TLS1.3"
    assert_renewed(pair, "-50")     # GNUTLS_E_INVALID_REQUEST


SYS_PIDFD_GETFD = 438
# The options of migration/socket.c, and values so small that a test can wait.
OPTIONS = {(socket.SOL_SOCKET, socket.SO_KEEPALIVE): (1, 1),
           (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): (60, 1),
           (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): (30, 1),
           (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): (5, 2),
           (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): (210_000, 3000)}


def connections(opened, side, port):
    """The connections of a side's QEMU to or from a port; opened: closes them here."""
    pid = int(Path(side.pidfile).read_text())
    pidfd = os.pidfd_open(pid)
    opened.callback(os.close, pidfd)
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        if not os.readlink(file).startswith("socket:"):
            continue
        fd = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, pidfd, int(file.name), 0)
        assert fd >= 0, os.strerror(ctypes.get_errno())
        one = opened.enter_context(socket.socket(fileno=fd))
        with contextlib.suppress(OSError):      # The socket listens, or has no port
            if port in (one.getpeername()[1], one.getsockname()[1]):
                found.append(one)
    return found


def dies(pair, wire, number):
    """All connections of both sides have options by which QEMU notices their death; their times are shortened here."""
    with contextlib.ExitStack() as opened:
        ours = connections(opened, pair.source, wire.listening.getsockname()[1])
        theirs = connections(opened, pair.destination, wire.to)
        assert (len(ours), len(theirs)) == (number, number)
        for one in ours + theirs:
            assert {o: one.getsockopt(*o) for o in OPTIONS} == {o: usual for o, (usual, _) in OPTIONS.items()}
        wire.black_hole()
        for one in ours + theirs:
            for option, (_, soon) in OPTIONS.items():
                one.setsockopt(*option, soon)


@pytest.fixture
def here(place):
    if not isinstance(place, Host):
        pytest.skip("the lab's network acknowledges what a link that has died would not")
    return place


@pytest.mark.parametrize("channels, number", listed(
    ("preempt", 2), ("one-channel", 1), ("fetch", 5), quick=[("preempt", 2)]))
def test_link_dies_without_a_word(here, channels, number):
    """While the destination requests nothing."""
    with Pair(here, mem=16, pattern="shared", **CHANNELS[channels]) as pair:
        wire = pair.wire(pair.listen())
        pair.midst(wire.uri)
        pair.destination.cmd("stop")
        dies(pair, wire, number)
        pair.wait_paused()
        wire.cut()
        pair.recover()
        pair.destination.cmd("cont")
        pair.finish_fast()


def test_link_of_multifd_dies(here):
    with Pair(here, capabilities=None, mem=16) as pair:
        pair.use_multifd()
        wire = pair.wire(pair.listen())
        pair.start(wire.uri)
        dies(pair, wire, 3)
        pair.source.wait_status("failed")
        assert pair.source.cmd("query-status")["status"] == "running"
        assert pair.destination.job.wait(20).rc == 1


@pytest.mark.parametrize("end", ["cancel", "quit"])
def test_multifd_is_stuck(place, end):
    """The destination reads no more data, and the migration thread waits for a thread that sends by multifd."""
    with Pair(place, capabilities=None, memory_mb=160, mem=128, zero=0) as pair:
        pair.use_multifd()
        pair.start(bandwidth=MIB)
        pair.destination.signal("STOP")
        pair.source.cmd("migrate-set-parameters", max_bandwidth=0)
        pair.until_stuck()
        if end == "cancel":
            pair.source.cmd("migrate_cancel")
            pair.source.wait_status("cancelled")
            assert pair.source.cmd("query-status")["status"] == "running"
        else:
            pair.source.cmd("quit")
            until(lambda: not pair.source.job.running, "QEMU ends")
        pair.destination.signal("KILL")


@pytest.mark.parametrize("verify", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_recovery_with_a_wrong_certificate(place, verify):
    """Either side refuses the certificate; both are paused again, and recover with the right one."""
    pki = tls.certificates(place, "127.0.0.1")
    with Pair(place, mem=16, pattern="shared", source_options=["-object", tls.X509.format(pki, "client")],
              destination_options=["-object", tls.X509.format(pki, "server")]) as pair:
        for side in pair.sides:
            side.cmd("migrate-set-parameters", tls_creds="tls")
        pair.midst()
        pair.pause()
        # Certificates of another authority; QEMU has already read the first ones
        pki = tls.certificates(place, "127.0.0.1")
        pair.source.cmd("object-add", qom_type="tls-creds-x509", id="wrong", dir=pki, endpoint="client",
                        verify_peer=verify == "on")
        pair.source.cmd("migrate-set-parameters", tls_creds="wrong")
        pair.source.cmd("migrate", uri=pair.listen("migrate-recover"), resume=True)
        if verify == "on":
            until(lambda: "certificate" in pair.source.cmd("query-migrate").get("error-desc", ""), "the source refuses")
        else:
            # The source does not verify the destination's certificate, but the destination verifies the source's
            pair.destination.wait_says("certificate")
        pair.wait_paused()
        pair.source.cmd("migrate-set-parameters", tls_creds="tls")
        pair.recover_and_finish()
