# SPDX-License-Identifier: GPL-2.0-or-later
"""Put together what the benches wrote to build/reports: as build/reports/report.md, and, with --docs, as
docs/report.md, which has the text of each bench's last run: those that have not been run since keep theirs."""
import json
import re

from tests.lab import cli
from tests.lab.cli import ProgramError, say
from tests.lab.paths import BUILD, REPORTS, ROOT

HEAD = """# Benchmarks

`{command}` writes all of this; `tests/bench/report.py` puts together what its benches wrote. The
host has {host_processors_count} processors ({host_cpu_model}), Linux {host_kernel_release}.
{quick}Each section contains its command, which repeats it, and the commit. In the lab, processors are
emulated: ratios within one run mean something, microseconds do not. [How to
measure](../../docs/devel/testing.md) says more, also for a host of your own. `build/reports/` has
the figures of each round as JSON.
"""
DOCS = ROOT / "docs" / "report.md"
DOCS_HEAD = """# Report

The figures of this branch, as its benches wrote them: each section contains its command, which
repeats it, the date and the commit. `tests/bench/report.py --docs` replaces the sections of benches
that have been run since; nothing here is edited by hand. "stock" is QEMU 10.0.13 without the series,
in the same run; brackets give the least and the most of the rounds. In the lab, processors are
emulated: ratios within one run mean something, microseconds do not. [How to
measure](devel/testing.md) says more.

| section | |
| --- | --- |
"""
SECTION = re.compile(r"<!-- bench: (\S+) -->\n#(.*?)(?=\n## |\Z)", re.S)


def whole(there):
    of = [json.loads((REPORTS / f"{name}.json").read_text())["about"] for name in there]
    quick = any("--quick" in about["command"] for about in of)
    about = of[0] | {"command": "make bench" + " QUICK=1" * quick,
                     "quick": "**The quick variant: few rounds, so that medians are rough.** " * quick}
    text = "\n".join([HEAD.format(**about), *((REPORTS / f"{name}.md").read_text() for name in there)])
    (REPORTS / "report.md").write_text(text)
    say("wrote build/reports/report.md")


def docs(names, order):
    # Each as its bench wrote it, a level lower
    written = DOCS.read_text() if DOCS.exists() else ""
    sections = dict(SECTION.findall(written))
    for name in names:
        # Blanks at the ends of lines are of tables that are printed
        sections[name] = re.sub(r" +$", "", (REPORTS / f"{name}.md").read_text(), flags=re.M)
    known = sorted(sections, key=lambda name: (order.index(name) if name in order else len(order), name))
    table = "".join(f"| [{name}](#{name}) | {sections[name].partition(chr(10))[0].strip('# ')} |\n" for name in known)
    # A heading for each name, which other pages link to
    text = "\n".join(f"## {name}\n\n<!-- bench: {name} -->\n#{sections[name].strip()}\n" for name in known)
    DOCS.write_text(f"{DOCS_HEAD}{table}\n{text}")
    say("wrote docs/report.md")


def run(options):
    benches = json.loads((BUILD / "tests/meson-info/intro-benchmarks.json").read_text())
    order = [bench["name"] for bench in benches]
    there = options.names or [name for name in order if (REPORTS / f"{name}.md").exists()]
    if not there:
        raise ProgramError("no bench has been run: make bench")
    if options.docs:
        docs(there, order)
    else:
        whole(there)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--docs", action="store_true", help="write docs/report.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a report (those of all benches)")
    cli.main("bench", run, parser.parse_args())
