# SPDX-License-Identifier: GPL-2.0-or-later
"""Common code of the benches: messages about a run, and the report."""
import contextlib
import io
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.lab import cli
from tests.lab.cli import say
from tests.lab.paths import REPORTS, ROOT

# The figures of one run, by name; names contain the unit.
Figures = dict[str, Any]
# A host is idle if other processes use at most so many processors, on average.
IDLE_PROCESSORS = 0.1


def busy_s():
    """(processor time of all processes so far, of this one and ours that have ended)"""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    ours = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), ours


at_start = busy_s()


def about():
    """The command, the commit, and the machine."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"],
                         capture_output=True, text=True)
    return {
        "command": shlex.join(["build/venv/bin/python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)),
                               *sys.argv[1:]]),
        "commit": git.stdout.strip() or "unknown",
        "started_utc": datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00"),
        "host_processors_count": os.cpu_count(),
        "host_cpu_model": model and model[1],
        # Without the suffix of a builder
        "host_kernel_release": platform.release().split("-")[0],
    }


def add_icount(parser):
    parser.add_argument("--icount", action="store_true",
                        help="in a lab whose time is counted in instructions, 10^9 a second: slower to run, but the "
                        "figures do not depend on this machine's speed")


def add_exits(parser):
    parser.add_argument("--exits", action="store_true",
                        help="with --host: exits on, too. They are TCG's, which take the same path as those of KVM, in "
                        "the build for tests (make inject), which is the fork then, also for exits off")


def wrapper(inject, without=""):
    """Words before a QEMU's command. In the build for tests, QEMU then looks for no file at the points that tests can
    hold, and omits the mechanism `without`."""
    return ("env", "-u", "QEMU_INJECT", *(f"QEMU_WITHOUT={without}",) * bool(without)) if inject else ()


def icount_title(options):
    """The end of a title, with --icount."""
    return ", time by instructions" if options.icount else ""


def in_turn(ways, rounds, measure, told):
    """{way: figures of each round}: calls measure(way) once a round, every other round backwards, and prints
    told(way, figures) each time."""
    runs: dict[str, list[Figures]] = {way: [] for way in ways}
    for n in range(rounds):
        for way in list(ways)[::-1 if n % 2 else 1]:
            figures = measure(way)
            runs[way].append(figures)
            say(told(way, figures))
    return runs


def write(name, figures, title, text, pictures=()):
    """Write NAME.json, and NAME.md, the section of the report, to build/reports.

    figures: with about() as "about"; call it when all processes of the bench have ended. text: the
    section's text. pictures: (name, caption).
    """
    took_s = time.monotonic() - cli.started
    total, ours = (now - then for now, then in zip(busy_s(), at_start, strict=True))
    figures["about"] |= {"took_s": round(took_s, 1), "others_processors_count": round((total - ours) / took_s, 3)}
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    a = figures["about"]
    busy = (f"; the host was **not idle**: other processes had {a['others_processors_count']:.2f} processors"
            if a["others_processors_count"] > IDLE_PROCESSORS else "")
    lines = [f"## {title}", "", f"`{a['command']}`, {a['started_utc']} UTC, commit {a['commit']}{busy}", "",
             text.strip()]
    for picture, caption in pictures:
        lines += ["", f"![{caption}]({picture}.svg)"]
    (REPORTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    say(f"wrote {REPORTS.relative_to(ROOT)}/{name}.json, {name}.md"
        + "".join(f", {picture}.svg" for picture, _ in pictures))


def printed(show, *of):
    """Call show(), whose output is printed, and also returned."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show(*of)
    print(text.getvalue(), end="")
    return text.getvalue()
