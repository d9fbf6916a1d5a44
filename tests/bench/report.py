# SPDX-License-Identifier: GPL-2.0-or-later
"""Put together what the benches wrote to build/reports, as build/reports/report.md."""
import json

from tests.lab import cli
from tests.lab.cli import ProgramError, say
from tests.lab.paths import BUILD, REPORTS

HEAD = """# Benchmarks

`{command}` writes all of this; `tests/bench/report.py` puts together what its benches wrote. The
host has {host_processors_count} processors ({host_cpu_model}), Linux {host_kernel_release}.
{quick}Each section tells its command, which repeats it, and the commit. In the lab, processors are
emulated: ratios within one run say something, microseconds do not ([limits](../../docs/limits.md)).

On a host of one's own, `meson setup build/tests && ninja -C build/tests demand-paging`, with any
Meson from 1.0 on, makes `build/tests/demand-paging`, a static program that needs nothing but
`/dev/kvm` (`-h` tells its options), and
`tests/bench/postcopy.py --host` migrates on the host's own kernel. Beside this text,
`build/reports/` has all figures of each round as JSON, and the pictures as PNG.
"""


def run(_):
    benches = json.loads((BUILD / "tests/meson-info/intro-benchmarks.json").read_text())
    there = [bench["name"] for bench in benches if (REPORTS / f"{bench['name']}.md").exists()]
    if not there:
        raise ProgramError("no bench has been run: make bench")
    of = [json.loads((REPORTS / f"{name}.json").read_text())["about"] for name in there]
    quick = any("--quick" in about["command"] for about in of)
    about = of[0] | {"command": "make bench" + " QUICK=1" * quick,
                     "quick": "**The quick variant: few rounds, so that medians are rough.** " * quick}
    text = "\n".join([HEAD.format(**about), *((REPORTS / f"{name}.md").read_text() for name in there)])
    (REPORTS / "report.md").write_text(text)
    say("wrote build/reports/report.md")


def main():
    cli.main("bench", run, cli.parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
