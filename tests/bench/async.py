# SPDX-License-Identifier: GPL-2.0-or-later
"""The work of a Linux guest during post-copy: async page faults from vCPU exits, exits only, no exits
(KVM's own async page faults), and stock QEMU, in turn.

For each vCPU, the guest has a thread that writes memory at random and one that computes, and the same amounts of memory
and bandwidth, so that post-copy lasts as long with any number of vCPUs: longer than the measurement, which begins when
the guest resumes, by its own clock. The link has a delay. For some seconds after the switch, the guest's kernel misses
its own pages.

With --rate 0 the background is not limited, as by default, and the measured time is from the switch until all memory is
received with stock QEMU (or else the first way) in the same round. With --host, the QEMUs run on this machine by TCG,
on its unpatched kernel, and the guest cannot be notified of a page. Writes build/reports/NAME.json and NAME.md.
"""
import contextlib
import itertools
import time

from tests.bench import bench, postcopy
from tests.lab import other_qemu
from tests.lab.cli import ProgramError, aligned
from tests.lab.lab import HIGHRES
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
SPAN_S = 8          # that is measured if the background has a limit
KINDS = {"computed": "computer", "memory operations": "writer"}


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


def begun(pair):
    until(lambda: pair.source.report().lines, "the guest has begun", timeout=300)


def boot(pair, image):
    """The guest's report until it has begun. Sources of other pairs can load the guest from the image."""
    with pair:
        begun(pair)
        made = pair.source.add_disk()
        error = pair.source.run_job("snapshot-save", tag="begun", vmstate="disk", devices=["disk"])
        assert not error, error
        pair.lab.run(f"mv {made} {image}", check=True)
        return pair.source.said()


def migrate(lab, network, way, cpus, options, booted):
    qemu, exits, asynchronous = WAYS[way.partition(postcopy.WITHOUT)[0]]
    qemu, words, wrapper = postcopy.build_of(way, qemu, postcopy.tells(options.ways))
    on = ASYNC_PF[lab.arch] if qemu not in (STOCK, PEER) else ()
    mem = options.memory * cpus

    def pair_with(*loaded):
        return LinuxPair(
            lab, exits=exits, source=qemu, destination=qemu, cpus=cpus, fetch="auto", traced=False,
            source_wrapper=wrapper, capabilities=("events", *("postcopy-preempt",) * options.preempt),
            wrapper=(*(network.wrapper if network else ()), *wrapper), mem=mem, memory_mb=mem + 128,
            source_options=(*on, *words, *loaded), destination_options=on, writers=cpus, computers=cpus, interval=100)

    # Booting would take half of a round.
    image = f"{lab.tmp}/begun-{qemu}-{cpus}.qcow2"
    if image not in booted:
        booted[image] = boot(pair_with(), image)
    with pair_with("-blockdev", f"driver=qcow2,node-name=disk,file.driver=file,file.filename={image}",
                   "-loadvm", "begun") as pair:
        pair.source.said_before = booted[image]
        if asynchronous:
            pair.destination.cmd("migrate-set-parameters", postcopy_async_pf=asynchronous)
        if network:
            uri = network.uri
            pair.destination.cmd("migrate-incoming", uri=uri)
        else:
            uri = pair.wire_of(SlowWire, pair.listen(), delay_us=options.delay).uri
        begun(pair)
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


def of_equal_work(runs):
    """For each run of a round, the pages missed until the guest had done as much work as in the slowest way."""
    work = min(min(r["memory operations"], r["missed_over_memory_operations"][-1][0]) for r in runs)
    for r in runs:
        r["equal_memory_operations_count"] = work
        r["equal_work_missed_pages_count"] = at(r["missed_over_memory_operations"], work)


def show(results):
    for cpus, ways in results.items():
        print(f"{cpus} vCPU(s), medians (least..most):")
        print("\n".join(aligned([("", *KINDS, "missed pages", "of equal work", "total ms"), *(
            (way, *(bench.spread([r[what] for r in rounds]) for what in (
                *KINDS, "missed_pages_count", "equal_work_missed_pages_count", "total_time_ms")))
            for way, rounds in ways.items())])))


def verdicts(results):
    for cpus, ways in results.items():
        for kind in KINDS:
            first, *others = ways
            pairs = {way: [a[kind] / b[kind] for a, b in zip(ways[first], ways[way], strict=True) if b[kind]]
                     for way in others}
            yield f"{cpus} vCPU(s), {kind}, round by round: {first} is " + ", ".join(
                f"{bench.spread(ratios, '{:.2f}')} times {way}" for way, ratios in pairs.items() if ratios)
        counts = [r["async"] for r in ways.get("exits, async", ())]
        if counts and all(counts):
            sums = {key: sum(c[key] for c in counts) for key in counts[0]}
            yield f"{cpus} vCPU(s), of all rounds: " + ", ".join(f"{key} {n}" for key, n in sorted(sums.items()))


def write(network, results, options):
    title = "A Linux guest during post-copy: async page faults from exits" + ", arm64" * (options.arch == "aarch64")
    link = f" (ping {network.round_trip_us:.0f} us)" if network else ""
    background = f"{options.rate} MiB/s of background" if options.rate else "a background without a limit"
    span = f"the first {SPAN_S} s" if options.rate else f"until {span_way(options.ways)} has all memory"
    text = (f"For each vCPU {options.memory} MiB written at random and {background}; a link of {options.delay} us in "
            f"each direction{link}, {options.bandwidth or 'unlimited'} Mbit/s; {span}.\n"
            f"```\n{bench.printed(show, results)}```\n" + "\n".join(f"* {line}" for line in verdicts(results)))
    bench.write(options, {"runs": [{"vcpus_count": cpus, "ways": ways} for cpus, ways in results.items()]}, title, text)


def run(options):
    if options.peer:
        name = f"QEMU {other_qemu.version()}"
        WAYS[name] = (PEER, None, None)
        options.ways.append(name)
    booted: dict[str, str] = {}
    migrations = itertools.count()
    arm = options.arch == "aarch64"
    with bench.place(options, below("bench-async", options.arch), memory_mb=3072, append=HIGHRES, arch=options.arch,
                     extra=() if arm else programs()) as lab:
        if options.peer:
            other_qemu.put(lab)
        with contextlib.nullcontext() if arm else Network(lab, options.delay, options.bandwidth) as network:
            def measure(cpus, way):
                if next(migrations) % (SAVED_ROUNDS * len(options.cpus) * len(options.ways)) == 0:
                    booted.clear()
                return migrate(lab, network, way, cpus, options, booted)
            results = bench.in_turn(options.cpus, options.ways, options.rounds, measure, "{} vCPU(s)".format)
    for ways in results.values():
        for runs in zip(*ways.values(), strict=True):
            of_span(dict(zip(ways, runs, strict=True)), SPAN_S if options.rate else 0)
            of_equal_work(runs)
    write(network, results, options)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 8, "2 rounds, 1 vCPU")
    parser.add_argument("--arch", choices=("x86_64", "aarch64"), default="x86_64", help="of the guest (x86_64)")
    parser.add_argument("--cpus", nargs="+", type=int, default=[1, 2, 4], help="vCPUs of the guest (1 2 4)")
    parser.add_argument("--memory", type=int, default=96, metavar="MIB", help="that each vCPU writes (96)")
    parser.add_argument("--rate", type=float, default=6, metavar="MIB",
                        help="of the background for each vCPU, per second (6; 0: no limit)")
    parser.add_argument("--delay", type=int, metavar="US", help="of each direction (4000; with --host 0)")
    parser.add_argument("--bandwidth", type=int, default=0, metavar="MBIT", help="of the link, per second (no limit)")
    parser.add_argument("--no-preempt", dest="preempt", action="store_false", help="without postcopy-preempt")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help=f"only these ({', '.join(WAYS)}), e.g. stock "
                        f"'exits, async' 'exits, async{postcopy.WITHOUT}along', see postcopy.py")
    parser.add_argument("--peer", action="store_true", help="also Debian's newest QEMU")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", action="store_true", help="on this machine, as root, with --bandwidth and no delay")
    bench.add_icount(where)
    parser.set_defaults(accel="tcg", exits=False)
    options = bench.parse(parser, rounds=2, cpus=[1])
    options.name = options.name or below("async", options.arch)
    if options.delay is None:
        options.delay = 0 if options.host else 4000
    default = "no exits" if options.host else "exits, async"
    options.ways = options.ways or ([default, "stock"] if options.host or not options.rate else list(WAYS))
    if unknown := {way.partition(postcopy.WITHOUT)[0] for way in options.ways} - set(WAYS):
        parser.error(f"no way {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    bench.main(run, options)
