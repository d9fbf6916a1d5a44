# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of reading the counters, CNTVCT and CNTPCT, for an arm64 guest: as they are, and with an offset.

A guest's virtual counter always has an offset, which the hardware adds. An offset of the physical counter, as of a VM
with kvm-counter-offset=on, is KVM's on processors without FEAT_ECV's CNTPOFF: each reading traps. Stock QEMU gives
each VM such an offset when it starts, by writing back the value that it has read.

In the lab, with its emulated processors, only the ratio is meaningful. With --qemu, this machine's KVM runs the guest.
Prints a table, and writes build/reports/counter.json and .md.
"""
import math
import shlex

from tests.bench import bench
from tests.bench.bench import Figures
from tests.lab import cli, guest
from tests.lab.arm_clocks import ONE_OFFSET
from tests.lab.cli import ProgramError
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.paths import qemu

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


def measure(place, program, words):
    log = f"{place.tmp}/counter"
    command = [program, "-accel", "kvm", "-cpu", "max",
               *guest.arguments("source", log, arch="aarch64", cpus=1, memory_mb=32,
                                payload=guest.payload("counter", "aarch64")), *words]
    report = guest.Report(place.run(f"{shlex.join(command)} && cat {log}", check=True).output)
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
          + ("\nProcessors are emulated here: only the ratio tells something." if report["lab"] else ""))


def run(options):
    report: Figures = {"lab": not options.qemu, "counters": {}}
    place: Lab | Host = Host("kvm", arch="aarch64") if options.qemu else Lab(name="counter", arch="aarch64")
    with place:
        for variant, (which, words) in VARIANTS.items():
            if options.qemu and which == "stock":
                continue
            for event in measure(place, options.qemu or qemu("aarch64", which), words):
                report["counters"][f"{event['counter']} {variant}"] = figures(event)
    by_name = report["counters"]
    report["offset_to_native_ratio"] = {
        counter: round(by_name[f"{counter} offset"]["mean_ns"] / by_name[f"{counter} native"]["mean_ns"], 2)
        for counter in ("virtual", "physical")}
    bench.write(options, report, "Reading an arm64 guest's counters", bench.printed(show, report))


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.set_defaults(name="counter")
    parser.add_argument("--qemu", metavar="PROGRAM", help="run the guest on this machine, by that qemu-system-aarch64")
    bench.main(run, parser.parse_args())
