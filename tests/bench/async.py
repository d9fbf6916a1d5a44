# SPDX-License-Identifier: GPL-2.0-or-later
"""The work of a Linux guest during post-copy: async page faults from vCPU exits, exits only, no exits
(KVM's own async page faults), and stock QEMU, in turn.

For each vCPU, the guest has a thread that writes memory at random and one that computes, and the same amounts of memory
and bandwidth, so that post-copy lasts as long with any number of vCPUs: longer than the measurement, which begins when
the guest resumes, by its own clock. The link has a delay. For some seconds after the switch, the guest's kernel misses
its own pages.

With --rate 0 the background is not limited, as by default, and the measured time is from the switch until all memory is
received with stock QEMU (or else the first way) in the same round. With --host, the QEMUs run on this machine by TCG,
on its unpatched kernel, and the guest cannot be notified of a page. Writes build/reports/NAME.json, NAME.md,
NAME.svg.
"""
import contextlib
import itertools
import shlex
import statistics
import time

from tests.bench import bench, pictures, postcopy
from tests.bench.bench import Figures
from tests.lab import cli, other_qemu
from tests.lab.backends import shared_disk
from tests.lab.cli import ProgramError, say
from tests.lab.host import Host
from tests.lab.lab import HIGHRES, Lab
from tests.lab.linux_guest import ASYNC_PF
from tests.lab.linux_pair import LinuxPair
from tests.lab.network import Network, programs
from tests.lab.other_qemu import PEER
from tests.lab.pair import FORK, MIB, STOCK, until
from tests.lab.paths import below
from tests.lab.proxy import SlowWire

# Name: (QEMU, postcopy-fault-exits, postcopy-async-pf)
WAYS: dict[str, tuple[str, str | None, str | None]] = {
    "exits, async": (FORK, "on", "auto"),
    "exits alone": (FORK, "on", "off"),
    "no exits": (FORK, "off", None),
    "stock": (STOCK, None, None),
}
# This many rounds begin with guests of the same boot
SAVED_ROUNDS = 5
KINDS = {"computed": "computer", "memory operations": "writer", "disk transfers": "disk"}


def total(line, thread):
    return sum(value for name, value in line.items() if name.startswith(thread))


def at(points, x):
    """y at x: between two points (x, y), y advances evenly."""
    if points[0][0] == x:
        return points[0][1]
    for (a, y), (b, z) in itertools.pairwise(points):
        if a <= x <= b:
            return y + (z - y) * (x - a) / (b - a) if b > a else y
    raise ProgramError(f"nothing was seen at {x:.0f}: only from {points[0][0]:.0f} to {points[-1][0]:.0f}")


def missed(pair, qemu):
    """Missed pages; those requested ahead only if they were missed, too."""
    if qemu in (STOCK, PEER):
        return pair.source.cmd("query-migrate")["ram"]["postcopy-requests"]
    faults = pair.faults()
    return faults["requests"] + faults["ahead-missed"]


def watch(pair, before, qemu):
    """[(memory operations, missed pages)], one every 0.1 s until post-copy ends."""
    points = [(0.0, 0)]
    while pair.source.cmd("query-migrate")["status"] == "postcopy-active":
        if lines := pair.destination.report().lines:
            points.append((total(lines[-1], "writer") - total(before, "writer"), missed(pair, qemu)))
        time.sleep(0.1)
    return points


def begun(pair, disk):
    until(lambda: (lines := pair.source.report().lines) and (not disk or total(lines[-1], "disk")),
          "the guest has begun", timeout=300)


def boot(pair, image):
    """The guest's report until it has begun. Sources of other pairs can load the guest from the image."""
    with pair:
        begun(pair, 0)
        made = pair.source.add_disk()
        error = pair.source.run_job("snapshot-save", tag="begun", vmstate="disk", devices=["disk"])
        assert not error, error
        pair.lab.run(f"mv {made} {image}", check=True)
        return pair.source.said()


def migrate(lab, network, way, cpus, options, booted):
    qemu, exits, asynchronous = WAYS[way.partition(postcopy.WITHOUT)[0]]
    qemu, words, wrapper = postcopy.build_of(way, qemu, postcopy.tells(options.ways))
    on = (*(ASYNC_PF[lab.arch] if qemu not in (STOCK, PEER) else ()), *shlex.split(options.words))
    mem = options.memory * cpus
    disk = shared_disk(lab, size_mib=options.disk)[1] if options.disk else ()

    def pair_with(*loaded):
        return LinuxPair(
            lab, exits=exits, source=qemu, destination=qemu, cpus=cpus, fetch="auto", traced=False,
            source_wrapper=wrapper, capabilities=("events", *("postcopy-preempt",) * options.preempt),
            wrapper=(*(network.wrapper if network else ()), *wrapper), mem=mem,
            memory_mb=mem + 128 + 3 * options.disk, source_options=(*on, *disk, *words, *loaded),
            destination_options=(*on, *disk), writers=cpus, **{"disk": options.disk} if disk else {},
            computers=0 if options.writers_only else cpus, interval=100)

    # Booting would take half of a round. A guest with a disk has no image.
    image = f"{lab.tmp}/begun-{qemu}-{cpus}.qcow2"
    if not disk and image not in booted:
        booted[image] = boot(pair_with(), image)
    loaded = () if disk else ("-blockdev", f"driver=qcow2,node-name=disk,file.driver=file,file.filename={image}",
                              "-loadvm", "begun")
    with pair_with(*loaded) as pair:
        pair.source.said_before = booted.get(image, "")
        if asynchronous:
            pair.destination.cmd("migrate-set-parameters", postcopy_async_pf=asynchronous)
        if network:
            uri = network.uri
            pair.destination.cmd("migrate-incoming", uri=uri)
        else:
            uri = pair.wire_of(SlowWire, pair.listen(), delay_us=options.delay).uri
        begun(pair, disk)
        pair.postcopy(uri, bandwidth=int(options.rate * cpus * MIB))
        before = {"ms": pair.source.report().lines[-1]["ms"], **pair.counts_at_switch()}
        misses = watch(pair, before, qemu)
        pair.destination.wait_status("completed")
        pair.check_memory()
        pair.check_threads()
        took_ms = postcopy.switch_to_last_page_ms(pair.source)
        if not options.rate:
            # The measured time ends with stock QEMU's last page, which may be later
            until(lambda: pair.destination.report().lines[-1]["ms"] > before["ms"] + 1.5 * took_ms,
                  "the guest resumes", timeout=300)
        info = pair.destination.cmd("query-migrate")
        lines = [before] + [line for line in pair.destination.report().lines if line["ms"] > before["ms"]]
        took = pair.source.cmd("query-migrate")
        faults = info.get("postcopy-faults") or {}
        return {
            "total_time_ms": took["total-time"],
            "downtime_ms": took["downtime"],
            "switch_to_last_page_ms": took_ms,
            "missed_pages_count": missed(pair, qemu),
            "exits_count": faults.get("exits"),
            "async": info.get("postcopy-async"),
            "missed_over_memory_operations": misses,
            "over_time": {kind: [((line["ms"] - before["ms"]) / 1000, total(line, thread) - total(before, thread))
                                 for line in lines] for kind, thread in KINDS.items()},
        }


def span_way(ways):
    return "stock" if "stock" in ways else next(iter(ways))


def of_span(runs, seconds):
    """For each way's run of a round, the guest's work in so many seconds of its clock; or, if 0, from the switch until
    stock QEMU's last page, without the downtime, in which its clock stands still."""
    first = runs[span_way(runs)]
    for r in runs.values():
        span = seconds or (first["switch_to_last_page_ms"] - r["downtime_ms"]) / 1000
        r["measured_s"] = span
        for kind, points in r["over_time"].items():
            r[kind] = at(points, span)
            r["over_time"][kind] = [point for point in points if point[0] <= span]


def of_equal_work(results):
    """For each run, the pages missed until the guest had done as much work as the slowest way of its round."""
    for ways in results.values():
        for runs in zip(*ways.values(), strict=True):
            work = min(min(r["memory operations"], r["missed_over_memory_operations"][-1][0]) for r in runs)
            for r in runs:
                r["equal_memory_operations_count"] = work
                r["equal_work_missed_pages_count"] = at(r["missed_over_memory_operations"], work)


def kinds(results):
    """The kinds of work that any guest has done."""
    return [kind for kind in KINDS if any(r[kind] for ways in results.values() for runs in ways.values() for r in runs)]


def medians(rounds, what):
    values = [r[what] for r in rounds]
    return f"{statistics.median(values):>9.0f} ({min(values):.0f} to {max(values):.0f})"


def show(results):
    for cpus, ways in results.items():
        print(f"{cpus} vCPU(s), medians (least to most):")
        width = max(map(len, ways))
        did = kinds(results)
        print(f"{'':{width}}" + "".join(f"{kind:>26}" for kind in did)
              + f"{'missed pages':>22}{'of equal work':>24}{'total ms':>24}")
        for way, rounds in ways.items():
            print(f"{way:{width}}" + "".join(f"{medians(rounds, what):>{column}}" for what, column in (
                *((kind, 26) for kind in did), ("missed_pages_count", 22),
                ("equal_work_missed_pages_count", 24), ("total_time_ms", 24))))


def verdicts(results):
    for cpus, ways in results.items():
        for kind in kinds(results):
            middle = {way: statistics.median(r[kind] for r in rounds) for way, rounds in ways.items()}
            first, *others = middle
            ratios = ", ".join(f"{middle[first] / middle[way]:.2f} times {way}" for way in others if middle[way])
            yield f"{cpus} vCPU(s), {kind}: {first} is {ratios}"
            pairs = {way: [a[kind] / b[kind] for a, b in zip(ways[first], ways[way], strict=True) if b[kind]]
                     for way in others}
            yield "the same round by round: " + ", ".join(
                f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}) times {way}"
                for way, found in pairs.items() if found)
        for what, text in (("missed_pages_count", "in all"),
                           ("equal_work_missed_pages_count", "until the guest has done what the slowest way does")):
            misses = {way: statistics.median(r[what] for r in rounds) for way, rounds in ways.items()}
            yield f"{cpus} vCPU(s), pages missed {text}: " + ", ".join(f"{way} {n:.0f}" for way, n in misses.items())
        counts = [r["async"] for r in ways.get("exits, async", ())]
        if counts and all(counts):
            sums = {key: sum(c[key] for c in counts) for key in counts[0]}
            yield f"{cpus} vCPU(s), of all rounds: " + ", ".join(f"{key} {n}" for key, n in sorted(sums.items()))


def write(about, network, results, options):
    arm = options.arch == "aarch64"
    of_equal_work(results)
    title = "A Linux guest during post-copy: async page faults from exits" + ", arm64" * arm
    name = options.name or below("async" + "-writers" * options.writers_only, options.arch)
    link = f" (ping {network.round_trip_us:.0f} us)" if network else ""
    pictures.over_time(name, f"{title}, cumulative", {
        f"{cpus} vCPU(s): {kind}": {way: [r["over_time"][kind] for r in rounds] for way, rounds in ways.items()}
        for cpus, ways in results.items() for kind in KINDS}, "seconds since the guest resumes, by its clock")
    background = f"{options.rate} MiB/s of background" if options.rate else "a background without a limit"
    span = f"the first {options.seconds} s" if options.rate else f"until {span_way(options.ways)} has all memory"
    text = (f"For each vCPU {options.memory} MiB written at random and {background}; a link of {options.delay} us in "
            f"each direction{link}, {options.bandwidth or 'unlimited'} Mbit/s; {span}.\n"
            f"```\n{bench.printed(show, results)}```\n" + "\n".join(f"* {line}" for line in verdicts(results)))
    [rounds] = {len(runs) for ways in results.values() for runs in ways.values()}
    bench.write(name, {"about": about, "settings": {
        "memory_mib_per_vcpu": options.memory, "rate_mib_per_s_per_vcpu": options.rate, "delay_us": options.delay,
        "bandwidth_mbit_per_s": options.bandwidth, "preempt": options.preempt, "icount": options.icount,
        "accelerator": "tcg" if options.host else "kvm",
        "writers_only": options.writers_only, "disk_mib": options.disk, "words": options.words, "rounds_count": rounds},
        "runs": [{"vcpus_count": cpus, "ways": ways} for cpus, ways in results.items()]},
        title, text, [(name, title)])


def one_round(lab, network, n, options, booted):
    """All ways in turn; each round begins with another way."""
    if n % SAVED_ROUNDS == 0:
        booted.clear()
    order = options.ways[n % len(options.ways):] + options.ways[:n % len(options.ways)]
    for cpus, way in itertools.product(options.cpus, order):
        say(f"round {n + 1} of {options.rounds}, {cpus} vCPU(s): {way}")
        yield cpus, way, migrate(lab, network, way, cpus, options, booted)


def place(options):
    if options.host:
        return Host("tcg")
    return Lab(name=below("bench-async", options.arch), memory_mb=3072, append=HIGHRES, icount=options.icount,
               extra=[] if options.arch == "aarch64" else programs(), arch=options.arch)


def run(options):
    about = bench.about()
    if options.peer:
        name = f"QEMU {other_qemu.version()}"
        WAYS[name] = (PEER, None, None)
        options.ways.append(name)
    results: dict[int, dict[str, list[Figures]]] = {cpus: {way: [] for way in options.ways} for cpus in options.cpus}
    arm = options.arch == "aarch64"
    network = None
    try:
        with place(options) as lab:
            if options.peer:
                other_qemu.put(lab)
            link = contextlib.nullcontext() if arm else Network(lab, options.delay, options.bandwidth)
            booted: dict[str, str] = {}
            with link as network:
                for n in range(options.rounds):
                    found: dict[int, dict[str, Figures]] = {cpus: {} for cpus in options.cpus}
                    for cpus, way, figures in one_round(lab, network, n, options, booted):
                        found[cpus][way] = figures
                    for runs in found.values():
                        of_span(runs, options.seconds if options.rate else 0)
                    for cpus, runs in found.items():
                        for way in results[cpus]:
                            results[cpus][way].append(runs[way])
    finally:
        # Also if the run is interrupted
        if results[options.cpus[0]][options.ways[0]]:
            write(about, network, results, options)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default="x86_64", help="of the guest (x86_64)")
    parser.add_argument("--rounds", type=int, help="migrations of each way (8)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, 1 vCPU")
    parser.add_argument("--cpus", nargs="+", type=int, help="vCPUs of the guest (1 2 4)")
    parser.add_argument("--memory", type=int, default=96, metavar="MIB", help="that each vCPU writes (96)")
    parser.add_argument("--rate", type=float, default=6, metavar="MIB",
                        help="of the background for each vCPU, per second (6; 0: no limit)")
    parser.add_argument("--delay", type=int, metavar="US", help="of each direction (4000; with --host 0)")
    parser.add_argument("--bandwidth", type=int, default=0, metavar="MBIT", help="of the link, per second (no limit)")
    parser.add_argument("--no-preempt", dest="preempt", action="store_false", help="without postcopy-preempt")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help=f"only these ({', '.join(WAYS)}), e.g. stock "
                        f"'exits, async' 'exits, async{postcopy.WITHOUT}along', see postcopy.py")
    parser.add_argument("--peer", action="store_true", help="also Debian's newest QEMU")
    parser.add_argument("--name", help="of the report (async)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", action="store_true", help="on this machine, as root, with --bandwidth and no delay")
    bench.add_icount(where)
    parser.add_argument("--writers-only", action="store_true", help="no thread computes: the same work in each way")
    parser.add_argument("--disk", type=int, default=0, metavar="MIB",
                        help="a thread writes and reads so much of a disk, which the main thread serves (0: none)")
    parser.add_argument("--words", default="", help="of both QEMUs, as '-global x86_64-cpu.kvm-asyncpf-int=off'")
    parser.add_argument("--seconds", type=float, default=8, help="that are measured (8)")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 8)
    options.cpus = options.cpus or ([1] if options.quick else [1, 2, 4])
    if options.delay is None:
        options.delay = 0 if options.host else 4000
    default = "no exits" if options.host else "exits, async"
    options.ways = options.ways or ([default, "stock"] if options.host or not options.rate else list(WAYS))
    if unknown := {way.partition(postcopy.WITHOUT)[0] for way in options.ways} - set(WAYS):
        parser.error(f"no way {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
