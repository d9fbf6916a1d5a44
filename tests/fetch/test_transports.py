# SPDX-License-Identifier: GPL-2.0-or-later
"""With default settings, QEMU uses fetch channels on each transport on which it can connect more than once; on others,
it does without, and does not wait."""
import contextlib

from tests.lab import tls
from tests.lab.pair import Pair
from tests.lab.proxy import Wire

# bash connects to a Joint, and leaves the connection to another program, or copies its data
CONNECTED = "exec 7<>/dev/tcp/{}/{}"
COPIED = f"{CONNECTED}; cat <&7 & exec cat >&7"


def pair_in(place, **options):
    return Pair(place, fetch="auto", capabilities=(), mem=16, pattern="shared", **options)


def run(pair, listens_at, uri, n):
    pair.destination.cmd("migrate-incoming", uri=listens_at)
    pair.midst(uri)
    assert pair.fetch_channels() == [n, n]
    assert "in place of" not in pair.source.job.output
    pair.finish_fast()


class Joint(Wire):
    """Both sides connect to it: data of the first connection leave by the second one, and back."""

    def _accept(self):
        with contextlib.suppress(OSError):
            self._channel(self._copy, *(self.listening.accept()[0] for _ in range(2)))


def test_unix(place):
    with pair_in(place) as pair:
        path = f"unix:{place.tmp}/migration"
        run(pair, path, path, 2)


def test_vsock(lab):
    """The lab's machine connects to itself."""
    with pair_in(lab) as pair:
        run(pair, "vsock:4294967295:4010", "vsock:1:4010", 2)


def test_client_certificates(place):
    """The destination demands certificates, and verifies each channel's."""
    pki = tls.certificates(place, "127.0.0.1")
    with pair_in(place, source_options=["-object", tls.X509.format(pki, "client")],
                 destination_options=["-object", tls.X509.format(pki, "server")]) as pair:
        for side in pair.sides:
            side.cmd("migrate-set-parameters", tls_creds="tls")
        uri = pair.uri_of(port := pair.port())
        run(pair, f"tcp:{place.address}:{port}", uri, 2)


def test_exec(place):
    """Both sides use programs."""
    with Joint(to=0).listening as joint, pair_in(place) as pair:
        uri = f"exec:bash -c '{COPIED.format(place.host, joint.getsockname()[1])}'"
        run(pair, uri, uri, 0)


def test_fd(place):
    """The destination uses a file descriptor."""
    with Joint(to=0).listening as joint:
        port = joint.getsockname()[1]
        with pair_in(place, wrapper=("bash", "-c", f'{CONNECTED.format(place.host, port)}; exec "$0" "$@"')) as pair:
            run(pair, "fd:7", f"tcp:{place.host}:{port}", 0)
