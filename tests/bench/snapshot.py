# SPDX-License-Identifier: GPL-2.0-or-later
"""Compare background snapshots of stock QEMU and of the fork, on this host's kernel or in the lab.

Each case is a guest of some size, nearly empty or full, with and without transparent huge pages, of
anonymous memory or a memfd. Each round starts it anew with each QEMU in turn and takes one
snapshot to a file, while the guest writes all that it has. Prints a table, and writes
build/reports/snapshot.json. Snapshots are in the directory for temporary files (TMPDIR).

setup: from the start of the snapshot until the guest runs on, by the time stamps of QEMU's events
MIGRATION (setup) and RESUME; stopped: from STOP on. grown: resident memory and page tables, after
against before. A touch is a write of the guest, by its TSC, from just before the snapshot until
just after it; shares of all touches do not compare, since one snapshot lasts longer than the other.

Before that, the table of the commit that brought UFFD_FEATURE_WP_UNPOPULATED to Linux, by a program
without QEMU (tests/bench/protect.c): the time to protect empty memory in each way.
"""
import itertools
import json
import shlex
import statistics
import time
from collections import namedtuple

from tests.bench import bench
from tests.lab import guest
from tests.lab.cli import say
from tests.lab.host import Host
from tests.lab.initramfs import programs
from tests.lab.lab import Lab
from tests.lab.pair import FORK, STOCK
from tests.lab.paths import ROOT
from tests.lab.snapshot import Machine
from tests.lab.text import search

VARIANTS = (STOCK, FORK)
Case = namedtuple("Case", "guest_mib full thp memory written_mib")
KINDS = ("anonymous", "memfd")
EMPTY_MIB = 16              # that an "empty" guest writes
# The guest uses memory below 2 GiB only, some of it for itself; it takes huge pages only.
FULL_MIB = 1792
FULL_SHARE = 0.8
WAIT_US = 100               # longer touches have waited
TIMEOUT_S = 300
SETTLE_S = 1                # of writing before the snapshot
# Ways of protect.c, and QEMU's use of each.
WAYS = {
    "default": "protected as it is: first writes to empty pages are missed",
    "pre-read": "a byte of each page is read first: stock QEMU",
    "madvise": "MADV_POPULATE_READ first: the fork on Linux 5.14 to 6.3",
    "wp-unpopulated": "UFFD_FEATURE_WP_UNPOPULATED: the fork on Linux 6.4 to 6.6",
    "pagemap-scan": "protected, then PAGEMAP_SCAN tells what is empty: the fork from Linux 6.7 on",
}
# Microseconds of Linux's commit 2bad466cc9d9, "mm/uffd: UFFD_FEATURE_WP_UNPOPULATED"
PUBLISHED_US = {
    False: {"default": 4, "pre-read": 1111453, "madvise": 278276, "wp-unpopulated": 11712},
    True: {"default": 4, "pre-read": 22521, "madvise": 4909, "wp-unpopulated": 14448},
}


def protect_ways(lab, protect, options):
    """{transparent huge pages: {way: figures of each round}}"""
    def measure(thp, way):
        argv = [*lab.huge_pages(thp), protect, way, options.ways_mib, "on" if thp else "off"]
        return json.loads(lab.run(shlex.join(map(str, argv)), timeout=TIMEOUT_S, check=True).output)
    return bench.in_turn((False, True), WAYS, options.rounds, measure, "huge pages {}".format)


def show_ways(runs, mib):
    print(f"\nProtect {mib} MiB of empty anonymous memory, us; in brackets those of Linux's commit\n"
          f"{'':18}{'THP off':>24}{'THP on':>24}")
    for way, what in WAYS.items():
        cells = []
        for thp, of in runs.items():
            published = PUBLISHED_US[thp].get(way)
            cells.append(f"{statistics.median(r['total_us'] for r in of[way]):.0f} "
                         f"{f'({published})' if published else '(-)':>10}")
        print(f"  {way:16}" + "".join(f"{cell:>24}" for cell in cells) + f"  {what}")


def measure(lab, variant, case, options):
    """One snapshot; its figures."""
    with Machine(lab, variant, case.memory, case.guest_mib, options.cpus, wrapper=lab.huge_pages(case.thp),
                 mem=case.written_mib, seed=1, time=1) as machine:
        side = machine.side
        boot = side.wait_event("boot")
        time.sleep(SETTLE_S)
        buckets = boot["times_address"], 4 * guest.TIMES_BUCKETS * options.cpus
        before_kib, times = machine.resident_kib(), side.memory(*buckets)
        machine.start()
        at = bench.times_us(side)
        touches = guest.times(times, side.memory(*buckets), boot["tsc_khz"])
        return {
            "setup_us": at["RESUME"] - at["setup"], "stopped_us": at["RESUME"] - at["STOP"],
            "total_ms": (at["completed"] - at["setup"]) / 1000,
            "grown_kib": machine.resident_kib() - before_kib,
            "huge_after_kib": machine.huge_kib(), "file_bytes": machine.snapshot_bytes(),
            "touch_p100_us": touches[-1][0],
            "waited_count": sum(n for us, n in touches if us > WAIT_US),
            "waited_ms": sum(us * n for us, n in touches if us > WAIT_US) / 1000,
            "query_migrate": side.cmd("query-migrate").get("background-snapshot"),
        }


def cases(lab, options):
    available = search(r"MemAvailable:\s+(\d+)", lab.run("cat /proc/meminfo", check=True).output)
    for gib, full, thp, memory in itertools.product(options.sizes, (False, True), (False, True), KINDS):
        if memory == "memfd" and (full or thp):
            continue        # the host's setting of huge pages for shmem decides
        mib = gib * 1024
        case = Case(mib, full, thp, memory, min(int(mib * FULL_SHARE) & ~1, FULL_MIB) if full else EMPTY_MIB)
        if int(available[1]) >> 10 < mib * 1.5 + 512:
            say(f"{name_of(case)}: left out, there are {int(available[1]) >> 10} MiB")
            continue
        yield case


def name_of(case):
    return (f"{case.guest_mib >> 10} GiB {'full' if case.full else 'empty'}, {case.memory}, "
            f"THP {'on' if case.thp else 'off'}")


SHOWN = (
    ("setup (ms)", "setup_us", 1000, "{:.1f}"), ("stopped (ms)", "stopped_us", 1000, "{:.1f}"),
    ("total (ms)", "total_ms", 1, "{:.0f}"), ("grown (MiB)", "grown_kib", 1024, "{:.1f}"),
    ("file (MiB)", "file_bytes", 1 << 20, "{:.0f}"),
    ("touches that waited", "waited_count", 1, "{:.0f}"),
    ("waited in all (ms)", "waited_ms", 1, "{:.0f}"), ("longest (ms)", "touch_p100_us", 1000, "{:.1f}"),
    ("huge pages after (MiB)", "huge_after_kib", 1024, "{:.0f}"),
)


def show(results):
    for case, of_case in results.items():
        median = {v: {key: statistics.median(run[key] for run in runs) for _, key, _, _ in SHOWN}
                  for v, runs in of_case.items()}
        print(f"\n{name_of(case)}\n{'':26}" + "".join(f"{v:>12}" for v in median)
              + f"{'stock / fork':>14}")
        for label, key, divisor, form in SHOWN:
            values = [of[key] / divisor for of in median.values()]
            ratio = f"{values[0] / values[1]:.2f}" if values[1] > 0 and values[0] >= 0 else "-"
            print(f"  {label:24}" + "".join(f"{form.format(v):>12}" for v in values) + f"{ratio:>14}")


def run(options):
    protect = programs()["protect"]
    place: Lab | Host
    if options.lab:
        # The guest, its snapshot, and the growth of a memfd with stock QEMU.
        protect = protect.relative_to(ROOT)
        place = Lab(name="bench", memory_mb=1024 * max(options.sizes) * 2 + 2048)
    else:
        place = Host("tcg")
    with place as lab:
        bench.describe(lab)
        ways = protect_ways(lab, protect, options)
        results = bench.in_turn(cases(lab, options), VARIANTS, options.rounds,
                                lambda case, variant: measure(lab, variant, case, options), name_of)
    text = (f"Medians of {options.rounds} rounds.\n```{bench.printed(show_ways, ways, options.ways_mib)}"
            f"{bench.printed(show, results)}```")
    bench.write(options, {
        "protect": [{"thp": thp, "way": way, "published_us": PUBLISHED_US[thp].get(way), "runs": of}
                    for thp, by_way in ways.items() for way, of in by_way.items()],
        "results": [{"case": case._asdict(), "runs": runs} for case, runs in results.items()]},
        "Background snapshots, " + ("in the lab" if options.lab else "on the host's kernel"), text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 3, "1 round of a guest of 1 GiB")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="GIB", help="of the guest (1 4 8; in the lab 1)")
    parser.add_argument("--ways-mib", type=int, metavar="MIB",
                        help="of empty memory, without QEMU (4096; in the lab and with --quick 1024)")
    parser.add_argument("--cpus", type=int, default=2, help="vCPUs of the guest (2)")
    parser.add_argument("--lab", action="store_true", help="in the lab, not on this host")
    options = bench.parse(parser, rounds=1, sizes=[1], ways_mib=1024)
    options.sizes = options.sizes or ([1] if options.lab else [1, 4, 8])
    options.ways_mib = options.ways_mib or (1024 if options.lab else 4096)
    options.name = options.name or ("snapshot-lab" if options.lab else "snapshot")
    bench.main(run, options)
