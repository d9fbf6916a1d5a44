# SPDX-License-Identifier: GPL-2.0-or-later
"""Resume several Linux guests of 512 MiB at the same time from one file, on this machine, with TCG.

The ways are those of restore.py; lazy and exits leave pages that a guest does not touch in the file.

running, work: from migrate-incoming of the first guest until the last one runs, and has checked some 100 MiB of its
memory. memory: of all QEMUs at that time, where pages that several of them map count once (Pss); in each way, the page
cache also has the file, once. Prints a table, and writes build/reports/restore-many.json.
"""
import time

from tests.bench import bench
from tests.bench.restore import TIMEOUT_S, WAYS, LinuxMachine, fill_mib, publish
from tests.lab.host import Host
from tests.lab.pair import QMP_PORT, until
from tests.lab.text import search

MEMORY_MIB = 512
# With restore.py's interval, the reports of 16 guests would use both processors
REPORT_MS = 50
FILE = ("-global", "migration.restore-background=off")
SHOWN = (("running, ms", "running_ms", "{:.0f}"), ("work, ms", "work_ms", "{:.0f}"),
         ("memory, MiB", "memory_mib", "{:.0f}"), ("missed pages", "missed_count", "{:.0f}"))


def memory_mib(side):
    text = side.lab.run(f"cat /proc/$(cat {side.pidfile})/smaps_rollup", check=True).output
    return int(search(r"^Pss:\s+(\d+) kB", text)[1]) / 1024


def resume(machine, way, number):
    guests = [machine.launch(way, name=f"guest{i}", words=FILE * (way in ("lazy", "exits"))) for i in range(number)]
    start = time.time()
    for guest in guests:
        guest.start()
    # all() would skip the guests behind the first one that has not finished
    until(lambda: sum(guest.worked() for guest in guests) == number, "the guests have done their work", TIMEOUT_S,
          pause=0.003)
    used = sum(memory_mib(guest.side) for guest in guests)
    late = [guest.start_us / 1000 - start * 1000 for guest in guests]
    figures = [machine.end(guest) for guest in guests]
    return {"running_ms": max(f["running_ms"] + ms for f, ms in zip(figures, late, strict=True)),
            "work_ms": max(f["work_ms"] + ms for f, ms in zip(figures, late, strict=True)),
            "memory_mib": used, "missed_count": sum(f["missed_count"] for f in figures)}


def run(options):
    QMP_PORT.update({f"guest{i}": 4100 + i for i in range(max(options.guests))})
    with Host("tcg") as place:
        bench.describe(place)
        with LinuxMachine(place, MEMORY_MIB, report_ms=REPORT_MS, cpus=1, mem=fill_mib(MEMORY_MIB),
                          capabilities=["mapped-ram"]) as machine:
            machine.save_both()
            measured = bench.in_turn(options.guests, options.ways, options.rounds,
                                     lambda number, way: resume(machine, way, number), "{} guests".format)
    publish(options,
            {f"{number} guests": {"case": {"guests_count": number}, "runs": runs} for number, runs in measured.items()},
            SHOWN, "Resume many from a file")


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "one round of 2 guests", "restore-many")
    parser.add_argument("--guests", nargs="+", type=int, default=[1, 4, 16], help="at the same time (1 4 16)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["stock", "private", "lazy", "exits"],
                        help="(stock private lazy exits)")
    bench.main(run, bench.parse(parser, rounds=1, guests=[2]))
