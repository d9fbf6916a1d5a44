# SPDX-License-Identifier: GPL-2.0-or-later
"""Compare ways to resume a Linux guest from a file, on this machine, with TCG.

A guest of each size, whose memory is used up to a share, is saved once (mapped-ram). Then it is resumed in each way in
turn:
  stock     QEMU 10.0: all of the file is read first
  eager     the fork: all of the file is read first
  private   QEMU 10.0: the guest's memory is a private mapping of a file that was saved beside (x-ignore-shared)
  lazy      the guest runs while its memory is in the file (postcopy-ram): by userfaultfd
  exits     as lazy, by vCPUs that read for themselves: TCG's exits, in the build for tests
  first     as lazy, and missed pages are written to a working set; the rest is not read meanwhile
  set       as lazy, and the pages that were missed in such a resume are read first
With --read-ms, the first read of each part of the file takes longer, as from a disk. --words adds words to QEMU's
command in each way ('-overcommit mem-lock=on', for example), --memory to its backend (',prealloc=on').

running: from migrate-incoming until the guest runs. Its parts, by their ends: opened, the file is open; memory, it has
been emptied and registered, and missing pages are known (not in ways that read all first); devices, they have been
loaded. work: from there until a thread of the guest has checked some 100 MiB of its memory. all: until all has been
read. Missed pages, the total time for which threads waited for them, and QEMU's processor time are of the whole run,
until work and all are done. Prints a table, and writes
build/reports/NAME.json.
"""
import itertools
import os
import re
import shlex
import statistics
import struct
import time

from tests.bench import bench
from tests.lab.cli import aligned, say
from tests.lab.host import Host
from tests.lab.linux_pair import LinuxSide
from tests.lab.pair import FORK, INJECT, STOCK, event_us, until
from tests.lab.snapshot import Machine

EAGER, LAZY, PRIVATE = ("mapped-ram",), ("mapped-ram", "postcopy-ram"), ("x-ignore-shared",)
EXITS = ("-global", "migration.postcopy-fault-exits=on")
# QEMU, capabilities, words
WAYS = {"stock": (STOCK, EAGER, ()), "eager": (FORK, EAGER, ()), "private": (STOCK, PRIVATE, ()),
        "lazy": (FORK, LAZY, ()), "exits": (INJECT, LAZY, EXITS), "first": (FORK, LAZY, ()),
        "set": (FORK, LAZY, ())}
TIMEOUT_S = 300
# The guest is saved during the first part of its work, and does the others when it is resumed.
WORK_MIB = 120
WORK_PAGES = WORK_MIB * 256
PARTS = 4
REPORT_MS = 5
SHOWN = (("running, ms", "running_ms", "{:.1f}"), ("opened", "opened_ms", "{:.1f}"), ("memory", "memory_ms", "{:.1f}"),
         ("devices", "devices_ms", "{:.1f}"), ("work, ms", "work_ms", "{:.0f}"), ("all, ms", "all_ms", "{:.0f}"),
         ("processor, s", "processor_s", "{:.2f}"), ("missed pages", "missed_count", "{:.0f}"),
         ("waited, ms", "waited_ms", "{:.0f}"))


def fill_mib(guest_mib):
    """Memory that is left by the kernel, which needs some for each page, and by init.c."""
    return guest_mib * 15 // 16 - 144


class LinuxMachine(Machine):
    """The guest's memory is a file, shared while the guest is saved, and private when it is resumed in that way."""
    side_type = LinuxSide
    how = ()

    def __init__(self, place, memory_mb, words=(), words_of_memory="", report_ms=REPORT_MS, **options):
        self.memory_mb = memory_mb
        self.memory = f"{place.tmp}/memory"
        self.devices = f"{place.tmp}/devices"
        self.set = f"{place.tmp}/set"
        super().__init__(place, memory_mb=memory_mb, machine="pc,memory-backend=ram", interval=report_ms, writers=0,
                         computers=0, work=WORK_MIB,
                         # Otherwise the state "stopped" would be loaded, and the guest would not run
                         taker=[*self.backend("file", ",share=on"), "-global", "migration.store-global-state=off"],
                         **options)
        self.words = words
        self.words_of_memory = words_of_memory

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.lab.run(f"rm -f {self.memory} {self.devices} {self.set}")

    def backend(self, kind, more=""):
        path = f",mem-path={self.memory}" * (kind == "file")
        return ["-object", f"memory-backend-{kind},id=ram,size={self.memory_mb}M{path}{more}"]

    def save_both(self):
        """Saves all to the one file; then only the devices, for use with the memory's file, to the other."""
        self.end_pages = dict.fromkeys(WAYS, self.stop())
        self.take()
        self.side.cmd("cont")
        self.end_pages["private"] = self.stop()
        self.side.set_capabilities(*EAGER, state=False)
        self.side.set_capabilities(*PRIVATE)
        self.take(f"file:{self.devices}")
        self.side.end()

    def stop(self):
        """Stops the guest when work has begun. Returns how many pages have been checked when the work ends."""
        address = self.side.report().addresses["worker"]

        def done():
            return struct.unpack("<Q", self.side.memory(address, 8))[0]
        for _ in range(20):
            until(lambda: done() % WORK_PAGES > 0, "work begins", pause=0.001)
            self.side.cmd("stop")
            pages = done()
            if 0 < pages % WORK_PAGES < WORK_PAGES / PARTS:
                return pages - pages % WORK_PAGES + WORK_PAGES
            self.side.cmd("cont")
            until(lambda: done() % WORK_PAGES == 0, "work ends")
        raise AssertionError("the guest was never stopped while its work began")

    def launch(self, way, read_ms=0, name="destination", words=()):
        version, capabilities, more = WAYS[way]
        backend = self.backend("file" if way == "private" else "ram", self.words_of_memory)
        if capabilities == LAZY:
            more = (*more, "-trace", "postcopy_file_begin", "-msg", "timestamp=on")
        if way == "first":
            self.lab.run(f"rm -f {self.set}")
        if way in ("first", "set"):
            more = (*more, "-global", f"migration.restore-working-set={self.set}")
        slow = ("LD_PRELOAD=build/tests/slow-read.so", f"SLOW_READ_US={read_ms * 1000:.0f}") if read_ms else ()
        side = self.start_destination(version, [*backend, *more, *words, *self.words],
                                      ("env", "-u", "QEMU_INJECT", *slow), name)
        side.set_capabilities("events", *capabilities)
        return Resumed(side, self.devices if way == "private" else self.file, self.end_pages[way])

    def resume(self, way, read_ms):
        resumed = self.launch(way, read_ms)
        resumed.start()
        until(resumed.ended, "the guest has done its work, and all has been read", TIMEOUT_S, pause=0.003)
        return self.end(resumed)

    def end(self, resumed):
        figures = resumed.figures()
        resumed.side.end()
        self.sides.remove(resumed.side)
        return figures


class Resumed:
    def __init__(self, side, file, end_pages):
        self.side = side
        self.file = file
        self.end_pages = end_pages
        self.at = {}

    def start(self):
        self.before_s = self.side.cpu_seconds()
        self.start_us = time.time() * 1e6
        self.side.cmd("migrate-incoming", uri=f"file:{self.file}")

    def worked(self):
        """Whether the guest has done its work; at has the time."""
        self.side.check()
        for event in self.side.qmp.get_events():
            name = event.get("data", {}).get("status", event["event"])
            self.at[name] = (event_us(event) - self.start_us) / 1000
        if "work" not in self.at and "RESUME" in self.at:
            # Reads the last line without another process, which would take the guest's processor time
            with open(self.side.console, "rb") as console:
                console.seek(max(0, os.fstat(console.fileno()).st_size - 1024))
                worked = re.findall(rb" worker0=(\d+) .*\n", console.read())
            if worked and int(worked[-1]) >= self.end_pages:
                self.at["work"] = time.time() * 1000 - self.start_us / 1000
        return "work" in self.at

    def ended(self):
        return self.worked() and "completed" in self.at

    def figures(self):
        """Figures at the end, without those of parts that did not happen."""
        report, info = self.side.report(), self.side.cmd("query-migrate")
        assert not report.bad, report.bad
        begun = re.search(r"@([0-9.]+):postcopy_file_begin", self.side.job.output)
        figures = {
            "running_ms": self.at["RESUME"], "opened_ms": self.at["active"],
            "memory_ms": float(begun[1]) * 1000 - self.start_us / 1000 if begun else 0,
            "devices_ms": self.at.get("postcopy-active", self.at["RESUME"]), "work_ms": self.at["work"],
            "processor_s": self.side.cpu_seconds() - self.before_s,
            "missed_count": info.get("postcopy-faults", {}).get("requests", 0),
            "waited_ms": sum(info.get("postcopy-latency-dist") or []) * info.get("postcopy-latency", 0) / 1e6,
        }
        if "completed" in self.at:
            figures["all_ms"] = max(self.at["completed"], self.at["RESUME"])
        return figures


def cases(options):
    has_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    for gib, share in itertools.product(options.sizes, options.shares):
        used_mib = int(fill_mib(gib << 10) * share)
        # The page cache needs both files
        if 3.3 * used_mib > has_mib:
            say(f"{gib} GiB, {used_mib} MiB used: left out, as this machine has {has_mib} MiB")
            continue
        yield {"guest_mib": gib << 10, "used_mib": used_mib}


def measure(place, case, options):
    """For each time of a read: (title, its result for publish())"""
    with LinuxMachine(place, case["guest_mib"], shlex.split(options.words), options.memory, cpus=options.cpus,
                      mem=case["used_mib"], capabilities=["mapped-ram"]) as machine:
        machine.save_both()
        for ms in options.read_ms:
            if "set" in options.ways:
                machine.resume("first", ms)
            title = f"{case['guest_mib'] >> 10} GiB, {case['used_mib']} MiB used" + f", {ms:g} ms a read" * bool(ms)
            runs = bench.in_turn([title], options.ways, options.rounds, lambda _, way, ms=ms: machine.resume(way, ms))
            yield title, {"case": case | {"read_ms": ms}, "runs": runs[title]}


def show(results, shown):
    for title, result in results.items():
        print(f"\n{title}; in brackets to the first")
        rows = [["", *(label for label, _, _ in shown)]]
        base = None
        for way, runs in result["runs"].items():
            values = {key: [run[key] for run in runs] for _, key, _ in shown}
            medians = {key: statistics.median(of) for key, of in values.items()}
            base = base or medians
            rows.append([way, *(form.format(medians[key])
                                + (f" ({medians[key] / base[key]:.2f})" if base[key] and base is not medians else "")
                                + f" {form.format(min(values[key]))}..{form.format(max(values[key]))}"
                                for _, key, form in shown)])
        print("\n".join(aligned(rows)))


def publish(options, results, shown, title):
    """results: {title: {"case": ..., "runs": {way: figures of each round}}}; shown: label, key of the figures, and
    format of each column."""
    text = f"Medians of {options.rounds} rounds, least and most.\n```{bench.printed(show, results, shown)}```"
    bench.write(options, {"results": list(results.values())}, title, text)


def run(options):
    with Host("tcg") as place:
        bench.describe(place)
        results = dict(result for case in cases(options) for result in measure(place, case, options))
    publish(options, results, SHOWN, "Resume from a file" + ", of a slow disk" * any(options.read_ms))


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "1 round of 1 GiB", "restore")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 8], metavar="GIB", help="of the guest (1 4 8)")
    parser.add_argument("--shares", nargs="+", type=float, default=[1, .25], help="of the memory that is used (1 0.25)")
    parser.add_argument("--read-ms", nargs="+", type=float, default=[0], metavar="MS",
                        help="what each read takes beside its own time (0)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    parser.add_argument("--words", default="", help="of QEMU, beside its own (none)")
    parser.add_argument("--memory", default="", metavar="WORDS", help="of QEMU's -object for it (none)")
    parser.add_argument("--cpus", type=int, default=2, help="vCPUs of the guest (2)")
    bench.main(run, bench.parse(parser, rounds=1, sizes=[1]))
