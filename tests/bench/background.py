# SPDX-License-Identifier: GPL-2.0-or-later
"""The cost of a page of the background, which nothing requests, for both QEMUs, with a guest that does not run.

On this machine, with TCG. A stopped guest is migrated by each variant in turn, nearly all of it in post-copy, with no
limit of the background. Pages/s and processor time are those from the switch until the destination has reported to
the source that all pages are received, system calls and mutexes those of the migration. Then the guest checks memory.
"""
import itertools
import re
import shutil
import statistics
import subprocess
import time

from tests.bench import bench, postcopy
from tests.lab import tls
from tests.lab.cli import ProgramError, aligned
from tests.lab.host import Host
from tests.lab.other_qemu import PEER
from tests.lab.pair import FORK, MIB, STOCK, Pair, until
from tests.lab.paths import ROOT

PAGE = 4096
TRANSPORTS = (*postcopy.URIS, "tls")
KINDS = ("pages", "zeros")


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


def migrate(place, variant, transport, kind, memory_mib):
    """One migration; its figures, per page."""
    qemu, exits, fetch = postcopy.VARIANTS[variant]
    encrypted = transport == "tls"
    locks = [f"{place.tmp}/{side}.locks" for side in ("source", "destination")]
    counting = [("env", f"LD_PRELOAD={ROOT / 'build/tests/count-locks.so'}", f"COUNT_LOCKS={file}") for file in locks]
    # The guest's parameter "zero": pages that stay zeros until it has moved
    with Pair(place, exits=exits, source=qemu, destination=qemu, memory_mb=memory_mib, cpus=1,
              pattern="disjoint", zero=100 if kind == "zeros" else 0, seed=1, capabilities=("events",), traced=False,
              fetch=fetch, tls=tls.directory(place) if encrypted else None,
              source_wrapper=counting[0], wrapper=counting[1]) as pair:
        src, dst = pair.sides
        uri = postcopy.uri_of(place, "tcp" if encrypted else transport)
        src.wait_ready()
        src.cmd("stop")
        src.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)
        dst.cmd("migrate-incoming", uri=uri)
        counts = Counts(pair, locks)
        pair.start(uri)
        before = [side.cpu_seconds() for side in pair.sides]
        src.cmd("migrate-start-postcopy")
        # By events, not by polling: QMP takes three system calls for each byte
        ms = postcopy.switch_to_last_page_ms(src, "postcopy-active")
        cpu_us = [(side.cpu_seconds() - then) * 1e6 for side, then in zip(pair.sides, before, strict=True)]
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


def cell(runs, first, key, unit):
    values, of_first = ([r[key] for r in of] for of in (runs, first))
    return bench.spread(values, unit) if unit else f"{statistics.median(values) / statistics.median(of_first):.2f}"


def show(measured):
    for case, of in measured.items():
        first, *_ = of.values()
        print(", ".join(case) + "\n")
        print("\n".join(aligned([("", *(label for label, *_ in COLUMNS)), *(
            (variant, *(cell(runs, first, key, unit) for _, key, unit in COLUMNS))
            for variant, runs in of.items())])) + "\n")


def run(options):
    if not shutil.which("perf"):
        subprocess.run([ROOT / "scripts/deps", "bench"], check=True)
    with Host("tcg") as place:
        names = postcopy.variants(place, options.fetch, options.peer, options.variants)
        bench.describe(place, [STOCK, FORK] + [PEER] * options.peer)
        measured = bench.in_turn(itertools.product(options.transport, options.kinds), names, options.rounds,
                                 lambda case, variant: migrate(place, variant, case[0], case[1], options.memory),
                                 ", ".join)
    text = (f"{options.memory} MiB of guest, {options.rounds} rounds: median (min..max).\n"
            f"```\n{bench.printed(show, measured)}```\n")
    bench.write(options, {"runs": [{"transport": transport, "memory": kind, "variants": of}
                                   for (transport, kind), of in measured.items()]},
                "What the background costs, on this host", text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "1 round, TCP", "background")
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB", help="of the guest (2048)")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="(all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:1], help="of memory (pages)")
    parser.add_argument("--fetch", nargs="+", type=int, default=[0, 1, 4, 8], metavar="N", help="channels (0 1 4 8)")
    parser.add_argument("--peer", action="store_true", help="also Debian's newest QEMU")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these")
    bench.main(run, bench.parse(parser, rounds=1, transport=["tcp"]))
