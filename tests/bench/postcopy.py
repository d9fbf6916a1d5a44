# SPDX-License-Identifier: GPL-2.0-or-later
"""Compare post-copy migrations: stock QEMU, the fork with exits off, and with exits on.

In the lab, or with --host on this machine: its kernel, and its KVM if there is one. Each round migrates the same guest
once by each variant, for each requested kind of memory, load and number of vCPUs. Prints a table for each of these, and
writes build/reports/NAME.json and NAME.md.

Latencies are the guest's, by its TSC: of first touches of pages on the destination that waited, which are those longer
than twice the median of the second pass and 100 us (on this machine 20 us); of those that missed their page, the
longest ones, as many as there were faults; and of the others, whose page had been received. Pages/s are all touches by
the time from the first to the last. Context switches and processor time are those from the start of post-copy to the
end of the guest's check of its memory; a fault is an exit or a message from userfaultfd, and with stock QEMU, which
does not count these, a requested page. Nothing is traced meanwhile.
"""
import contextlib
import re
import statistics
from collections import namedtuple
from typing import Any

from tests.bench import bench
from tests.lab import kvm_interface, other_qemu
from tests.lab.cli import ProgramError, aligned, quantile
from tests.lab.guest import wait_threshold_us
from tests.lab.host import Host
from tests.lab.lab import HIGHRES
from tests.lab.network import Network, programs
from tests.lab.other_qemu import PEER
from tests.lab.pair import FIRST_MIGRATION_PORT, FORK, INJECT, MIB, NO_FIRST, NO_WINDOW, STOCK, Pair

# QEMU on both sides, postcopy-fault-exits, postcopy-fetch-channels; --bitmap, --peer and --fetch add to them.
VARIANTS: dict[str, tuple[str, str | None, int | str]] = {
    "stock": (STOCK, None, 0), "exits off": (FORK, "off", "auto"), "exits on": (FORK, "on", "auto")}
BITMAP = "exits by a bitmap"
# A variant of --variants may be without a mechanism, which follows its name and WITHOUT. (words of the source, or else
# QEMU_WITHOUT of the build for tests; what the mechanism does)
WITHOUT = ", no "
MECHANISMS: dict[str, tuple[tuple[str, ...], str]] = {
    "window": (NO_WINDOW, "the background is held back"),
    "first": (NO_FIRST, "the source begins with what each vCPU and device must touch"),
    "hot": ((), "the background begins with what was written last"),
    "along": ((), "pages around a requested one go along with it"),
    "neighbours": ((), "pages side by side are placed together"),
    "around": ((), "pages around one that a guest's kernel has missed are requested"),
}
BACKENDS = ("anonymous", "memfd", "hugetlb")
# Parameters of the guest.
LOADS: dict[str, dict[str, Any]] = {
    "disjoint": {"pattern": "disjoint"},        # each vCPU touches its part of memory, in random order
    "sequential": {"pattern": "sequential"},    # as disjoint, in order of addresses
    "strided": {"pattern": "strided"},          # as sequential, each fourth page first
    "hot": {"pattern": "hot"},                  # the most written pages, an eighth
    "shared": {"pattern": "shared"},            # all vCPUs touch the same pages at the same time
    "samehuge": {"pattern": "samehuge"},        # vCPUs touch different pages of one huge page
    "zeros": {"pattern": "zerowrite", "zero": 90},  # disjoint; most pages are zero, and read before written
}
Case = namedtuple("Case", "backend load vcpus background_mib_per_s")
# Stock QEMU leaves TCP_NODELAY off: some requests wait 40 ms for a delayed acknowledgement.
URIS = {"tcp": "tcp:127.0.0.1:{port}", "unix": "unix:{tmp}/migration.sock"}
TICKS_PER_S = 100       # of /proc/PID/stat
TIMEOUT_S = 300


def variants(place, fetch=(), peer=False, only=(), mechanisms=()):
    """Names of the VARIANTS that a place can run: also with such numbers of fetch channels; only those of `only`, which
    may be without one of the mechanisms, and the peer."""
    if peer:
        VARIANTS[f"QEMU {other_qemu.version()}"] = (PEER, None, 0)
    VARIANTS.update({f"{n} channels": (FORK, "on" if place.exit_on_missing else "off", n) for n in fetch})
    without = [name + WITHOUT + what for name, (qemu, *_) in VARIANTS.items() if qemu == FORK for what in mechanisms]
    if unknown := set(only or ()) - {*VARIANTS, *without}:
        raise ProgramError(f"no variant {', '.join(sorted(unknown))}: there are {', '.join([*VARIANTS, *without])}")
    return [name for name, (qemu, *_) in VARIANTS.items() if (name != "exits on" or place.exit_on_missing)
            and (not only or name in only or qemu == PEER)] + [name for name in without if name in (only or ())]


class Meter:
    """Context switches of the destination, and processor time of both QEMUs, of two spans."""

    def __init__(self, pair):
        self.pair = pair
        self.pids = [pair.lab.run(f"cat {side.pidfile}", check=True).output.strip()
                     for side in pair.sides]
        self.look = "cat " + " ".join([f"/proc/{self.pids[1]}/task/*/status",
                                       *(f"/proc/{pid}/stat" for pid in self.pids)])

    def read(self, when=":"):
        """Waits for the command `when`; returns switches so far by thread, and seconds so far by process."""
        text = self.pair.lab.run(f"{when}; {self.look}", timeout=TIMEOUT_S).output
        switches = {tid: (int(v), int(i)) for tid, v, i in re.findall(
            r"^Pid:\s(\d+)$.*?^voluntary_ctxt_switches:\s(\d+)\nnonvoluntary_ctxt_switches:\s(\d+)",
            text, re.M | re.S)}
        seconds = [sum(map(int, fields.split()[11:13])) / TICKS_PER_S
                   for fields in re.findall(r"^\d+ \(.*\) (.*)$", text, re.M)]
        assert switches and len(seconds) == 2, f"a QEMU has ended:\n{text}"
        return switches, seconds

    def begin(self):
        self.first = self.read()

    def end(self):
        """Waits until the guest has ended."""
        dst = self.pair.destination
        self.second = self.read(f"while kill -0 {self.pids[1]} && ! grep -qs '\"end\"' "
                                f"{dst.console}; do sleep 0.5; done")

    def figures(self):
        """Kills the destination: only the sum of the process includes threads that have ended."""
        last, _ = self.read()
        self.pair.destination.signal("KILL")
        output = self.pair.destination.job.wait().output
        total = [int(n) for n in re.findall(r"oluntary context switches: (\d+)", output)]
        assert len(total) == 2, f"no sum of context switches:\n{output}"
        begin, end = self.first[0], self.second[0]
        for i in range(2):
            total[i] -= sum(n[i] for n in begin.values())
            total[i] -= sum(n[i] - end[tid][i] for tid, n in last.items() if tid in end)
        cpu = [b - a for a, b in zip(self.first[1], self.second[1], strict=True)]
        return {"voluntary_switches_count": total[0], "involuntary_switches_count": total[1],
                "source_cpu_s": round(cpu[0], 2), "destination_cpu_s": round(cpu[1], 2),
                "cpu_s": round(sum(cpu), 2)}


def quantiles(values, name="latency"):
    values = sorted(values)
    return {f"{name}_p{p}_us": quantile(values, p) for p in (50, 95, 99)}


def demand_faults(pair):
    """Exits and messages from userfaultfd; for stock QEMU, which does not count them, requested pages."""
    faults = pair.destination.cmd("query-migrate").get("postcopy-faults")
    if faults:
        return faults["exits"] + faults["uffd"]
    return pair.source.cmd("query-migrate")["ram"]["postcopy-requests"]


def waits(side, report, tsc_khz):
    """After the guest's end: its touches, in us; those that waited, sorted; the threshold; and pass 2."""
    first, present = report.latencies_us(side.memory, tsc_khz)
    threshold_us = wait_threshold_us(present, side.lab.wait_us)
    touches = sorted(t for cpu in first for t in cpu)
    return touches, [t for t in touches if t > threshold_us], threshold_us, present


def latencies(pair, report, tsc_khz):
    """After the guest's end: latencies of touches that waited, of those that missed their page, and of the
    others."""
    touches, waited, threshold_us, present = waits(pair.destination, report, tsc_khz)
    # Touches that wait for the network wait longest. Pages requested ahead are no faults.
    faults = min(demand_faults(pair), len(waited))
    missed, found = touches[len(touches) - faults:], touches[:len(touches) - faults]
    from_switch_us = report.from_switch_us(tsc_khz)
    return {"touch_count": len(touches), "waited_count": len(waited),
            # Time that all vCPUs lost from the switch on, also before the first touch.
            "stall_ms": (sum(from_switch_us) - sum(map(sum, present))) / 1000,
            "switch_to_last_touch_ms": max(from_switch_us) / 1000,
            "pages_per_s": len(touches) / max(from_switch_us) * 1e6,
            "waited_threshold_us": threshold_us,
            "present_touch_p50_us": statistics.median(t for cpu in present for t in cpu),
            **quantiles(waited), **quantiles(missed, "missed"), **quantiles(found, "found")}


def switch_to_last_page_ms(source, switch="STOP"):
    """Waits until the source is notified that all pages were received. Returns the time from the switch until then:
    from an event, or from a status if the guest was stopped before. The migration must have the capability events."""
    at = bench.times_us(source)
    return round((at["completed"] - at[switch]) / 1000, 1)


def tells(variants):
    """Whether a variant needs QEMU_WITHOUT: then all variants of the fork use the build for tests."""
    return any(not MECHANISMS[name.partition(WITHOUT)[2]][0] for name in variants or () if WITHOUT in name)


def build_of(variant, qemu, inject):
    """The QEMU of a variant, words of its source, and words before its command; inject: use the build for
    tests as the fork."""
    without = variant.partition(WITHOUT)[2]
    words = MECHANISMS[without][0] if without else ()
    inject = inject and qemu == FORK
    return INJECT if inject else qemu, words, bench.wrapper(inject, "" if words else without)


def uri_of(lab, transport):
    return URIS[transport].format(tmp=lab.tmp, port=lab.port(FIRST_MIGRATION_PORT))


@contextlib.contextmanager
def other_migration(network, options, case, qemu, **words):
    """Another migration of this kind by the same link, whose post-copy begins at the same time."""
    if not options.two:
        yield
        return
    with Host(options.accel, name="other") as place:
        network.relay_to(place)     # which ends with the place
        with Pair(place, source=qemu, destination=qemu, cpus=case.vcpus, memory_mb=options.memory, seed=2, late_rom=1,
                  traced=False, capabilities=("postcopy-preempt",) * options.preempt, wrapper=network.wrapper,
                  **words, **LOADS[case.load]) as pair:
            uri = network.uri + "1"
            pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=case.background_mib_per_s * MIB)
            pair.destination.cmd("migrate-incoming", uri=uri)
            pair.start(uri)
            pair.source.cmd("migrate-start-postcopy")
            yield
            pair.finish(limited=True)


def migrate(lab, variant, case, options, network):
    """One migration; its figures."""
    qemu, exits, fetch = VARIANTS[variant.partition(WITHOUT)[0]]
    qemu, words, source_wrapper = build_of(variant, qemu, options.exits or tells(options.variants))
    huge = case.backend == "hugetlb"
    bandwidth = case.background_mib_per_s * (16 if huge else 1) * MIB
    wrapper = ("busybox", "time", "-v", *source_wrapper)
    with Pair(lab, exits=exits, source=qemu, destination=qemu, backend=case.backend,
              capabilities=("events", *("postcopy-preempt",) * options.preempt), cpus=case.vcpus,
              source_options=words,
              memory_mb=options.memory << huge, seed=1, late_rom=1, traced=False, fetch=fetch,
              source_wrapper=source_wrapper,
              wrapper=(*network.wrapper, *wrapper) if network else wrapper, **LOADS[case.load]) as pair:
        src, dst = pair.sides
        src.cmd("migrate-set-parameters", max_postcopy_bandwidth=bandwidth)
        uri = network.uri if network else uri_of(lab, options.transport)
        dst.cmd("migrate-incoming", uri=uri)
        pair.start(uri)
        meter = Meter(pair)
        with other_migration(network, options, case, qemu, exits=exits, fetch=fetch, source_options=words,
                             source_wrapper=source_wrapper):
            meter.begin()
            src.cmd("migrate-start-postcopy")
            meter.end()
            pair.finish(limited=True)
        info, total = dst.cmd("query-migrate"), src.cmd("query-migrate")
        requests, demand = total["ram"]["postcopy-requests"], demand_faults(pair)
        report, boot = dst.report(), src.report().the("boot")
        result = latencies(pair, report, boot["tsc_khz"]) | meter.figures()
        return result | {
            "demand_fault_count": demand,
            "source_postcopy_requests_count": requests,
            **{f"{kind}_switches_per_fault_count": result[f"{kind}_switches_count"] / demand
               for kind in ("voluntary", "involuntary")},
            "downtime_ms": total["downtime"], "total_time_ms": total["total-time"],
            "switch_to_last_page_ms": switch_to_last_page_ms(src),
            "source_postcopy_window": total.get("postcopy-window"),
            # By QEMU's names; latencies are in ns.
            "query_migrate": {k: v for k, v in info.items() if k.startswith("postcopy-")},
        }


MEASURED = (
    ("missed touch, p50 (us)", "missed_p50_us", "{:.0f}"),
    ("p99", "missed_p99_us", "{:.0f}"),
    ("touch of a page that had come, p50 (us)", "found_p50_us", "{:.0f}"),
    ("p99", "found_p99_us", "{:.0f}"),
    ("waited touch, p50 (us)", "latency_p50_us", "{:.0f}"),
    ("p95", "latency_p95_us", "{:.0f}"),
    ("p99", "latency_p99_us", "{:.0f}"),
    ("stall of all vCPUs (ms)", "stall_ms", "{:.0f}"),
    ("pages/s", "pages_per_s", "{:.0f}"),
    ("switch to the last touch (ms)", "switch_to_last_touch_ms", "{:.0f}"),
    ("present touch, p50 (us)", "present_touch_p50_us", "{:.0f}"),
    ("touches that waited", "waited_count", "{:.0f}"),
    ("faults", "demand_fault_count", "{:.0f}"),
    ("pages requested", "source_postcopy_requests_count", "{:.0f}"),
    ("voluntary switches/fault", "voluntary_switches_per_fault_count", "{:.2f}"),
    ("involuntary switches/fault", "involuntary_switches_per_fault_count", "{:.2f}"),
    ("processor, source (s)", "source_cpu_s", "{:.2f}"),
    ("processor, destination (s)", "destination_cpu_s", "{:.2f}"),
    ("processor, both (s)", "cpu_s", "{:.2f}"),
    ("downtime (ms)", "downtime_ms", "{:.0f}"),
    ("total time (ms)", "total_time_ms", "{:.0f}"),
    ("switch to the last page (ms)", "switch_to_last_page_ms", "{:.0f}"),
)


def name_of(case):
    background = f", background {case.background_mib_per_s} MiB/s" if case.background_mib_per_s else ""
    return f"{case.backend} memory, {case.load} load, {case.vcpus} vCPUs{background}"


def show(measured, rounds):
    for case, results in measured.items():
        lines = [("", *results, *(f"{v} / stock" for v in list(results)[1:]))]
        for label, key, unit in MEASURED:
            values = [[r[key] for r in runs if r.get(key) is not None] for runs in results.values()]
            if not any(any(of) for of in values):
                continue
            first, *others = (statistics.median(of) if of else None for of in values)
            lines.append((label, *(bench.spread(of, unit) if of else "-" for of in values),
                          *("-" if not first or other is None else f"{other / first:.2f}" for other in others)))
        print(f"\n{name_of(case)}, {rounds} rounds: median (min..max)\n")
        print("\n".join(aligned(lines)))


def run(options):
    place = bench.place(options, "bench", 2 * options.memory + 8 if "hugetlb" in options.backends else 0,
                        memory_mb=2048 + 6 * options.memory, append=HIGHRES if options.network else "",
                        extra=programs() if options.network else [])
    if options.bitmap:
        VARIANTS[BITMAP] = (FORK, "on", "auto")
    names = variants(place, options.fetch, options.peer, options.variants, MECHANISMS)
    # With huge pages, vCPUs touch one of them at a time.
    cases = [Case(backend, load or ("samehuge" if backend == "hugetlb" else "disjoint"), vcpus, background)
             for backend in options.backends for load in options.load or [None] for vcpus in options.cpus
             for background in options.background]
    with place as lab:
        bench.describe(lab, [STOCK, FORK] + [PEER] * options.peer)
        link = (Network(lab, options.delay, options.bandwidth, options.loss) if options.network
                else contextlib.nullcontext())
        with link as network:
            def measure(case, variant):
                with (kvm_interface.offered(lab, kvm_interface.USERFAULT) if variant == BITMAP
                      else contextlib.nullcontext()):
                    return migrate(lab, variant, case, options, network)
            measured = bench.in_turn(cases, names, options.rounds, measure, name_of)
    publish(options, network, measured)


def publish(options, network, measured):
    transport = {"tcp": "TCP within one machine", "unix": "a unix socket"}[options.transport]
    if network:
        lost = f", {options.loss} % of packets lost" if options.loss else ""
        lost += ", which another migration uses at the same time" if options.two else ""
        transport = (f"TCP through a link with {options.delay} us of delay in each direction and "
                     f"{options.bandwidth or 'unlimited'} Mbit/s{lost}; ping took {network.round_trip_us:.0f} us")
    title = (f"Post-copy, {'with' if options.preempt else 'without'} postcopy-preempt, "
             f"{bench.place_title(options)}: {', '.join(map(str, options.cpus))} vCPUs"
             + (f", {', '.join(options.load)} load" if options.load else "")
             + (", a link with delay" if network else "") + bench.icount_title(options))
    text = (f"{options.memory} MiB of guest (hugetlb: twice as much); {transport}.\n"
            f"```{bench.printed(show, measured, options.rounds)}```\n")
    runs = [case._asdict() | {"variants": of} for case, of in measured.items()]
    ping = {"ping_round_trip_us": network.round_trip_us} if network else {}
    bench.write(options, {**ping, "runs": runs}, title, text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "2 rounds, anonymous memory")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="kinds of memory (all)")
    bench.add_place(parser)
    parser.add_argument("--no-preempt", dest="preempt", action="store_false",
                        help="without postcopy-preempt, and with no limit of the background")
    parser.add_argument("--transport", choices=URIS, default="tcp", help="of the migration (tcp)")
    parser.add_argument("--cpus", nargs="+", type=int, default=[4], help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, default=32, metavar="MIB",
                        help="of the guest (32; twice as much for hugetlb)")
    parser.add_argument("--load", nargs="+", choices=LOADS,
                        help="how the guest touches memory (disjoint; samehuge for hugetlb)")
    parser.add_argument("--background", nargs="+", type=int, default=[1], metavar="MIB",
                        help="of pages that were not requested, per second (1; for hugetlb 16 times; 0: no limit)")
    parser.add_argument("--fetch", nargs="+", type=int, default=[], metavar="N",
                        help="also with so many fetch channels, 0 for none, and exits on")
    parser.add_argument("--bitmap", action="store_true", help="also with KVM_MEM_USERFAULT, and exits on")
    parser.add_argument("--peer", action="store_true", help="also Debian's newest QEMU, with preempt as the others")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these, e.g. 'exits on' '4 channels' "
                        f"'exits on{WITHOUT}window'; without (needs make inject): "
                        + "; ".join(f"{name}, {what}" for name, (_, what) in MECHANISMS.items()))
    parser.add_argument("--delay", type=int, metavar="US",
                        help="microseconds that each direction of a link between the QEMUs takes")
    parser.add_argument("--bandwidth", type=int, default=0, metavar="MBIT",
                        help="of such a link, per second; with --host, as root, no delay")
    parser.add_argument("--loss", type=float, default=0, metavar="PERCENT", help="of such a link's packets")
    parser.add_argument("--two", action="store_true",
                        help="with --host and --bandwidth, two migrations at the same time, of which one is measured")
    options = bench.parse(parser, rounds=2, backends=BACKENDS[:1])
    options.network = options.delay is not None or bool(options.bandwidth or options.loss)
    options.delay = options.delay or 0
    options.name = options.name or ("postcopy-host" if options.host else "postcopy")
    if not options.preempt:
        # Requested pages share the limit with the background if they have no channel of their own.
        options.background = [0]
    if options.bitmap and options.host:
        parser.error("--bitmap is for the lab")
    if options.two and not (options.host and options.bandwidth):
        parser.error("--two is for --host with --bandwidth")
    bench.main(run, options)
