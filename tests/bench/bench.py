# SPDX-License-Identifier: GPL-2.0-or-later
"""Common code of the benches: options, rounds, and the report."""
import contextlib
import io
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.lab import cli, other_qemu
from tests.lab.cli import ProgramError, say
from tests.lab.host import EXIT_ON_MISSING, Host
from tests.lab.lab import Lab
from tests.lab.other_qemu import PEER
from tests.lab.pair import FORK, STOCK, event_us
from tests.lab.paths import REPORTS, ROOT

# The figures of one run, by name; names contain the unit.
Figures = dict[str, Any]
# A host is idle if other processes use at most so many processors, on average.
IDLE_PROCESSORS = 0.1
TIMEOUT_S = 300.0
# The command, the commit, and the machine: see main()
about: Figures = {}


def busy_s():
    """(processor time of all processes so far, of this one and ours that have ended)"""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


at_start = busy_s()


def parser(doc, rounds, quick, name=None):
    """A parser with the options of most benches. quick: what --quick measures."""
    parser = cli.parser(doc)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"in which each variant runs once ({rounds})")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--name", default=name, help=f"of the report{f' ({name})' if name else ''}")
    return parser


def parse(parser, **quick):
    """quick: values of options that are not given, with --quick."""
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args()


def add_icount(parser):
    parser.add_argument("--icount", action="store_true",
                        help="in a lab whose time is counted in instructions, 10^9 a second: slower to run, but the "
                        "figures do not depend on this machine's speed")


def add_place(parser):
    """Options of place()."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--host", action="store_true",
                       help=f"on this machine, not in the lab; exits on only if its KVM has {EXIT_ON_MISSING}, or "
                       "with --exits")
    add_icount(group)
    parser.add_argument("--accel", choices=("kvm", "tcg"), help="with --host (kvm, or else tcg)")
    parser.add_argument("--exits", action="store_true",
                        help="with --host: exits on, too. They are TCG's, which take the same path as those of KVM, in "
                        "the build for tests (make inject), which is the fork then, also for exits off")


def place(options, name, hugepages=0, **lab):
    """The machine that the QEMUs run on."""
    if options.exits and (not options.host or options.accel == "kvm"):
        raise ProgramError("--exits is for --host with TCG")
    if options.host:
        return Host(options.accel, hugepages, exits=options.exits)
    say("boot the lab")
    return Lab(name=name, hugepages=hugepages, icount=options.icount, **lab)


def describe(place, qemus=(STOCK, FORK)):
    """Let the report tell about the machine that the QEMUs run on, and copy the peer there if it is one of them."""
    if PEER in qemus:
        other_qemu.put(place)
    about.update({
        "qemu_processors_count": place.cpus,
        "qemu_kernel_release": place.run("uname -r", check=True).output.strip(),
        "accelerator": " ".join(place.qemu_words),
        "qemu_versions": {name: place.run(f"{place.qemu(name)} --version", check=True).output.splitlines()[0]
                          for name in qemus},
    })


def wrapper(inject, without=""):
    """Words before a QEMU's command. In the build for tests, QEMU then looks for no file at the points that tests can
    hold, and omits the mechanism `without`."""
    return ("env", "-u", "QEMU_INJECT", *(f"QEMU_WITHOUT={without}",) * bool(without)) if inject else ()


def place_title(options):
    return ("on this host" if options.host else "in the lab") + ", exits by TCG" * options.exits


def icount_title(options):
    """The end of a title, with --icount."""
    return ", time by instructions" * options.icount


def in_turn(cases, ways, rounds, measure, named=str):
    """{case: {way: figures of each round}}: calls measure(case, way) once a round, in an order that rotates."""
    ways = list(ways)
    runs: dict[Any, dict[Any, list[Any]]] = {case: {way: [] for way in ways} for case in cases}
    for n in range(rounds):
        first = n % len(ways)
        for case, way in itertools.product(runs, ways[first:] + ways[:first]):
            say(f"round {n + 1} of {rounds}: {named(case)}, {way}")
            runs[case][way].append(measure(case, way))
    return runs


def times_us(side):
    """When the migration, which must have the capability events, has completed: {its status, or other event: time}"""
    at: dict[str, int] = {}
    while "completed" not in at:
        event = side.qmp.pull_event(wait=TIMEOUT_S)
        status = event.get("data", {}).get("status", event["event"])
        if status in ("failed", "postcopy-paused"):
            raise ProgramError(f"the migration is {status}: {side.cmd('query-migrate').get('error-desc')}")
        at[status] = event_us(event)
    return at


def spread(values, form="{:.0f}"):
    """The median, the least and the most."""
    return "{} ({}..{})".format(*(form.format(of(values)) for of in (statistics.median, min, max)))


def write(options, figures, title, text):
    """Write NAME.json, with the options as its settings, and NAME.md, the section of the report, to build/reports, when
    all processes of the bench have ended. text: the section's text."""
    name = options.name
    took_s = time.monotonic() - cli.started
    total, ours = (now - then for now, then in zip(busy_s(), at_start, strict=True))
    others = round((total - ours) / took_s, 3)
    about.update({"took_s": round(took_s, 1), "others_processors_count": others})
    figures = {"about": about, "settings": vars(options)} | figures
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    busy = (f"; the host was **not idle**: other processes had {others:.2f} processors"
            if others > IDLE_PROCESSORS else "")
    lines = [f"## {title}", "", f"`{about['command']}`, {about['started_utc']} UTC, commit {about['commit']}{busy}",
             "", text.strip()]
    (REPORTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    say(f"wrote {REPORTS.relative_to(ROOT)}/{name}.json, {name}.md")


def printed(show, *of):
    """Call show(), whose output is printed, and also returned."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show(*of)
    print(text.getvalue(), end="")
    return text.getvalue()


def main(run, options):
    """Run a bench; its report tells about the machine and the checkout as they are at the start."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"],
                         capture_output=True, text=True)
    about.update({
        "command": shlex.join(["build/venv/bin/python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)),
                               *sys.argv[1:]]),
        "commit": git.stdout.strip() or "unknown",
        "started_utc": datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00"),
        "host_processors_count": os.cpu_count(),
        "host_cpu_model": model and model[1],
        # Without the suffix of a builder
        "host_kernel_release": platform.release().split("-")[0],
    })
    cli.main("bench", run, options)
