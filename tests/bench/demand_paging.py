# SPDX-License-Identifier: GPL-2.0-or-later
"""Page faults of a raw KVM guest in the lab: one userfaultfd with one reader, against exits.

Runs build/tests/demand-paging for several numbers of vCPUs and two kinds of memory. Prints tables, and writes
build/reports/demand-paging.json and .md. Ratios are of the medians, with those of the rounds in brackets.
"""
import itertools
import json
import statistics

from tests.bench import bench
from tests.lab import kvm_interface
from tests.lab.cli import say
from tests.lab.lab import Lab

PROGRAM = "build/tests/demand-paging"
BASE = "one reader"
VARIANTS = {BASE: "", "exits": "-w", "exits, mapped at once": "-w -p", "exits by a bitmap": "-w -t"}
# The kernel series was measured with the first kind.
KINDS = {"minor faults of shmem": "-m", "missing anonymous memory": ""}
TIMEOUT_S = 300


def measure(lab, kind, vcpus, variant, options):
    output = lab.run(f"{PROGRAM} -v {vcpus} -b {options.memory} {KINDS[kind]} {VARIANTS[variant]}",
                     timeout=TIMEOUT_S, check=True).output
    return json.loads(output)


def rates(runs):
    return [run["pages_per_s"] for run in runs]


def ratio(runs, variant):
    """(ratio of the medians, least of the rounds, most)"""
    base, other = rates(runs[BASE]), rates(runs[variant])
    rounds = [o / b for o, b in zip(other, base, strict=True)]
    return statistics.median(other) / statistics.median(base), min(rounds), max(rounds)


def median(runs, key):
    return statistics.median(run[key] for run in runs)


def tables(results):
    for kind, of in results.items():
        yield f"Pages/s, {kind}; median (least..most):\n"
        others = list(VARIANTS)[1:]
        yield "| vCPUs | " + " | ".join(VARIANTS) + " | " + " | ".join(f"{v} / {BASE}" for v in others) + " |"
        yield "| ---: " * (2 * len(VARIANTS)) + "|"
        for vcpus, runs in of.items():
            cells = [bench.spread(rates(r)) for r in runs.values()]
            cells += ["{:.2f} ({:.2f}..{:.2f})".format(*ratio(runs, v)) for v in others]
            yield f"| {vcpus} | " + " | ".join(cells) + " |"
        yield f"\nOf each fault, {kind}; medians:\n"
        yield ("| vCPUs | variant | touch, p50 (us) | p95 | p99 | exits | messages | EEXIST | voluntary switches | "
               "processor time (us) |")
        yield "| ---: | --- " + "| ---: " * 8 + "|"
        for vcpus, runs in of.items():
            for variant, r in runs.items():
                cpu_us = 1e6 * statistics.median(
                    (x["vcpu_threads_cpu_s"] + x["reader_threads_cpu_s"]) / x["touch_count"] for x in r)
                cells = [f"{median(r, f'latency_p{p}_us'):.0f}" for p in (50, 95, 99)]
                cells += [f"{median(r, key):.0f}" for key in ("exits_count", "uffd_events_count", "eexist_count")]
                cells += [f"{median(r, 'voluntary_switches_per_fault_count'):.2f}", f"{cpu_us:.0f}"]
                yield f"| {vcpus} | {variant} | " + " | ".join(cells) + " |"
        yield ""


def run(options):
    kinds = list(KINDS)[:1] if options.quick else list(KINDS)
    say("boot the lab")
    with Lab(name="demand-paging", memory_mb=1024 + 2 * options.memory * max(options.vcpus)) as lab:
        kvm_interface.offer(lab, *kvm_interface.ALL)
        bench.describe(lab, ())
        runs = bench.in_turn(itertools.product(kinds, options.vcpus), VARIANTS, options.rounds,
                             lambda case, variant: measure(lab, case[0], case[1], variant, options),
                             "{0[0]}, {0[1]} vCPUs".format)
    results = {kind: {vcpus: runs[kind, vcpus] for vcpus in options.vcpus} for kind in kinds}
    text = "\n".join([
        f"{options.rounds} rounds, interleaved, {options.memory} MiB for each vCPU, one userfaultfd for all memory.",
        "",
        *tables(results)])
    print(text)
    bench.write(options, {"results": results}, "Demand paging: exits against userfaultfd, without QEMU", text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "2 rounds of 4 MiB, one kind of memory", "demand-paging")
    parser.add_argument("--vcpus", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="(1 2 4 8 16)")
    parser.add_argument("--memory", type=int, default=16, metavar="MIB", help="of each vCPU (16)")
    bench.main(run, bench.parse(parser, rounds=2, memory=4))
