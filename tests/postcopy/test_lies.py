# SPDX-License-Identifier: GPL-2.0-or-later
"""A source, or a network, that does not send what it should: recoverable, and never silent."""
import contextlib

import pytest

from pair import MIB, Pair, until
from wire import Never, Outside, Short, Twice

BACKENDS = {"anonymous": None, "memfd": "memory-backend-memfd"}
# Between different memory and different ways of waiting.
cases = pytest.mark.parametrize("exits, backend", [
    ("off", "anonymous"),
    ("on", "memfd"),
    pytest.param("on", "anonymous", marks=pytest.mark.slow),
    pytest.param("off", "memfd", marks=pytest.mark.slow),
])


@contextlib.contextmanager
def lied_to(lab, lie, exits, backend):
    """A pair whose post-copy has begun, with a lie in its urgent channel."""
    with Pair(lab, exits=exits, backend=BACKENDS[backend], pattern="shared", mem=16) as pair:
        pair.postcopy(pair.wire(pair.listen(), lie=lie).uri, bandwidth=64 << 10)
        until(pair.faults, "the destination's part of post-copy")
        yield pair
        # The rest is as it should be.
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=16 * MIB)
        pair.finish()


@cases
def test_twice(lab, exits, backend):
    """With other contents, when the guest may have changed the page."""
    with lied_to(lab, Twice(), exits, backend) as pair:
        until(lambda: pair.faults()["duplicates"] >= 2, "both pages that come once more")


@cases
def test_outside_of_the_block(lab, exits, backend):
    with lied_to(lab, Outside(), exits, backend) as pair:
        pair.wait_paused()
        assert "Illegal RAM offset" in pair.destination.job.output
        pair.recover()


@cases
def test_short(lab, exits, backend):
    with lied_to(lab, Short(), exits, backend) as pair:
        pair.wait_paused()
        pair.recover()


@cases
def test_never(lab, exits, backend):
    lie = Never()
    with lied_to(lab, lie, exits, backend) as pair:
        awaited = until(lambda: (oldest := pair.faults().get("oldest")) and oldest["wait-ms"] > 1000
                        and oldest, "a page that does not come")
        assert awaited["offset"] == lie.page.address
        assert awaited["ramblock"] == lie.page.name.decode()
        warning = f"offset 0x{lie.page.address:x} of {lie.page.name.decode()}"
        until(lambda: warning in pair.destination.job.output, "the warning", timeout=30)
        assert "migrate-pause" in pair.destination.job.output
        assert f"offset 0x{lie.page.address:x}" in pair.destination.hmp("info migrate")
        for side in pair.sides:
            assert side.status() == "postcopy-active"
        pair.source.cmd("migrate-pause")
        pair.wait_paused()
        pair.recover()
