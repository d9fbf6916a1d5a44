# SPDX-License-Identifier: GPL-2.0-or-later
"""The end of a test that hangs, for tests/conftest.py: where the threads of its QEMUs sleep."""
import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType

import pytest

from tests.lab.host import Place
from tests.lab.lab import RUNNING, CommandFailed, Lab, LabError
from tests.lab.paths import PATIENCE

SLOWER = PATIENCE / 3       # by a sanitizer
# A test that has passed its limit has this time to keep its logs. Then its first-level machines are killed, so that
# no call waits for them any more; each time, the test fails once more.
UNWIND_S = 60
LOOK_S = 20
PASSED = pytest.StashKey[bool]()        # the test has taken longer than it may
LIMIT_S = pytest.StashKey[float]()


def threads(place: Place, processes: str) -> str:
    """Where each thread of some processes sleeps in the kernel; processes: words of the shell that yield their IDs."""
    return place.run(SCRIPT.format(processes), timeout=LOOK_S).output.rstrip()


SCRIPT = """for p in {}; do name=$(tr '\\0' ' ' </proc/$p/cmdline | sed 's/.* -name \\([^ ,]*\\).*/\\1/')
for t in /proc/$p/task/*; do
echo "  $name: $(cat $t/comm): $(cat $t/wchan), $(sed 's/.*) //; s/ .*//' $t/stat)"; sed 's/^\\[<0>\\]/     /' $t/stack
done; done 2>/dev/null; true"""
QEMUS = "$(grep -l ^qemu-system /proc/[0-9]*/comm | cut -d / -f 3)"


def descendants(of: int) -> set[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):      # The process has ended.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {of}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {of}


def where_they_stand() -> str:
    """The threads of all QEMUs in this process's first-level machines, and of its own on the host."""
    found: dict[str, str] = {}

    def look(lab: Lab) -> None:
        try:
            found[lab.name] = threads(lab, QEMUS)
        except (CommandFailed, LabError, OSError) as e:
            found[lab.name] = repr(e)

    # In other threads: the signal may have interrupted a call that holds a lock.
    looks = [threading.Thread(target=look, args=(lab,), daemon=True) for lab in RUNNING]
    for thread in looks:
        thread.start()
    for thread in looks:
        thread.join(LOOK_S)
    text = [f"QEMUs in the first-level machine {lab.name}:\n{found.get(lab.name, 'it does not answer')}"
            for lab in RUNNING]
    ours = [str(process) for process in sorted(descendants(os.getpid()))
            if Path(f"/proc/{process}/comm").read_text().startswith("qemu-system")]
    host = subprocess.run(SCRIPT.format(" ".join(ours)), shell=True, text=True,
                          stdout=subprocess.PIPE, timeout=LOOK_S).stdout.rstrip()
    return "\n".join([*text, f"QEMUs on the host:\n{host}"])


def begin(item: pytest.Item, seconds: float | None = None) -> None:
    """Start the limit, or start it again; --timeout=0: none."""
    if seconds:
        item.stash[LIMIT_S] = seconds * SLOWER

    def stop(number: int, frame: FrameType | None) -> None:
        if item.stash.get(PASSED, False):
            for lab in RUNNING:
                assert lab.process
                lab.process.kill()
        item.stash[PASSED] = True
        pytest.fail(f"no end after {item.stash[LIMIT_S]:g} s\n{where_they_stand()}")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, item.stash.get(LIMIT_S, 0), UNWIND_S * SLOWER)


def end() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
