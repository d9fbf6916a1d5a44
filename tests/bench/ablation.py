# SPDX-License-Identifier: GPL-2.0-or-later
"""The gain of each mechanism of the branch at default settings: named rows, each with the branch as it is, and without
one of its mechanisms after the other.

Each row is a run of postcopy.py on this machine, by a link of 1 Gbit/s between network name spaces, for which it has to
be root, or of async.py in the lab; it leaves their report. The background has no limit. For each mechanism, figures
without it to those with it: the time that the vCPUs lost (of the Linux guest, the inverse of its computations) and the
99th percentile of missed touches. A mechanism that gains less than a tenth of either in all rows but one is to be
removed. Writes build/reports/ablation.json, ablation.md.
"""
import json
import statistics
import subprocess
import sys
from pathlib import Path

from tests.bench import bench, postcopy
from tests.lab import cli
from tests.lab.cli import aligned, say
from tests.lab.paths import REPORTS, ROOT

GAIN = 1.1
ANY = ("window", "first", "along", "neighbours")
HERE = ("--host", "--accel", "tcg", "--backends", "anonymous", "--background", "0")
LINK = (*HERE, "--memory", "128", "--bandwidth", "1000", "--fetch", "4")
# Name: (program, options, variant, mechanisms that it has)
ROWS: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...]]] = {
    "no link, nothing set, random": ("postcopy.py", (*HERE, "--memory", "256", "--no-preempt", "--load", "disjoint"),
                                     "exits off", ANY),
    "nothing set, hot": ("postcopy.py", (*LINK, "--no-preempt", "--load", "hot"), "exits off", (*ANY, "hot")),
    "hot": ("postcopy.py", (*LINK, "--load", "hot"), "exits off", (*ANY, "hot")),
    "hot, 4 channels": ("postcopy.py", (*LINK, "--load", "hot"), "4 channels", (*ANY, "hot")),
    "random": ("postcopy.py", (*LINK, "--load", "disjoint"), "exits off", ANY),
    "sequential, 4 channels": ("postcopy.py", (*LINK, "--load", "sequential"), "4 channels", ANY),
    "zeros, 4 channels": ("postcopy.py", (*LINK, "--load", "zeros"), "4 channels", ANY),
    "Linux guest": ("async.py", ("--icount", "--rate", "0", "--delay", "500", "--bandwidth", "1000", "--cpus", "2",
                                 "--memory", "48"), "exits, async", (*ANY, "hot", "around")),
}
# A migration in the lab takes ten times as long.
FEWER = 3


def figures_of(row, rounds):
    """(the vCPUs' lost time, p99) of each round by mechanism; "" is with all mechanisms."""
    program, words, variant, mechanisms = ROWS[row]
    variants = [variant, *(variant + postcopy.WITHOUT + m for m in mechanisms)]
    name = "ablation-" + "-".join(row.replace(",", "").lower().split())
    linux = program == "async.py"
    kind = "ways" if linux else "variants"
    rounds = max(1, rounds // FEWER) if linux else rounds
    subprocess.run([sys.executable, Path(__file__).with_name(program), *words, "--rounds", str(rounds), "--name", name,
                    f"--{kind}", *variants], cwd=ROOT, check=True)
    [run] = json.loads((REPORTS / f"{name}.json").read_text())["runs"]
    return {v.partition(postcopy.WITHOUT)[2]: [
        (1e6 / r["computed"], None) if linux else (r["stall_ms"], r["missed_p99_us"]) for r in runs]
        for v, runs in run[kind].items()}


def ratios(of, mechanism):
    """Figures without the mechanism to those with it: stall, p99 if there is one."""
    both = zip(zip(*of[mechanism], strict=True), zip(*of[""], strict=True), strict=True)
    return [statistics.median(a) / statistics.median(b) for a, b in both if a[0] is not None]


def show(measured):
    print("Without to with: what the vCPUs lost, 99th percentile\n")
    lines = [("", *measured)]
    verdicts = []
    for mechanism, (_, what) in postcopy.MECHANISMS.items():
        of = {row: ratios(figures, mechanism) for row, figures in measured.items() if mechanism in figures}
        gains = sum(max(r) >= GAIN for r in of.values())
        lines.append((mechanism, *(", ".join(f"{r:.2f}" for r in of[row]) if row in of else "" for row in measured)))
        verdicts.append(f"{mechanism} ({what}): gains a tenth in {gains} of {len(of)} rows"
                        + (": it is to go" if gains < 2 <= len(of) else ""))
    print("\n".join(aligned(lines)), *verdicts, sep="\n")


def run(options):
    measured = {}
    for row in options.rows:
        say(f"row {row}")
        measured[row] = figures_of(row, options.rounds)
    text = f"{options.rounds} rounds; of the Linux guest a third.\n```\n{bench.printed(show, measured)}```\n"
    bench.write(options, {"rows": {
        row: {m or "all": [{"stall_ms": stall, "missed_p99_us": p99} for stall, p99 in runs] for m, runs in of.items()}
        for row, of in measured.items()}}, "What each mechanism gains", text)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.set_defaults(name="ablation")
    parser.add_argument("--rounds", type=int, default=9,
                        help="migrations of each variant in a row (9); of the Linux guest a third")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="only these (all)")
    bench.main(run, parser.parse_args())
