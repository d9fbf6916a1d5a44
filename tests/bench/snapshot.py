#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Compare background snapshots of stock QEMU and of the fork, on this host's kernel.

Each case is a guest of some size, nearly empty or full, with and without transparent huge pages, of
anonymous memory or a memfd. Each round starts it anew with each QEMU in turn and takes one
snapshot to a file, while the guest writes all that it has. Prints a table, and writes
build/reports/bench-snapshot.json.

setup: from the start of the snapshot until the guest runs on, by the time stamps of QEMU's events
MIGRATION (setup) and RESUME; stopped: from STOP on. grown: resident memory and page tables, after
against before. A touch is a write of the guest, by its TSC, from just before the snapshot until
just after it; shares of all touches do not compare, since one snapshot lasts longer than the other.
"""
import argparse
import contextlib
import ctypes
import itertools
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import bench
import guest
from bench import ROOT, BenchError, say
from qemu.qmp.legacy import QEMUMonitorProtocol

VARIANTS = {name: ROOT / "build" / name / "qemu-system-x86_64" for name in ("stock", "fork")}
KINDS = {"anonymous": None, "memfd": "memory-backend-memfd"}
EMPTY_MIB = 16              # that the guest writes, of an empty one
# The guest uses memory below 2 GiB only, some of it for itself; it takes huge pages only.
FULL_MIB = 1792
FULL_SHARE = 0.8
PR_SET_THP_DISABLE = 41
WAIT_US = 100               # a touch that took longer has waited
TIMEOUT_S = 300


class Qemu:
    """A QEMU on this host with the payload in it."""

    def __init__(self, directory, binary, case, options, side="source", arguments=()):
        self.log = directory / f"{side}.log"
        self.output = open(directory / f"{side}.output", "w+")
        machine, extra = "pc", list(arguments)
        if KINDS[case["memory"]]:
            machine += ",memory-backend=ram"
            extra += ["-object", f"{KINDS[case['memory']]},id=ram,size={case['guest_mib']}M"]
        sock = directory / f"{side}.qmp"
        self.qmp = QEMUMonitorProtocol(str(sock), server=True)
        libc = ctypes.CDLL(None)

        def prepare():
            if not case["thp"]:
                libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
        self.process = subprocess.Popen(
            [binary, "-accel", options.accel, "-cpu", "max" if options.accel == "tcg" else "qemu64",
             *guest.arguments(side, self.log, cpus=options.cpus, memory_mb=case["guest_mib"],
                              machine=machine, mem=case["written_mib"], seed=options.seed, time=1),
             "-qmp", f"unix:{sock}", *extra],
            preexec_fn=prepare, stdout=self.output, stderr=subprocess.STDOUT)
        self.qmp.accept(timeout=30)

    def cmd(self, name, **arguments):
        return self.qmp.cmd(name, **{k.replace("_", "-"): v for k, v in arguments.items()})

    def report(self):
        report = guest.Report(self.log.read_text())
        if report.error:
            raise BenchError(f"the guest gave up: {report.error}")
        return report

    def event(self, name):
        end = time.monotonic() + TIMEOUT_S
        while not (event := self.report().first(name)):
            if self.process.poll() is not None or time.monotonic() > end:
                self.output.seek(0)
                raise BenchError(f"no event '{name}' of the guest; QEMU: {self.output.read()}")
            time.sleep(0.05)
        return event

    def memory_kib(self):
        proc = Path(f"/proc/{self.process.pid}")
        status = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "status").read_text(), re.M))
        rollup = (proc / "smaps_rollup").read_text()
        return {"resident": int(status["VmRSS"]), "tables": int(status["VmPTE"]),
                "huge": int(re.search(r"^AnonHugePages:\s+(\d+)", rollup, re.M)[1])}

    def end(self):
        with contextlib.suppress(Exception):
            self.qmp.close()
        self.process.kill()
        self.process.wait()
        self.output.close()


def quantile(times, share):
    """Of [(microseconds, touches)] in order."""
    left = share * sum(n for _, n in times)
    for us, n in times:
        left -= n
        if left <= 0:
            return us
    return None


def measure(directory, variant, case, options):
    """One snapshot; its figures."""
    snapshot = directory / "snapshot"
    qemu = Qemu(directory, VARIANTS[variant], case, options)
    try:
        boot = qemu.event("boot")
        qemu.event("ready")
        time.sleep(options.settle)
        qemu.cmd("migrate-set-capabilities", capabilities=[
            {"capability": c, "state": True} for c in ("background-snapshot", "events")])

        def dump(name):
            qemu.cmd("pmemsave", val=boot["times_address"],
                     size=4 * guest.TIMES_BUCKETS * options.cpus, filename=str(directory / name))
            return (directory / name).read_bytes()
        before, times = qemu.memory_kib(), dump("before")
        qemu.qmp.get_events()
        qemu.qmp.clear_events()
        qemu.cmd("migrate", uri=f"file:{snapshot}")
        at = {}
        end = time.monotonic() + TIMEOUT_S
        while not {"completed", "failed"} & set(at):
            if time.monotonic() > end:
                raise BenchError("the snapshot does not end")
            event = qemu.qmp.pull_event(wait=TIMEOUT_S)
            if event:
                name = event.get("data", {}).get("status") or event["event"]
                at[name] = (event["timestamp"]["seconds"] * 10**6 + event["timestamp"]["microseconds"])
        info = qemu.cmd("query-migrate")
        if info["status"] != "completed":
            raise BenchError(f"the snapshot failed: {info}")
        touches = guest.times(times, dump("after"), boot["tsc_khz"])
        after = qemu.memory_kib()
        size = snapshot.stat()
        grown = sum(after[k] - before[k] for k in ("resident", "tables"))
        return {
            "setup_us": at["RESUME"] - at["setup"], "stopped_us": at["RESUME"] - at["STOP"],
            "total_ms": (at["completed"] - at["setup"]) / 1000,
            "grown_kib": grown, "grown_percent": 100 * grown / (case["guest_mib"] << 10),
            "resident_before_kib": before["resident"], "tables_grown_kib": after["tables"] - before["tables"],
            "huge_before_kib": before["huge"], "huge_after_kib": after["huge"],
            "file_bytes": size.st_size, "file_allocated_bytes": size.st_blocks * 512,
            "touch_count": sum(n for _, n in touches),
            **{f"touch_p{name}_us": quantile(touches, share)
               for name, share in (("50", .5), ("99", .99), ("99_9", .999), ("100", 1))},
            "waited_count": sum(n for us, n in touches if us > WAIT_US),
            "waited_ms": sum(us * n for us, n in touches if us > WAIT_US) / 1000,
            "query_migrate": info.get("background-snapshot"),
        }
    finally:
        qemu.end()
        snapshot.unlink(missing_ok=True)


def cases(options):
    for gib, full, thp, memory in itertools.product(options.sizes, (False, True), (False, True), KINDS):
        if memory == "memfd" and (full or thp):
            continue        # the host's setting for shmem decides about huge pages
        mib = gib * 1024
        case = {"guest_mib": mib, "full": full, "thp": thp, "memory": memory,
                "written_mib": min(int(mib * FULL_SHARE) & ~1, FULL_MIB) if full else EMPTY_MIB}
        if options.only in name_of(case):
            yield case


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
    about, results = bench.about(), []
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-snapshot-") as directory:
        directory = Path(directory)
        for case in cases(options):
            available_mib = int(re.search(r"MemAvailable:\s+(\d+)",
                                          Path("/proc/meminfo").read_text())[1]) >> 10
            if available_mib < case["guest_mib"] * 1.5 + 512:
                say(f"{name_of(case)}: left out, this machine has {available_mib} MiB")
                continue
            runs = {variant: [] for variant in VARIANTS}
            for n in range(options.rounds):
                for variant in list(VARIANTS)[::-1 if n % 2 else 1]:
                    runs[variant].append(measure(directory, variant, case, options))
                    say(f"{name_of(case)}, {variant}: setup "
                        f"{runs[variant][-1]['setup_us'] / 1000:.1f} ms")
            results.append({"case": case, "runs": runs})
    about |= {"accelerator": options.accel,
              "thp_enabled": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
              "qemu_versions": {v: subprocess.run([binary, "--version"], capture_output=True, text=True,
                                                  check=True).stdout.splitlines()[0]
                                for v, binary in VARIANTS.items()}}
    text = f"Medians of {options.rounds} rounds.\n```{bench.printed(show, results)}```"
    bench.write("bench-snapshot", {
        "about": about, "settings": {"vcpus_count": options.cpus, "seed": options.seed,
                                     "rounds_count": options.rounds, "settle_s": options.settle},
        "results": results}, "Background snapshots, on the host's kernel", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 round of a guest of 1 GiB")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="GIB", help="of the guest (1 4)")
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="cases whose name has it, like 'THP on'")
    parser.add_argument("--rounds", type=int, help="snapshots of each case (3)")
    parser.add_argument("--cpus", type=int, default=2, help="vCPUs of the guest (2)")
    parser.add_argument("--seed", type=int, default=1, help="of contents and order (1)")
    parser.add_argument("--settle", type=float, default=1, metavar="S",
                        help="let the guest write for so long before (1)")
    parser.add_argument("--accel", choices=("tcg", "kvm"), default="tcg", help="of the guest (tcg)")
    parser.add_argument("--directory", help="for the snapshots (the system's for temporary files)")
    options = parser.parse_args()
    options.sizes = options.sizes or ([1] if options.quick else [1, 4])
    options.rounds = options.rounds or (1 if options.quick else 3)
    bench.main(run, options)


if __name__ == "__main__":
    main()
