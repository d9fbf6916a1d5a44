# SPDX-License-Identifier: GPL-2.0-or-later
"""Guests that are resumed from a file while it fails, each with a random plan: SEEDS=200 sets the number."""
import contextlib
import os
import random
import time

import pytest
from qemu.qmp.qmp_client import ExecuteError

from tests.lab.pair import INJECT, until
from tests.lab.snapshot import Machine
from tests.restore.test_restore import LAZY, NO_REST, finish

SEEDS = int(os.environ.get("SEEDS", "4"))
TROUBLES = ("read", "place", "pause", "stop", "query", "background", "bandwidth")
EXITS = ("-global", "migration.postcopy-fault-exits=on")


def trouble(side, machine, draw):
    """Cause a random trouble, which may happen at any time; returns its name."""
    what = draw.choice(TROUBLES)
    if what in ("read", "place"):
        side.inject.arm(f"postcopy-{'file-read' if what == 'read' else what}")
    elif what == "pause":
        # Refused when all memory is received
        side.cmd_out_of_band("migrate-pause")
    elif what == "stop":
        # Refused while a vCPU waits for a missing page
        with contextlib.suppress(ExecuteError):
            side.cmd("stop")
        side.cmd("cont")
    elif what == "query":
        side.cmd("query-migrate")
    elif what == "background":
        side.cmd("migrate-set-parameters", restore_background=draw.random() < .5)
    else:
        side.cmd("migrate-set-parameters", max_postcopy_bandwidth=draw.choice([0, 8 << 20, 64 << 20]))
    if side.status() == "postcopy-paused":
        side.cmd_out_of_band("migrate-recover", uri=f"file:{machine.file}")
        what += ", recovered"
    time.sleep(draw.random() / 20)
    return what


def recovered(side, machine):
    """End all failures, and recover from them."""
    for point in ("postcopy-file-read", "postcopy-place"):
        side.inject.release(point)
    side.cmd("migrate-set-parameters", max_postcopy_bandwidth=0, restore_background=True)

    def ended():
        status = side.status()
        if status == "postcopy-paused":
            side.cmd_out_of_band("migrate-recover", uri=f"file:{machine.file}")
        return status == "completed"
    until(ended, "all of the file has been read")


def resume(machine, words, runs, draw):
    side = machine.load(INJECT, ("events", *LAZY), words)
    until(lambda: side.status() in ("postcopy-active", "completed"), "the guest can run")
    if not runs:
        side.cmd("cont")
    whats: list[str] = []
    while side.status() != "completed" and len(whats) < 12:
        whats.append(trouble(side, machine, draw))
    print(words, "running" if runs else "stopped", whats)
    recovered(side, machine)
    finish(side)
    side.end()
    machine.sides.remove(side)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(place, seed):
    """The guest's memory is intact, with its zeros."""
    draw = random.Random(seed)
    memory_mb = draw.choice([64, 128, 320])
    options = {"backend": draw.choice(["anonymous", "memfd", "shmem-file-private"]), "cpus": draw.randint(1, 4),
               "memory_mb": memory_mb, "mem": draw.randrange(8, memory_mb // 3, 2),
               "zero": draw.choice([0, 12, 60, 95]),
               "pattern": draw.choice(["disjoint", "shared", "sequential", "strided", "hot"]), "seed": seed}
    words = [*EXITS * draw.randint(0, 1), *NO_REST * draw.randint(0, 1),
             *(("-global", f"migration.restore-working-set={place.tmp}/seeds") if draw.random() < .5 else ())]
    runs = draw.random() < .5 and options["backend"] == "anonymous"
    print(options)
    with Machine(place, capabilities=["mapped-ram"], **options) as machine:
        machine.take() if runs else machine.save()
        machine.side.end()
        for _ in range(2):                  # the second resume has a working set
            resume(machine, words, runs, draw)
