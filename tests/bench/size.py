# SPDX-License-Identifier: GPL-2.0-or-later
"""Costs that grow with a guest's size: the switch to post-copy and the faults after it, of sparse guests.

On this machine, with TCG. A guest of each size uses the same few MiB, has never touched the rest, and is migrated by
each variant in turn, in the first pass of pre-copy. Downtime is from the source's event STOP to the destination's
RESUME, the first answer from there until the first missed page has been placed. Faults/s are those while the guest
touches each of its pages once, in random order; the background has 64 KiB/s, so that untouched memory, nine bytes per
page, occupies no thread. Guests that have written an eighth of the pages of their memory, anywhere, since these were
sent, are switched in the third pass: the destination has to discard each such page before it runs. Once for each size
and variant, strace counts the system calls of both QEMUs in the switch that concern memory, KVM and userfaultfd. A pass
over a bitmap of the guest, word by word, reads bytes that are in no cache.
"""
import re
import shutil
import statistics
import time

from tests.bench import bench, postcopy
from tests.lab.cli import ProgramError, aligned
from tests.lab.host import Host
from tests.lab.pair import Pair, event_us, until

BACKEND = "memory-backend-ram,reserve=off"
BACKGROUND = 64 << 10
# Events of stock QEMU and of the branch; the first of each in the log of a destination
REQUEST, PLACED = "postcopy_ram_fault_thread_request", "postcopy_place*"
TRACE = ("-msg", "timestamp=on", "-trace", REQUEST, "-trace", PLACED)
CALLS = ("ioctl", "madvise", "fallocate", "mmap", "munmap", "mprotect")
CACHES = 64 << 20       # more than the caches' size


def pass_us(gib):
    """Time of a pass over a bitmap of so much memory."""
    bitmap, others = bytearray(gib * (32 << 10)), bytearray(CACHES)
    took = []
    for _ in range(5):
        others.isascii()
        start = time.perf_counter()
        assert bitmap.isascii()     # which reads words, as find_next_bit() does
        took.append((time.perf_counter() - start) * 1e6)
    return statistics.median(took)


def switch_s(pair):
    """When the guest was stopped, and when it resumed."""
    for side, event in zip(pair.sides, ("STOP", "RESUME"), strict=True):
        [found] = [e for e in side.qmp.get_events(wait=False) if e["event"] == event]
        yield event_us(found) / 1e6


def first_answer_s(log):
    """When the first missed page was placed. A trace names pages by block and offset, or by address."""
    missed: set[tuple[str, int]] = set()
    for second, name, text in re.findall(r"@(\d+\.\d+):(\w+) (.*)", log):
        if name == REQUEST:
            hva, block, offset = re.findall(r"HVA=(\w+) rb=(\S+) offset=(\w+)", text)[0]
            missed |= {("", int(hva, 16)), (block, int(offset, 16))}
            continue
        by_address = text.startswith("host=")
        block, start = ("", text.removeprefix("host=")) if by_address else text.split()[:2]
        pages = 1 if by_address else int(re.findall(r"pages (\d+)", text)[0])
        if any((block, int(start, 16) + n * 4096) in missed for n in range(pages)):
            return float(second)
    raise ProgramError(f"no answer to a request:\n{log[:2000]}")


def switch_calls(log, begin_s, end_s):
    calls = re.findall(rf"^\d+ +([\d.]+) (?:{'|'.join(CALLS)})\(", log, re.M)
    return sum(begin_s <= float(second) <= end_s for second in calls)


def migrate(place, variant, gib, options, counted=False):
    """One migration, to the end of the guest's check; its figures, or the number of system calls in the switch."""
    qemu, exits, fetch = postcopy.VARIANTS[variant]
    trace_log, strace_log = f"{place.tmp}/size.trace", f"{place.tmp}/size.strace"
    place.run(f"rm -f {trace_log} {strace_log}")
    with Pair(place, exits=exits, source=qemu, destination=qemu, backend=BACKEND, memory_mb=gib << 10,
              cpus=options.cpus, mem=options.memory, pattern="disjoint", seed=1, late_rom=1, traced=False, fetch=fetch,
              destination_options=() if counted else (*TRACE, "-D", trace_log)) as pair:
        src, dst = pair.sides
        uri = postcopy.uri_of(place, "unix")
        src.cmd("migrate-set-parameters", max_postcopy_bandwidth=BACKGROUND)
        dst.cmd("migrate-incoming", uri=uri)
        pair.start(uri)
        if counted:
            pids = " ".join(f"-p $(cat {side.pidfile})" for side in pair.sides)
            job = place.job(f"exec strace -f -ttt -s 0 -e signal=none -e trace={','.join(CALLS)} "
                            f"-o {strace_log} {pids}")
            until(lambda: job.output.count(" attached") >= 2 or not job.running, "strace")
        asked_s = time.time()
        src.cmd("migrate-start-postcopy")
        src.wait_status("postcopy-active")
        dst.wait_event("timing")
        if counted:
            job.kill()
            return switch_calls(place.read_file(strace_log).decode(errors="replace"), *switch_s(pair))
        for event in (REQUEST, PLACED):
            dst.qmp.cmd("trace-event-set-state", name=event, enable=False)
        dst.wait_event("end")
        report, boot = dst.report(), src.report().the("boot")
        assert report.intact, f"memory is damaged: {report.all('bad')}"
        result = postcopy.latencies(pair, report, boot["tsc_khz"])
        faults = postcopy.demand_faults(pair)
        stop_s, resume_s = switch_s(pair)
        answer_s = first_answer_s(place.read_file(trace_log).decode(errors="replace"))
        return {
            "asked_to_stop_ms": (stop_s - asked_s) * 1e3, "downtime_ms": (resume_s - stop_s) * 1e3,
            "first_answer_ms": (answer_s - resume_s) * 1e3, "demand_fault_count": faults,
            "faults_per_s": faults * result["pages_per_s"] / result["touch_count"],
            **{key: result[key] for key in ("stall_ms", "missed_p50_us", "missed_p99_us", "touch_count")},
        }


def switch(place, variant, mib):
    """The switch of a guest that writes an eighth of so much memory, anywhere."""
    qemu, exits, fetch = postcopy.VARIANTS[variant]
    with Pair(place, exits=exits, source=qemu, destination=qemu, backend=BACKEND, memory_mb=mib + 128, cpus=2,
              mem=mib, pattern="hot", seed=1, traced=False, fetch=fetch) as pair:
        src, dst = pair.sides
        uri = postcopy.uri_of(place, "unix")
        dst.cmd("migrate-incoming", uri=uri)
        pair.start(uri, bandwidth=1 << 40)
        until(lambda: src.cmd("query-migrate")["ram"]["dirty-sync-count"] >= 3, "pre-copy's third pass", timeout=120)
        asked_s = time.time()
        src.cmd("migrate-start-postcopy")
        src.wait_status("postcopy-active", "completed")
        pair.check_memory()
        stop_s, resume_s = switch_s(pair)
        return {"asked_to_stop_ms": (stop_s - asked_s) * 1e3, "downtime_ms": (resume_s - stop_s) * 1e3}


COLUMNS = (
    ("until the stop (ms)", "asked_to_stop_ms", "{:.0f}"),
    ("downtime (ms)", "downtime_ms", "{:.1f}"),
    ("to the first answer (ms)", "first_answer_ms", "{:.2f}"),
    ("faults/s", "faults_per_s", "{:.0f}"),
    ("missed touch, p50 (us)", "missed_p50_us", "{:.0f}"),
    ("p99", "missed_p99_us", "{:.0f}"),
)


def cells(runs, columns=COLUMNS):
    return [bench.spread([r[key] for r in runs], unit) for _, key, unit in columns]


def show(sizes):
    for variant in sizes[0]["variants"] if sizes else ():
        lines = [(variant, *(label for label, *_ in COLUMNS), "calls in the switch", "a pass (ms)")]
        for of in sizes:
            runs = of["variants"][variant]
            lines.append((f"{of['memory_gib']} GiB", *cells(runs), str(of["switch_calls_count"][variant]),
                          f"{of['pass_us'] / 1e3:.2f}"))
        least, most = sizes[0], sizes[-1]
        print("\n".join(aligned(lines)))
        middle = {key: [statistics.median(r[key] for r in of["variants"][variant]) for of in (least, most)]
                  for key in ("downtime_ms", "faults_per_s")}
        if pass_ms := (most["pass_us"] - least["pass_us"]) / 1e3:
            print(f"downtime grows by {(middle['downtime_ms'][1] - middle['downtime_ms'][0]) / pass_ms:.1f} passes, "
                  f"faults/s to {middle['faults_per_s'][1] / middle['faults_per_s'][0]:.2f} x")
        print()


def show_written(written):
    print("\n".join(aligned([("", *(label for label, *_ in COLUMNS[:2])), *(
        (f"{of['memory_mib']} MiB, {variant}", *cells(runs, COLUMNS[:2]))
        for of in written for variant, runs in of["variants"].items())])))


def run(options):
    if not shutil.which("strace"):
        raise ProgramError("no strace: scripts/deps lab")
    with Host("tcg") as place:
        names = postcopy.variants(place, [4])
        bench.describe(place)
        calls = bench.in_turn(options.sizes, names, 1, lambda gib, name: migrate(place, name, gib, options, True),
                              "system calls of {} GiB".format)
        written = bench.in_turn(options.written, names, options.rounds, lambda mib, name: switch(place, name, mib),
                                "{} MiB that are written".format)
        runs = bench.in_turn(options.sizes, names, options.rounds,
                             lambda gib, name: migrate(place, name, gib, options), "{} GiB".format)
    sizes = [{"memory_gib": gib, "variants": of, "pass_us": pass_us(gib),
              "switch_calls_count": {name: count for name, [count] in calls[gib].items()}} for gib, of in runs.items()]
    written = [{"memory_mib": mib, "variants": of} for mib, of in written.items()]
    text = (f"{options.cpus} vCPUs, {options.memory} MiB in use, anonymous memory, a unix socket; medians of "
            f"{options.rounds} rounds (min..max).\n```\n{bench.printed(show, sizes)}```\n"
            "Guests that write an eighth of the pages of so much memory:\n"
            f"```\n{bench.printed(show_written, written)}```\n")
    bench.write(options, {"sizes": sizes, "written": written}, "What grows with a guest, on this host", text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 5, "1 round, 1 and 16 GiB", "size")
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 16, 64, 256], metavar="GIB",
                        help="(1, 16, 64, 256)")
    parser.add_argument("--written", nargs="*", type=int, default=[256, 1024], metavar="MIB",
                        help="memory that is written (256, 1024)")
    parser.add_argument("--cpus", type=int, default=2, help="vCPUs of the guest (2)")
    parser.add_argument("--memory", type=int, default=32, metavar="MIB", help="that the guest uses (32)")
    bench.main(run, bench.parse(parser, rounds=1, sizes=[1, 16], written=[256]))
