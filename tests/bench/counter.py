# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of reading the counters, CNTVCT and CNTPCT, for an arm64 guest: as they are, and with an offset.

A guest's virtual counter always has an offset, which the hardware adds. An offset of the physical counter, as of a VM
with kvm-counter-offset=on, is KVM's on processors without FEAT_ECV's CNTPOFF: each reading traps. Stock QEMU gives
each VM such an offset when it starts, by writing back the value that it has read.

In the lab, with its emulated processors, only the ratio is meaningful. Prints a table, and writes
build/reports/counter.json and .md.
"""
import math
import shlex

from tests.bench import bench
from tests.bench.bench import Figures
from tests.lab import cli, guest
from tests.lab.arm_clocks import ONE_OFFSET
from tests.lab.cli import ProgramError
from tests.lab.lab import Lab

# Name: QEMU, words of its command line
VARIANTS = {"native": ("fork", ()), "offset": ("fork", ONE_OFFSET), "stock": ("stock", ())}


def figures(event):
    n, ns = event["readings"], 1e9 / event["hz"]
    mean = event["sum"] / n
    return {
        "mean_ns": round(mean * ns, 2),
        "standard_deviation_ns": round(math.sqrt(max(event["sum_of_squares"] / n - mean * mean, 0)) * ns, 2),
        "median_ns": event["median"] * ns,
        "p95_ns": event["p95"] * ns,
        "most_ns": event["most"] * ns,
    }


def measure(lab, program, words):
    log = f"{lab.tmp}/counter"
    command = [program, "-accel", "kvm", "-cpu", "max",
               *guest.arguments("source", log, arch="aarch64", cpus=1, memory_mb=32,
                                payload=guest.payload("counter", "aarch64")), *words]
    report = guest.Report(lab.run(f"{shlex.join(command)} && cat {log}", check=True).output)
    if report.error:
        raise ProgramError(f"the guest gave up: {report.error}")
    return report.all("counter")


def show(report):
    print("| counter | mean | standard deviation | median | 95 % | most |\n| --- | --- | --- | --- | --- | --- |")
    for name, f in report["counters"].items():
        print("| " + " | ".join([name, *(f"{f[key]:,.0f} ns" for key in (
            "mean_ns", "standard_deviation_ns", "median_ns", "p95_ns", "most_ns"))]) + " |")
    print(f"\nWith an offset, a reading takes {report['offset_to_native_ratio']['physical']} times as long of the "
          f"physical counter, and {report['offset_to_native_ratio']['virtual']} times of the virtual one."
          "\nProcessors are emulated here: only the ratio tells something.")


def run(options):
    by_name: Figures = {}
    with Lab(name="counter", arch="aarch64") as lab:
        for variant, (which, words) in VARIANTS.items():
            for event in measure(lab, lab.qemu(which), words):
                by_name[f"{event['counter']} {variant}"] = figures(event)
    report = {"counters": by_name, "offset_to_native_ratio": {
        counter: round(by_name[f"{counter} offset"]["mean_ns"] / by_name[f"{counter} native"]["mean_ns"], 2)
        for counter in ("virtual", "physical")}}
    bench.write(options, report, "Reading an arm64 guest's counters", bench.printed(show, report))


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.set_defaults(name="counter")
    bench.main(run, parser.parse_args())
