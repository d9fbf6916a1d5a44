# SPDX-License-Identifier: GPL-2.0-or-later
"""Fuzz both sides of migration and files: record seeds, then run one libFuzzer for each.

Writes build/reports/fuzz.json. A finding is kept in build/fuzzing, and fuzz.py prints the command that
repeats it; the exit status is 1 then. See docs/devel/testing.md.
"""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time

from tests.fuzz import seeds
from tests.lab import cli
from tests.lab.cli import say
from tests.lab.paths import REPORTS, ROOT

BINARY = ROOT / "build/fuzz/qemu-fuzz-x86_64"
WORK = ROOT / "build/fuzzing"
REPORT = REPORTS / "fuzz.json"
SIDES = "source", "destination", "file"
# The length of the longest seed, with several copies of its parts.
MAX_BYTES = 650_000
# The target reports hangs itself, earlier than libFuzzer does.
TIMEOUT_S = 120
# QEMU frees little when it exits; it may allocate memory that it does not use.
SANITIZER = "detect_leaks=0:detect_stack_use_after_return=0:stack_trace_format='#%n %f %S'"
FOUND = re.compile(r"ERROR: (?!libFuzzer: deadly signal)|Assertion|runtime error")


def command(side, *words):
    return [str(BINARY), f"--fuzz-target=migration-{side}", *map(str, words)]


class Fuzzer:
    """libFuzzer for one side; its files are in build/fuzzing."""

    def __init__(self, side, seconds, seed):
        self.side = side
        self.log = WORK / f"{side}.log"
        self.findings = WORK / "findings" / side
        self.findings.mkdir(parents=True)
        (WORK / "corpus" / side).mkdir(parents=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command(side, f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={MAX_BYTES}",
                        f"-timeout={TIMEOUT_S}", "-rss_limit_mb=0", "-reload=0",
                        f"-artifact_prefix={self.findings}/", WORK / "corpus" / side, WORK / "seeds" / side),
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | {"ASAN_OPTIONS": SANITIZER})

    def figures(self):
        text = self.log.read_text(errors="replace")
        # from lines such as "#123 NEW    cov: 4567 ft: ..."
        progress = re.findall(r"^#(\d+)\t.* cov: (\d+) ft: ", text, re.M)
        counters = re.search(r"\((\d+) inline 8-bit counters\)", text)
        executions, covered = map(int, progress[-1]) if progress else (0, 0)
        return {
            "executions_count": executions,
            "covered_edges_count": covered,
            "instrumented_edges_count": int(counters[1]) if counters else 0,
            "findings_count": len(self.found()),
        }

    def found(self):
        return sorted(self.findings.iterdir())

    def explain(self):
        """Print the first finding, and the command that repeats it."""
        lines = self.log.read_text(errors="replace").splitlines()
        at = next((i for i, line in enumerate(lines) if FOUND.search(line)), max(0, len(lines) - 60))
        print("\n".join(line.replace(f"{BINARY.parent}/../src/", "") for line in lines[at:at + 200]), flush=True)
        for finding in self.found():
            say(f"FOUND by the {self.side}; to repeat it: ASAN_OPTIONS=\"{SANITIZER}\" "
                + " ".join(command(self.side, finding)).replace(f"{ROOT}/", ""))
        if not self.found():
            say(f"the {self.side}'s fuzzer ended with status {self.process.returncode}: "
                f"{self.log.relative_to(ROOT)}")


def run(options):
    seconds, seed = options.seconds, options.seed
    started = time.monotonic()
    shutil.rmtree(WORK, ignore_errors=True)
    say(f"seed {seed}, {seconds} s; recording migrations")
    seeds.write(BINARY, WORK / "seeds")
    fuzzers = [Fuzzer(side, seconds, seed + i) for i, side in enumerate(SIDES)]
    failed = []
    try:
        while True:
            running = [f for f in fuzzers if f.process.poll() is None]
            failed = [f for f in fuzzers if f.process.returncode]
            if failed or not running:
                break
            time.sleep(0.5)
    finally:
        for fuzzer in fuzzers:
            fuzzer.process.send_signal(signal.SIGINT)
            fuzzer.process.wait()
    figures = {
        "seed": seed,
        "duration_s": round(time.monotonic() - started, 1),
        "sides": {f.side: f.figures() for f in fuzzers},
    }
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(figures, indent=2) + "\n")
    for side, f in figures["sides"].items():
        say(f"{side}: {f['executions_count']} executions, {f['covered_edges_count']} of "
            f"{f['instrumented_edges_count']} edges covered, {f['findings_count']} findings")
    say(f"seed {seed}; wrote {REPORT.relative_to(ROOT)}")
    for fuzzer in failed:
        fuzzer.explain()
    return 1 if failed else 0


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="to fuzz (60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31), help="of the mutations (random)")
    cli.main("fuzz", run, parser.parse_args())
