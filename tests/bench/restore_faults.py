# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of a missing page for a guest that runs from a file in the page cache: by exits of KVM, and by userfaultfd.

In the lab. The vCPUs touch their memory in random order, page by page, only missed pages are read
(restore-background=off), and the guest is not notified of pages (postcopy-async-pf=off). Prints a table of the touches
that waited, and writes build/reports/restore-faults.json.
"""
from tests.bench import bench, postcopy
from tests.bench.restore import show_runs
from tests.bench.restore_many import FILE
from tests.lab import cli
from tests.lab.lab import Lab
from tests.lab.pair import until
from tests.lab.snapshot import Machine

WAYS = {"userfaultfd": "off", "exits": "on"}
UNTOLD = ("-global", "migration.postcopy-async-pf=off")
SHOWN = (("waited touch, p50, us", "waited_p50_us", "{:.0f}"), ("p99, us", "waited_p99_us", "{:.0f}"),
         ("touches that waited", "waited_count", "{:.0f}"), ("faults", "faults_count", "{:.0f}"),
         ("of them exits", "exits_count", "{:.0f}"))


def resume(lab, way, cpus, options):
    mem = options.memory * cpus
    with Machine(lab, capabilities=["mapped-ram"], cpus=cpus, mem=mem, memory_mb=mem + 64, seed=1) as machine:
        machine.save()
        boot = machine.side.report().the("boot")
        machine.side.end()
        side = machine.load(capabilities=("mapped-ram", "postcopy-ram"),
                            arguments=(*FILE, *UNTOLD, "-global", f"migration.postcopy-fault-exits={WAYS[way]}"))
        until(lambda: side.cmd("query-status")["status"] == "paused", "the guest is there")
        side.cmd("cont")
        side.wait_event("end")
        report = side.report()
        assert report.intact, report.all("bad")
        faults = side.cmd("query-migrate")["postcopy-faults"]
        touches, waited, *_ = postcopy.waits(side, report, boot["tsc_khz"])
        return {"touch_count": len(touches), "waited_count": len(waited), **postcopy.quantiles(waited, "waited"),
                "faults_count": faults["exits"] + faults["uffd"], "exits_count": faults["exits"]}


def measure(lab, options):
    for cpus in options.cpus:
        yield {"case": {"vcpus_count": cpus}, "runs": bench.in_turn(
            WAYS, options.rounds, lambda way, cpus=cpus: resume(lab, way, cpus, options),
            lambda way, figures, cpus=cpus: f"{cpus} vCPU(s), {way}: {figures['waited_p50_us']:.0f} us")}


def show(results):
    for result in results:
        show_runs(f"{result['case']['vcpus_count']} vCPU(s)", result["runs"], SHOWN)


def run(options):
    about = bench.about()
    with Lab(name="bench-restore", memory_mb=3072, icount=options.icount) as lab:
        results = list(measure(lab, options))
    text = f"Medians of {options.rounds} rounds, least and most.\n```{bench.printed(show, results)}```"
    bench.write("restore-faults", {"about": about, "settings": {
        "rounds_count": options.rounds, "memory_mib_per_vcpu": options.memory, "icount": options.icount},
        "results": results}, "A missing page of a file", text)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--cpus", nargs="+", type=int, default=[1, 2, 4], help="vCPUs of the guest (1 2 4)")
    parser.add_argument("--memory", type=int, default=12, metavar="MIB", help="that each vCPU touches (12)")
    parser.add_argument("--rounds", type=int, default=5, help="of each case (5)")
    parser.add_argument("--quick", action="store_true", help="one round of 1 vCPU")
    bench.add_icount(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.cpus = 1, [1]
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
