# SPDX-License-Identifier: GPL-2.0-or-later
"""Compare ways to resume a guest from a file, on this machine, with TCG.

A guest of each size is stopped and saved once (mapped-ram). Then it is resumed in each way in turn:
  stock     QEMU 10.0: all of the file is read first
  eager     the same by the fork
  lazy      the guest runs, its memory is in the file (postcopy-ram): by userfaultfd
  exits     the same by vCPUs that read for themselves: TCG's exits, in the build for tests
  set       as lazy, and what was missed in an earlier resume is read first
With --read-ms, each read of what has not been read before takes longer, as from a disk.

running: from migrate-incoming until the guest runs. work: from there until it has touched an eighth of the memory
that it uses, pages anywhere in it. all: until all has been read. Missed pages, and how long threads waited for them
together, are of the whole run, which checks all memory in the end; so is the processor time of QEMU. Prints a table,
and writes build/reports/NAME.json.
"""
import itertools
import statistics
import time

from tests.bench import bench
from tests.bench.bench import Figures
from tests.lab import cli
from tests.lab.cli import aligned, say
from tests.lab.host import Host
from tests.lab.pair import FORK, INJECT, STOCK, event_us, until
from tests.lab.paths import qemu
from tests.lab.snapshot import Machine

EAGER, LAZY = ("mapped-ram",), ("mapped-ram", "postcopy-ram")
EXITS = ("-global", "migration.postcopy-fault-exits=on")
# QEMU, capabilities, words
WAYS = {"stock": (STOCK, EAGER, ()), "eager": (FORK, EAGER, ()), "lazy": (FORK, LAZY, ()),
        "exits": (INJECT, LAZY, EXITS), "set": (FORK, LAZY, ())}
TIMEOUT_S = 300
# The guest uses memory below 2 GiB only, and leaves some of it to itself.
USED_MIB = 1792
FULL_SHARE = 0.8
SHOWN = (("running, ms", "running_ms", "{:.0f}"), ("work, ms", "work_ms", "{:.0f}"), ("all, ms", "all_ms", "{:.0f}"),
         ("processor, s", "processor_s", "{:.2f}"), ("missed pages", "missed_count", "{:.0f}"),
         ("waited, ms", "waited_ms", "{:.0f}"))


def resume(machine, way, read_us, khz):
    name, capabilities, words = WAYS[way]
    path = f"{machine.lab.tmp}/set"
    if way == "set":
        words = (*words, "-global", f"migration.restore-working-set={path}")
    slow = ("LD_PRELOAD=build/tests/slow-read.so", f"SLOW_READ_US={read_us}") if read_us else ()
    side = machine.start_destination(name, words, ("env", "-u", "QEMU_INJECT", *slow))
    side.set_capabilities("events", *capabilities)
    before_s = side.cpu_seconds_of_all()
    start_us = time.time() * 1e6
    side.cmd("migrate-incoming", uri=f"file:{machine.file}")
    at = {}

    def ended():
        for event in side.qmp.get_events():
            name = event.get("data", {}).get("status", event["event"])
            at[name] = (event_us(event) - start_us) / 1000
        return "completed" in at and "RESUME" in at
    until(ended, "the guest runs, and all has been read", TIMEOUT_S)
    side.wait_event("end")
    report = side.report()
    assert report.intact, report.events
    info = side.cmd("query-migrate")
    latency = info.get("postcopy-latency-dist") or []
    faults = info.get("postcopy-faults", {})
    figures = {
        "running_ms": at["RESUME"], "all_ms": max(at["completed"], at["RESUME"]),
        "work_ms": at["RESUME"] + max(event["ticks"] for event in report.all("samples")) / khz,
        "processor_s": side.cpu_seconds_of_all() - before_s,
        "missed_count": faults.get("requests", 0),
        "waited_ms": sum(latency) * info.get("postcopy-latency", 0) / 1e6,
    }
    side.end()
    machine.sides.remove(side)
    return figures


def cases(options):
    for gib, share in itertools.product(options.sizes, options.shares):
        yield {"guest_mib": gib << 10, "used_mib": int(min((gib << 10) * FULL_SHARE, USED_MIB) * share) & ~1}


def measure(place, case, options):
    """{milliseconds of a read: {way: figures of each round}}"""
    runs: dict[float, dict[str, list[Figures]]] = {
        ms: {way: [] for way in options.ways} for ms in options.read_ms}
    with Machine(place, memory_mb=case["guest_mib"], cpus=options.cpus, mem=case["used_mib"], pattern="hot", seed=1,
                 capabilities=["mapped-ram"]) as machine:
        khz = machine.side.wait_event("boot")["tsc_khz"]
        # A snapshot of a guest that runs
        machine.take()
        machine.side.end()
        for ms, of in runs.items():
            place.run(f"rm -f {place.tmp}/set")
            if "set" in of:
                resume(machine, "set", int(ms * 1000), khz)      # makes it
            for n in range(options.rounds):
                for way in list(of)[::-1 if n % 2 else 1]:
                    of[way].append(resume(machine, way, int(ms * 1000), khz))
                    say(f"{name_of(case, ms)}, {way}: work done in {of[way][-1]['work_ms']:.0f} ms")
    return [{"case": case | {"read_ms": ms}, "runs": of} for ms, of in runs.items()]


def name_of(case, ms):
    return f"{case['guest_mib'] >> 10} GiB, {case['used_mib']} MiB used" + f", {ms:g} ms a read" * bool(ms)


def show(results):
    for result in results:
        print(f"\n{name_of(result['case'], result['case']['read_ms'])}; in brackets to the first")
        rows = [["", *(label for label, _, _ in SHOWN)]]
        base = None
        for way, runs in result["runs"].items():
            medians = {key: statistics.median(run[key] for run in runs) for _, key, _ in SHOWN}
            base = base or medians
            rows.append([way, *(f"{form.format(medians[key])}"
                                + (f" ({medians[key] / base[key]:.2f})" if base[key] and base is not medians else "")
                                + f" {form.format(min(run[key] for run in runs))}.."
                                f"{form.format(max(run[key] for run in runs))}"
                                for _, key, form in SHOWN)])
        print("\n".join(aligned(rows)))


def run(options):
    about = bench.about()
    with Host("tcg") as place:
        about |= {"qemu_versions": {v: place.run(f"{qemu(place.arch, v)} --version", check=True).output.splitlines()[0]
                                    for v in (STOCK, FORK)}}
        results: list[Figures] = [result for case in cases(options) for result in measure(place, case, options)]
    text = f"Medians of {options.rounds} rounds, least and most.\n```{bench.printed(show, results)}```"
    settings = {"vcpus_count": options.cpus, "rounds_count": options.rounds}
    bench.write(options.name, {"about": about, "settings": settings, "results": results},
                "Resume from a file" + ", of a slow disk" * any(options.read_ms), text)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--name", default="restore", help="of the report (restore)")
    parser.add_argument("--quick", action="store_true", help="1 round of 1 GiB")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="GIB", help="of the guest (1 4 8)")
    parser.add_argument("--shares", nargs="+", type=float, default=[1, .25], help="of the memory that is used (1 0.25)")
    parser.add_argument("--read-ms", nargs="+", type=float, default=[0], metavar="MS",
                        help="what each read takes beside its own time (0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    parser.add_argument("--rounds", type=int, help="of each case (5)")
    parser.add_argument("--cpus", type=int, default=2, help="vCPUs of the guest (2)")
    options = parser.parse_args()
    options.sizes = options.sizes or ([1] if options.quick else [1, 4, 8])
    options.rounds = options.rounds or (1 if options.quick else 5)
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
