#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Put together what the benches wrote to build/reports, as build/reports/report.md.

With --docs also as docs/benchmarks.md, with the pictures (SVG) in docs/pictures.
"""
import argparse
import json
import re
import shutil

from tests.lab import program
from tests.lab.paths import REPORTS, ROOT
from tests.lab.program import ProgramError, say

# In this order, those that there are.
NAMES = ("demand-paging", "bench-postcopy", "postcopy-vcpus", "postcopy-loads", "postcopy-network", "breakdown",
         "breakdown-1", "model", "guest-time", "bench-snapshot", "async")

HEAD = """# Benchmarks

`{command}` writes all of this; `tests/bench/report.py` puts together what its benches wrote. The
host has {host_processors_count} processors ({host_cpu_model}), Linux {host_kernel_release}.
{quick}Each section tells its command, which repeats it, and the commit. In the lab, processors are
emulated: ratios within one run say something, microseconds do not ([limits](LIMITS)).

On a host of one's own, `meson setup build/tests && ninja -C build/tests demand-paging`, with any
Meson from 1.0 on, makes `build/tests/demand-paging`, a static program that needs nothing but
`/dev/kvm` (with `--cross-file scripts/aarch64.ini` for arm64; `--help` tells its options), and
`tests/bench/postcopy.py --host` migrates on the host's own kernel. Beside this text,
`build/reports/` has all figures of each round as JSON, and the pictures as PNG.
"""


def run(options):
    there = [name for name in NAMES if (REPORTS / f"{name}.md").exists()]
    if not there:
        raise ProgramError("no bench has been run: make bench")
    of = [json.loads((REPORTS / f"{name}.json").read_text())["about"] for name in there]
    quick = any("--quick" in about["command"] for about in of)
    about = of[0] | {"command": "make bench" + " QUICK=1" * quick,
                     "quick": "**The quick variant: few rounds, so that medians are rough.** " * quick}
    text = "\n".join([HEAD.format(**about), *((REPORTS / f"{name}.md").read_text() for name in there)])
    (REPORTS / "report.md").write_text(text.replace("LIMITS", "../../docs/limits.md"))
    say("wrote build/reports/report.md")
    if options.docs:
        pictures = re.findall(r"!\[.*\]\((.*\.svg)\)", text)
        to = ROOT / "docs" / "pictures"
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        for picture in pictures:
            shutil.copy(REPORTS / picture, to)
        text = re.sub(r"(!\[.*\]\()(.*\.svg\))", r"\1pictures/\2", text)
        (ROOT / "docs" / "benchmarks.md").write_text(text.replace("LIMITS", "limits.md"))
        say("wrote docs/benchmarks.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true")
    program.main("bench", run, parser.parse_args())


if __name__ == "__main__":
    main()
