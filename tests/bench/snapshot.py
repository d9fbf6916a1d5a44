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
import re
import shlex
import statistics
import time

from tests.bench import bench
from tests.bench.bench import Figures
from tests.lab import cli, guest
from tests.lab.cli import ProgramError, say
from tests.lab.host import Host
from tests.lab.initramfs import programs
from tests.lab.lab import Lab
from tests.lab.pair import FORK, STOCK, event_us
from tests.lab.paths import ROOT, qemu
from tests.lab.snapshot import Machine
from tests.lab.text import search

VARIANTS = (STOCK, FORK)
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
    runs: dict[bool, dict[str, list[Figures]]] = {thp: {way: [] for way in WAYS} for thp in (False, True)}
    for n in range(options.rounds):
        for thp, of in runs.items():
            wrapper = lab.huge_pages(thp)
            for way in list(of)[::-1 if n % 2 else 1]:
                argv = [*wrapper, protect, way, options.ways_mib, "on" if thp else "off"]
                output = lab.run(shlex.join(map(str, argv)), timeout=TIMEOUT_S, check=True).output
                of[way].append(json.loads(output))
    say("protected empty memory in each way")
    return runs


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


def memory_kib(machine):
    text = machine.proc("status") + machine.proc("smaps_rollup")
    fields = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return {"resident": fields["VmRSS"], "tables": fields["VmPTE"], "huge": fields["AnonHugePages"]}


def quantile(times, share):
    """times: [(microseconds, touches)] in order."""
    left = share * sum(n for _, n in times)
    for us, n in times:
        left -= n
        if left <= 0:
            return us
    return None


def measure(lab, variant, case, options):
    """One snapshot; its figures."""
    with Machine(lab, variant, case["memory"], case["guest_mib"], options.cpus, wrapper=lab.huge_pages(case["thp"]),
                 mem=case["written_mib"], seed=1, time=1) as machine:
        side = machine.side
        boot = side.wait_event("boot")
        time.sleep(SETTLE_S)
        buckets = boot["times_address"], 4 * guest.TIMES_BUCKETS * options.cpus
        before, times = memory_kib(machine), side.memory(*buckets)
        side.qmp.get_events()
        machine.start()
        at: dict[str, int] = {}
        while not {"completed", "failed"} & set(at):
            event = side.qmp.pull_event(wait=float(TIMEOUT_S))
            if not event:
                raise ProgramError("the snapshot does not end")
            name = event.get("data", {}).get("status") or event["event"]
            at[name] = event_us(event)
        info = side.cmd("query-migrate")
        if info["status"] != "completed":
            raise ProgramError(f"the snapshot failed: {info}")
        touches = guest.times(times, side.memory(*buckets), boot["tsc_khz"])
        after = memory_kib(machine)
        size = int(lab.run(f"stat -c %s {machine.file}", check=True).output)
        return {
            "setup_us": at["RESUME"] - at["setup"], "stopped_us": at["RESUME"] - at["STOP"],
            "total_ms": (at["completed"] - at["setup"]) / 1000,
            "grown_kib": sum(after[k] - before[k] for k in ("resident", "tables")),
            "huge_after_kib": after["huge"], "file_bytes": size,
            "touch_count": sum(n for _, n in touches),
            **{f"touch_p{name}_us": quantile(touches, share)
               for name, share in (("50", .5), ("99", .99), ("99_9", .999), ("100", 1))},
            "waited_count": sum(n for us, n in touches if us > WAIT_US),
            "waited_ms": sum(us * n for us, n in touches if us > WAIT_US) / 1000,
            "query_migrate": info.get("background-snapshot"),
        }


def cases(options):
    for gib, full, thp, memory in itertools.product(options.sizes, (False, True), (False, True), KINDS):
        if memory == "memfd" and (full or thp):
            continue        # the host's setting of huge pages for shmem decides
        mib = gib * 1024
        yield {"guest_mib": mib, "full": full, "thp": thp, "memory": memory,
               "written_mib": min(int(mib * FULL_SHARE) & ~1, FULL_MIB) if full else EMPTY_MIB}


def name_of(case):
    return (f"{case['guest_mib'] >> 10} GiB {'full' if case['full'] else 'empty'}, {case['memory']}, "
            f"THP {'on' if case['thp'] else 'off'}")


SHOWN = (
    ("setup (ms)", "setup_us", 1000, "{:.1f}"), ("stopped (ms)", "stopped_us", 1000, "{:.1f}"),
    ("total (ms)", "total_ms", 1, "{:.0f}"), ("grown (MiB)", "grown_kib", 1024, "{:.1f}"),
    ("file (MiB)", "file_bytes", 1 << 20, "{:.0f}"),
    ("touches that waited", "waited_count", 1, "{:.0f}"),
    ("waited in all (ms)", "waited_ms", 1, "{:.0f}"), ("longest (ms)", "touch_p100_us", 1000, "{:.1f}"),
    ("huge pages after (MiB)", "huge_after_kib", 1024, "{:.0f}"),
)


def show(results):
    for result in results:
        median = {v: {key: statistics.median(run[key] for run in runs) for _, key, _, _ in SHOWN}
                  for v, runs in result["runs"].items()}
        print(f"\n{name_of(result['case'])}\n{'':26}" + "".join(f"{v:>12}" for v in median)
              + f"{'stock / fork':>14}")
        for label, key, divisor, form in SHOWN:
            values = [of[key] / divisor for of in median.values()]
            ratio = f"{values[0] / values[1]:.2f}" if values[1] > 0 and values[0] >= 0 else "-"
            print(f"  {label:24}" + "".join(f"{form.format(v):>12}" for v in values) + f"{ratio:>14}")


def run(options):
    about = bench.about()
    results: list[Figures] = []
    protect = programs()["protect"]
    place: Lab | Host
    if options.lab:
        # The guest, its snapshot, and the growth of a memfd with stock QEMU.
        protect = protect.relative_to(ROOT)
        place = Lab(name="bench", memory_mb=1024 * max(options.sizes) * 2 + 2048)
    else:
        place = Host(options.accel)
    with place as lab:
        ways = protect_ways(lab, protect, options)
        for case in cases(options):
            free = lab.run("cat /proc/meminfo", check=True).output
            available_mib = int(search(r"MemAvailable:\s+(\d+)", free)[1]) >> 10
            if available_mib < case["guest_mib"] * 1.5 + 512:
                say(f"{name_of(case)}: left out, there are {available_mib} MiB")
                continue
            results.append({"case": case, "runs": bench.in_turn(
                VARIANTS, options.rounds, lambda variant, case=case: measure(lab, variant, case, options),
                lambda variant, figures, case=case:
                f"{name_of(case)}, {variant}: setup {figures['setup_us'] / 1000:.1f} ms")})
        about |= {"qemu_kernel_release": lab.run("uname -r", check=True).output.strip(),
                  "accelerator": " ".join(lab.qemu_words),
                  "qemu_versions": {v: lab.run(f"{qemu(lab.arch, v)} --version", check=True).output.splitlines()[0]
                                    for v in VARIANTS}}
    text = (f"Medians of {options.rounds} rounds.\n```{bench.printed(show_ways, ways, options.ways_mib)}"
            f"{bench.printed(show, results)}```")
    where = ("snapshot-lab", "in the lab") if options.lab else ("snapshot", "on the host's kernel")
    bench.write(where[0], {
        "about": about, "settings": {"vcpus_count": options.cpus, "seed": 1,
                                     "rounds_count": options.rounds, "settle_s": SETTLE_S,
                                     "ways_mib": options.ways_mib},
        "protect": [{"thp": thp, "way": way, "published_us": PUBLISHED_US[thp].get(way), "runs": of}
                    for thp, by_way in ways.items() for way, of in by_way.items()],
        "results": results}, f"Background snapshots, {where[1]}", text)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="1 round of a guest of 1 GiB")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="GIB", help="of the guest (1 4 8; in the lab 1)")
    parser.add_argument("--ways-mib", type=int, metavar="MIB",
                        help="of empty memory, without QEMU (4096; in the lab and with --quick 1024)")
    parser.add_argument("--rounds", type=int, help="snapshots of each case (3)")
    parser.add_argument("--cpus", type=int, default=2, help="vCPUs of the guest (2)")
    parser.add_argument("--lab", action="store_true", help="in the lab, not on this host")
    parser.add_argument("--accel", choices=("tcg", "kvm"), default="tcg",
                        help="of the guest, without --lab (tcg)")
    options = parser.parse_args()
    options.sizes = options.sizes or ([1] if options.quick or options.lab else [1, 4, 8])
    options.ways_mib = options.ways_mib or (1024 if options.quick or options.lab else 4096)
    options.rounds = options.rounds or (1 if options.quick else 3)
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
