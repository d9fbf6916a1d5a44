# SPDX-License-Identifier: GPL-2.0-or-later
"""The Linux guest under load, with async page faults."""
from typing import Any

from tests.lab.lab import Place
from tests.lab.linux_guest import ASYNC_PF
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import until

LOAD: dict[str, Any] = {"mem": 48, "writers": 2, "computers": 1, "forkers": 1, "interval": 100}


def finish(pair: LinuxPair) -> None:
    pair.finish_fast()
    pair.check_threads()


def until_announced(pair: LinuxPair) -> None:
    """The time depends on the guest's speed, and on whether requests queue behind the background."""
    pair.until_faults()
    until(lambda: pair.async_counts()["announced"] > 5, "tasks wait", timeout=90)


def all_delivered(pair: LinuxPair) -> Any:
    """Each task that was notified to wait has been notified to resume."""
    counts = until(lambda: not (counts := pair.async_counts())["outstanding"] and counts,
                   "no task waits any more")
    assert counts["delivered"] + counts["forgotten"] == counts["announced"], counts
    return counts


def guest_with(lab: Place, **options: Any) -> LinuxPair:
    """A pair whose guest has async page faults."""
    on = ASYNC_PF[lab.arch]
    return LinuxPair(lab, **LOAD | {"exits": "on", "source_options": on, "destination_options": on} | options)
