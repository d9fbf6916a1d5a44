# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of a page of the background, which nothing requests, for both QEMUs, with a guest that does not run.

On this machine, with TCG. A stopped guest is migrated by each variant in turn, nearly all of it in post-copy, with no
limit of the background. Pages/s and processor time are those from the switch until the destination has reported to
the source that all pages are received, system calls and mutexes those of the migration. Then the guest checks memory.
"""
import re
import shutil
import statistics
import subprocess
import time
from collections import namedtuple

from tests.bench import bench, postcopy
from tests.bench.bench import Figures
from tests.lab import cli, other_qemu, tls
from tests.lab.cli import ProgramError, aligned, say
from tests.lab.host import Host
from tests.lab.other_qemu import PEER
from tests.lab.pair import FORK, MIB, STOCK, Pair, until
from tests.lab.paths import ROOT

PAGE = 4096
Case = namedtuple("Case", "transport memory")
KINDS = ("pages", "zeros", "hugetlb")


class Counts:
    """System calls of both QEMUs, counted by perf, and mutexes that they take."""

    def __init__(self, pair, locks):
        self.place, self.locks = pair.lab, locks
        pids = ",".join(f"$(cat {side.pidfile})" for side in pair.sides)
        self.job = pair.lab.job(f"echo $$; exec perf stat -x, -e raw_syscalls:sys_enter -p {pids}")
        until(lambda: self.job.output, "perf")
        time.sleep(0.3)
        self.before = self.taken()

    def taken(self):
        return sum(int.from_bytes(self.place.read_file(file), "little") for file in self.locks)

    def end(self):
        locks = self.taken() - self.before
        self.place.run(f"kill -INT {int(self.job.output)}", check=True)
        output = self.job.wait().output
        counts = re.findall(r"^(\d+),.*sys_enter", output, re.M)
        if not counts:
            raise ProgramError(f"perf does not count system calls, for which it has to be root:\n{output}")
        return int(counts[0]), locks


def migrate(place, variant, case, memory_mib):
    """One migration; its figures, per page."""
    qemu, exits, fetch = postcopy.VARIANTS[variant]
    encrypted = case.transport == "tls"
    locks = [f"{place.tmp}/{side}.locks" for side in ("source", "destination")]
    counting = [("env", f"LD_PRELOAD={ROOT / 'build/tests/count-locks.so'}", f"COUNT_LOCKS={file}") for file in locks]
    # The guest's parameter "zero": pages that stay zeros until it has moved
    with Pair(place, exits=exits, source=qemu, destination=qemu, memory_mb=memory_mib, cpus=1,
              pattern="disjoint", zero=100 if case.memory == "zeros" else 0, seed=1, capabilities=("events",),
              backend="hugetlb" if case.memory == "hugetlb" else "anonymous", traced=False, fetch=fetch,
              tls=tls.directory(place) if encrypted else None,
              source_wrapper=counting[0], wrapper=counting[1]) as pair:
        src, dst = pair.sides
        uri = postcopy.uri_of(place, "tcp" if encrypted else case.transport)
        src.wait_ready()
        src.cmd("stop")
        src.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)
        dst.cmd("migrate-incoming", uri=uri)
        counts = Counts(pair, locks)
        pair.start(uri)
        before = [side.cpu_seconds_of_all() for side in pair.sides]
        src.cmd("migrate-start-postcopy")
        # By events, not by polling: QMP takes three system calls for each byte
        ms = postcopy.switch_to_last_page_ms(src, "postcopy-active")
        cpu_us = [(side.cpu_seconds_of_all() - then) * 1e6 for side, then in zip(pair.sides, before, strict=True)]
        calls_count, locks_count = counts.end()
        dst.wait_status("completed")
        pages = memory_mib * MIB // PAGE
        dst.cmd("cont")
        dst.wait_event("end")
        report = dst.report()
        assert report.intact, f"memory is damaged: {report.all('bad')}"
        return {"pages_per_s": pages / ms * 1e3, "switch_to_last_page_ms": ms,
                "source_cpu_us_per_page": cpu_us[0] / pages, "destination_cpu_us_per_page": cpu_us[1] / pages,
                "cpu_us_per_page": sum(cpu_us) / pages, "calls_per_page_count": calls_count / pages,
                "locks_per_page_count": locks_count / pages,
                "bytes_count": src.cmd("query-migrate")["ram"]["transferred"]}


COLUMNS = (
    ("pages/s", "pages_per_s", "{:.0f}"),
    ("of stock", "pages_per_s", None),
    ("processor, us a page: source", "source_cpu_us_per_page", "{:.2f}"),
    ("destination", "destination_cpu_us_per_page", "{:.2f}"),
    ("both, of stock", "cpu_us_per_page", None),
    ("system calls a page", "calls_per_page_count", "{:.3f}"),
    ("of stock", "calls_per_page_count", None),
    ("locks a page", "locks_per_page_count", "{:.3f}"),
    ("of stock", "locks_per_page_count", None),
)


def cell(of, key, unit):
    values = [r[key] for r in of]
    return f"{unit.format(statistics.median(values))} ({unit.format(min(values))}..{unit.format(max(values))})"


def ratio(of, first, key):
    middle = [statistics.median(r[key] for r in runs) for runs in (of, first)]
    return f"{middle[0] / middle[1]:.2f}"


def show(measured):
    for case, of in measured.items():
        first, *_ = of.values()
        print(f"{case.transport}, {case.memory}\n")
        print("\n".join(aligned([("", *(label for label, *_ in COLUMNS)), *(
            (variant, *(cell(runs, key, unit) if unit else ratio(runs, first, key) for _, key, unit in COLUMNS))
            for variant, runs in of.items())])) + "\n")


def run(options):
    if not shutil.which("perf"):
        subprocess.run([ROOT / "scripts/deps", "bench"], check=True)
    about = bench.about()
    place = Host("tcg", hugepages=options.memory + 8 if "hugetlb" in options.kinds else 0)
    if options.peer:
        postcopy.VARIANTS[f"QEMU {other_qemu.version()}"] = (PEER, None, 0)
    postcopy.VARIANTS.update({f"{n} channels": (FORK, "off", n) for n in options.fetch})
    names = [name for name in postcopy.VARIANTS if name != "exits on"
             and (not options.variants or name in options.variants)]
    cases = [Case(transport, memory) for transport in options.transport for memory in options.kinds]
    measured: dict[Case, dict[str, list[Figures]]] = {case: {name: [] for name in names} for case in cases}
    with place as machine:
        if options.peer:
            other_qemu.put(machine)
        about |= postcopy.machine(machine, [STOCK, FORK] + [PEER] * options.peer)
        for n in range(options.rounds):
            for case in cases:
                for name in names[n % len(names):] + names[:n % len(names)]:
                    say(f"round {n + 1} of {options.rounds}: {case}, {name}")
                    measured[case][name].append(migrate(machine, name, case, options.memory))
    text = (f"{options.memory} MiB of guest, {options.rounds} rounds: median (min..max).\n"
            f"```\n{bench.printed(show, measured)}```\n")
    bench.write(options.name, {"about": about, "settings": {"memory_mib": options.memory,
                "rounds_count": options.rounds}, "runs": [case._asdict() | {"variants": of} for case, of in
                                                          measured.items()]},
                "What the background costs, on this host", text)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="1 round, TCP")
    parser.add_argument("--rounds", type=int, help="(5)")
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB", help="of the guest (2048)")
    parser.add_argument("--transport", nargs="+", choices=(*postcopy.URIS, "tls"), help="(all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:1], help="of memory (pages)")
    parser.add_argument("--fetch", nargs="+", type=int, default=[0, 1, 4, 8], metavar="N", help="channels (0 1 4 8)")
    parser.add_argument("--peer", action="store_true", help="also Debian's newest QEMU")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--name", default="background", help="of the report (background)")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.transport = options.transport or (["tcp"] if options.quick else [*postcopy.URIS, "tls"])
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
