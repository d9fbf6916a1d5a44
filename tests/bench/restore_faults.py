# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of a missing page for a guest that runs from a file in the page cache: by exits of KVM, and by userfaultfd.

In the lab. The vCPUs touch their memory in random order, page by page, only missed pages are read
(restore-background=off), and the guest is not notified of pages (postcopy-async-pf=off). Prints a table of the touches
that waited, and writes build/reports/restore-faults.json.
"""
from tests.bench import bench, postcopy
from tests.bench.restore import publish
from tests.bench.restore_many import FILE
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


def run(options):
    with Lab(name="bench-restore", memory_mb=3072, icount=options.icount) as lab:
        measured = bench.in_turn(options.cpus, WAYS, options.rounds,
                                 lambda cpus, way: resume(lab, way, cpus, options), "{} vCPU(s)".format)
    publish(options,
            {f"{cpus} vCPU(s)": {"case": {"vcpus_count": cpus}, "runs": runs} for cpus, runs in measured.items()},
            SHOWN, "A missing page of a file")


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "one round of 1 vCPU", "restore-faults")
    parser.add_argument("--cpus", nargs="+", type=int, default=[1, 2, 4], help="vCPUs of the guest (1 2 4)")
    parser.add_argument("--memory", type=int, default=12, metavar="MIB", help="that each vCPU touches (12)")
    bench.add_icount(parser)
    bench.main(run, bench.parse(parser, rounds=1, cpus=[1]))
