#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Many post-copy migrations in the lab, each with a random guest, load, backend and trouble.

The guest checks all of its memory after each. Writes build/reports/soak.json. A failure ends
the run, and tells the seed that repeats it.
"""
import argparse
import contextlib
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / part) for part in ("lab", "guest", "postcopy")]

from lab import Lab                                     # noqa: E402
from pair import MIB, Pair                              # noqa: E402
from qemu.qmp import ExecuteError                       # noqa: E402

REPORT = ROOT / "build" / "reports" / "soak.json"
HUGEPAGES = 256
SMALL = {"anonymous": None, "memfd": "memory-backend-memfd", "shm": "memory-backend-shm"}
HUGE = {"hugetlb": "memory-backend-memfd,hugetlb=on,hugetlbsize=2M",
        "hugetlb-private": "memory-backend-file,mem-path=/dev/hugepages,share=off"}


def chosen(seed):
    """What to do, from the seed alone."""
    r = random.Random(seed)
    huge = r.random() < 0.3
    return {
        "seed": seed,
        "backend": r.choice(list(HUGE if huge else SMALL)),
        "exits": r.choice(["on", "off"]),
        "preempt": r.random() < 0.5,
        "cpus": r.randint(1, 4),
        "pattern": r.choice(["disjoint", "shared"] + (["samehuge"] if huge else ["zerowrite"])),
        "mem": 48 if huge else r.randrange(4, 21, 2),
        "zero": r.choice([0, 12, 50, 90]),
        "bandwidth_bytes_per_s": r.choice([8, 64] if huge else [1, 4, 64]) * MIB,
        "troubles": [(r.choice(["pause", "break"]), r.uniform(0, 0.7)) for _ in range(r.choice([0, 1, 1, 2]))],
    }


def migrate(lab, c):
    huge = c["backend"] in HUGE
    with Pair(lab, exits=c["exits"], backend=(HUGE | SMALL)[c["backend"]], cpus=c["cpus"],
              capabilities=("postcopy-preempt",) if c["preempt"] else (),
              memory_mb=64 if huge else 32, pattern=c["pattern"], mem=c["mem"],
              zero=c["zero"], seed=c["seed"] & 0xffff) as pair:
        wire = pair.wire(pair.listen())
        pair.postcopy(wire.uri, bandwidth=c["bandwidth_bytes_per_s"])
        recoveries = 0
        for trouble, after_s in c["troubles"]:
            pair.destination.wait_event("timing")
            time.sleep(after_s)
            if pair.source.status() != "postcopy-active" or pair.destination.status() != "postcopy-active":
                break
            if trouble == "pause":
                with contextlib.suppress(ExecuteError):     # it has completed since
                    pair.source.cmd("migrate-pause")
            wire.cut()
            if pair.settled() == "completed":
                # Of which the source may not have heard.
                pair.check_memory()
                return pair.faults(), recoveries
            wire = pair.wire(pair.listen("migrate-recover"))
            pair.source.cmd("migrate", uri=wire.uri, resume=True)
            pair.wait_recovered()
            recoveries += 1
        pair.finish()
        return pair.faults(), recoveries


class Soak:
    """Two at a time, each with a first-level machine of its own."""

    def __init__(self, options):
        self.todo = iter(range(options.seed, options.seed + options.number))
        self.number = options.number
        self.done = []
        self.failed = None
        self.started = time.monotonic()
        self.lock = threading.Lock()    # of all above

    def take(self):
        with self.lock:
            return None if self.failed else next(self.todo, None)

    def work(self, name):
        try:
            with Lab(name=name, memory_mb=3072, hugepages=HUGEPAGES) as lab:
                while (seed := self.take()) is not None:
                    c = chosen(seed)
                    begun = time.monotonic()
                    try:
                        faults, recoveries = migrate(lab, c)
                        lab.check_kernel()
                    except BaseException:
                        self.fail(f"{c}\n{traceback.format_exc()}\nrepeat with: make soak SOAK=1 SEED={seed}")
                        return
                    self.tell(c | {"recoveries_count": recoveries, "faults_count": faults,
                                   "duration_s": round(time.monotonic() - begun, 1)})
        except BaseException:
            self.fail(traceback.format_exc())

    def fail(self, text):
        with self.lock:
            self.failed = self.failed or text

    def tell(self, result):
        with self.lock:
            self.done.append(result)
            print(f"[{time.monotonic() - self.started:6.1f} s] {len(self.done)}/{self.number} seed {result['seed']}: "
                  f"{result['backend']}, {result['pattern']}, {result['cpus']} vCPUs, exits {result['exits']}, "
                  f"{'preempt' if result['preempt'] else 'one channel'}, {result['recoveries_count']} recoveries: intact",
                  flush=True)

    def run(self):
        threads = [threading.Thread(target=self.work, args=(f"soak{i}",)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.fail("interrupted")
            print("soak: interrupted; waiting for the migrations under way", file=sys.stderr)
            for thread in threads:
                thread.join()

    def summary(self):
        totals = Counter()
        for result in self.done:
            for key, value in result["faults_count"].items():
                if isinstance(value, int):
                    totals[key] += value
        return {
            "migrations_count": len(self.done),
            "recoveries_count": sum(result["recoveries_count"] for result in self.done),
            "duration_s": round(time.monotonic() - self.started, 1),
            "by_choice_count": {key: dict(Counter(str(result[key]) for result in self.done))
                                for key in ("backend", "exits", "preempt", "pattern", "cpus")},
            "faults_count": totals,
            "failed": self.failed,
            "migrations": sorted(self.done, key=lambda result: result["seed"]),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="of migrations (200)")
    parser.add_argument("--seed", type=int, default=1, help="of the first one; the others follow (1)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    soak = Soak(parser.parse_args())
    soak.run()
    summary = soak.summary()
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps({k: v for k, v in summary.items() if k not in ("migrations", "failed")}, indent=2))
    print(f"wrote {REPORT.relative_to(ROOT)}")
    if soak.failed:
        sys.exit(f"soak: FAILED: {soak.failed}")
    print(f"soak: {len(soak.done)} migrations, {summary['recoveries_count']} recoveries, memory intact each time")


if __name__ == "__main__":
    main()
