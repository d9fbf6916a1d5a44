#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Compare post-copy migrations: stock QEMU, the fork with exits off, and with exits on.

In the lab, or with --host on this machine: its kernel, and its KVM if there is one. Each round migrates the same guest once by each variant, in an order that rotates, for each
kind of memory. Prints a table per kind, and writes build/reports/bench-postcopy.json.

Latencies are the guest's, by its TSC: of the first touch of each page on the destination, those
that waited, which are those longer than twice the median of the second pass and 100 us (on this machine 20 us). Context
switches and processor time are those from the start of post-copy to the end of the guest's check of its
memory; a fault is an exit or a message from userfaultfd, and with stock QEMU, which does not count
these, a page that was asked for. Nothing is traced meanwhile.
"""
import argparse
import os
import platform
import re
import shutil
import statistics
from collections import Counter
from pathlib import Path

import bench
from bench import say
from host import EXIT_ON_MISSING, Host
from initramfs import qemu
from lab import Lab
from pair import FIRST_MIGRATION_PORT, FORK, MIB, STOCK, Pair, until

# QEMU on both sides, and postcopy-fault-exits.
VARIANTS = {"stock": (STOCK, None), "exits off": (FORK, "off"), "exits on": (FORK, "on")}
BACKENDS = {
    "anonymous": None,
    "memfd": "memory-backend-memfd",
    "hugetlb": "memory-backend-memfd,hugetlb=on,hugetlbsize=2M",
}
PATTERNS = ("disjoint", "shared", "samehuge", "zerowrite")
# A touch has waited if it took longer than this many medians of a fault on present memory.
THRESHOLD_MEDIANS = 2
# Stock QEMU leaves TCP_NODELAY off: some requests wait 40 ms for a delayed acknowledgement.
URIS = {"tcp": "tcp:127.0.0.1:{port}", "unix": "unix:{tmp}/migration.sock"}
TICKS_PER_S = 100       # of /proc/PID/stat
TIMEOUT_S = 300
STRACE_LOG = "/tmp/strace"


class Meter:
    """Context switches of the destination, and processor time of both QEMUs, of two spans."""

    def __init__(self, pair):
        self.pair = pair
        self.pids = [pair.lab.run(f"cat {side.pidfile}", check=True).output.strip()
                     for side in pair.sides]
        self.look = "cat " + " ".join([f"/proc/{self.pids[1]}/task/*/status",
                                       *(f"/proc/{pid}/stat" for pid in self.pids)])

    def read(self, when=":"):
        """Wait for the command `when`; by thread, switches so far; by process, seconds so far."""
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
        """When the guest has ended."""
        dst = self.pair.destination
        self.second = self.read(f"while kill -0 {self.pids[1]} && ! grep -qs '\"end\"' "
                                f"{dst.console}; do sleep 0.5; done")

    def figures(self):
        """Ends the destination: threads that have ended are in the sum of the process only."""
        last, _ = self.read()
        self.pair.destination.signal("KILL")
        output = self.pair.destination.job.wait().output
        total = [int(n) for n in re.findall(r"oluntary context switches: (\d+)", output)]
        assert len(total) == 2, f"no sum of context switches:\n{output}"
        begin, end = self.first[0], self.second[0]
        for i in range(2):
            total[i] -= sum(n[i] for n in begin.values())
            total[i] -= sum(n[i] - end[tid][i] for tid, n in last.items() if tid in end)
        cpu = [b - a for a, b in zip(self.first[1], self.second[1])]
        return {"voluntary_switches_count": total[0], "involuntary_switches_count": total[1],
                "source_cpu_s": round(cpu[0], 2), "destination_cpu_s": round(cpu[1], 2),
                "cpu_s": round(sum(cpu), 2)}


def quantiles(values):
    values = sorted(values)
    return {f"latency_p{p}_us": values[min(len(values) - 1, len(values) * p // 100)]
            if values else None for p in (50, 95, 99)}


def latencies(pair, report, tsc_khz):
    """After the guest's end: of its touches that waited."""
    address, size = report.sample_span()
    path = f"{pair.lab.tmp}/destination.memory"
    pair.destination.cmd("pmemsave", val=address, size=size, filename=path)
    passes = report.latencies_us(pair.lab.read_file(path), tsc_khz)
    touches, present = ([t for cpu in one for t in cpu] for one in passes)
    present_us = statistics.median(present)
    threshold_us = max(THRESHOLD_MEDIANS * present_us, pair.lab.wait_us)
    waited = [t for t in touches if t > threshold_us]
    return {"touch_count": len(touches), "waited_count": len(waited),
            "waited_threshold_us": threshold_us, "present_touch_p50_us": present_us, **quantiles(waited)}


class Strace:
    """The destination's system calls, from start to stop."""

    def __init__(self, pair):
        self.lab = pair.lab
        self.job = self.lab.job(f"exec strace -f -y -e trace=ioctl,recvmsg,read,futex "
                                f"-o {STRACE_LOG} -p $(cat {pair.destination.pidfile})")
        until(lambda: " attached" in self.job.output or not self.job.running, "strace")
        assert self.job.running, f"strace has ended:\n{self.job.output}"

    def stop(self):
        """End strace, and count: by name, calls and bytes."""
        self.lab.run("kill -INT $(pidof strace)", check=True)
        self.job.wait()
        counts, begun = Counter(), {}
        for line in self.lab.read_file(STRACE_LOG).decode(errors="replace").splitlines():
            thread, _, text = line.partition(" ")
            text = text.strip()
            if text.endswith("<unfinished ...>"):
                begun[thread] = text.removesuffix("<unfinished ...>")
                continue
            if text.startswith("<... "):
                text = begun.pop(thread, "") + text.partition("resumed>")[2]
            call(text, counts)
        for text in begun.values():     # that has not returned
            call(text, counts)
        return dict(counts)


def call(text, counts):
    """Count one call in strace's words."""
    result = re.search(r"\) += (-?\d+)[^()]*(\([^()]*\))?$", text)
    result = int(result[1]) if result else 0
    name = text.partition("(")[0]
    uffd = re.search(r", UFFDIO_(COPY|ZEROPAGE|CONTINUE|WAKE)\b", text)
    if uffd and uffd[1] == "WAKE":
        counts["uffdio_wake_count"] += 1
    elif uffd:
        # Some versions of strace do not look into UFFDIO_CONTINUE.
        mode = ("_dontwake" if "_MODE_DONTWAKE" in text else "" if "mode=" in text
                else "_any_mode")
        counts[f"uffdio_{uffd[1].lower()}{mode}_count"] += 1
        counts["placed_page_count"] += result == 0
        if uffd[1] == "COPY" and result == 0:
            counts["uffdio_copy_bytes"] += int(re.search(r"len=(\w+)", text)[1], 0)
    elif name == "read" and "<anon_inode:[userfaultfd]>" in text:
        counts["uffd_read_count"] += 1
    elif name == "recvmsg":
        counts["recvmsg_count"] += 1
        counts["recvmsg_bytes"] += max(result, 0)
    elif name == "futex":
        counts["futex_count"] += 1


def migrate(lab, variant, backend, options, count=False):
    """One migration; its figures, or with count the destination's system calls."""
    qemu, exits = VARIANTS[variant]
    huge = backend == "hugetlb"
    pattern = options.pattern or ("samehuge" if huge else "disjoint")
    # Without a channel of their own, pages that are asked for share the limit.
    bandwidth = 0 if not options.preempt else 16 * MIB if huge else MIB
    with Pair(lab, exits=exits, source=qemu, destination=qemu, backend=BACKENDS[backend],
              capabilities=("postcopy-preempt",) * options.preempt, cpus=options.cpus,
              memory_mb=options.memory << huge, pattern=pattern, seed=options.seed, traced=False,
              wrapper=("busybox", "time", "-v")) as pair:
        src, dst = pair.sides
        src.cmd("migrate-set-parameters", max_postcopy_bandwidth=bandwidth)
        uri = URIS[options.transport].format(tmp=lab.tmp, port=lab.port(FIRST_MIGRATION_PORT))
        dst.cmd("migrate-incoming", uri=uri)
        pair.start(uri)
        strace = Strace(pair) if count else None
        meter = Meter(pair)
        meter.begin()
        src.cmd("migrate-start-postcopy")
        meter.end()
        pair.finish()
        if count:
            return strace.stop()
        info, total = dst.cmd("query-migrate"), src.cmd("query-migrate")
        report, boot = dst.report(), src.report().first("boot")
        faults, requests = info.get("postcopy-faults"), total["ram"]["postcopy-requests"]
        demand = faults["exits"] + faults["uffd"] if faults else requests
        result = latencies(pair, report, boot["tsc_khz"]) | meter.figures()
        return result | {
            "demand_fault_count": demand,
            "source_postcopy_requests_count": requests,
            **{f"{kind}_switches_per_fault_count": result[f"{kind}_switches_count"] / demand
               for kind in ("voluntary", "involuntary")},
            "downtime_ms": total["downtime"], "total_time_ms": total["total-time"],
            "memory_intact": report.intact,
            # As QEMU names them; latencies are in ns.
            "query_migrate": {k: v for k, v in info.items() if k.startswith("postcopy-")},
        }


def table(rows, results, form):
    """rows: (label, key, format); results: {variant: [figures]}."""
    lines = [("", *results, *(f"{v} / stock" for v in list(results)[1:]))]
    for label, key, unit in rows:
        values = {v: [r[key] for r in runs if r.get(key) is not None]
                  for v, runs in results.items()}
        if not any(any(of) for of in values.values()):
            continue
        middle = {v: statistics.median(of) if of else None for v, of in values.items()}
        cells = ["-" if middle[v] is None else form(unit, middle[v], values[v]) for v in results]
        first, *others = middle.values()
        ratios = ["-" if not first or other is None else f"{other / first:.2f}" for other in others]
        lines.append((label, *cells, *ratios))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(line[0].ljust(widths[0]) + "".join(
        "  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:])) for line in lines)


MEASURED = (
    ("waited touch, p50 (us)", "latency_p50_us", "{:.0f}"),
    ("p95", "latency_p95_us", "{:.0f}"),
    ("p99", "latency_p99_us", "{:.0f}"),
    ("present touch, p50 (us)", "present_touch_p50_us", "{:.0f}"),
    ("touches that waited", "waited_count", "{:.0f}"),
    ("faults", "demand_fault_count", "{:.0f}"),
    ("pages asked for", "source_postcopy_requests_count", "{:.0f}"),
    ("voluntary switches/fault", "voluntary_switches_per_fault_count", "{:.2f}"),
    ("involuntary switches/fault", "involuntary_switches_per_fault_count", "{:.2f}"),
    ("processor, destination (s)", "destination_cpu_s", "{:.2f}"),
    ("processor, both (s)", "cpu_s", "{:.2f}"),
    ("downtime (ms)", "downtime_ms", "{:.0f}"),
    ("total time (ms)", "total_time_ms", "{:.0f}"),
)
COUNTED = (
    ("pages placed (count)", "placed_page_count", None),
    *((f"UFFDIO_{name}", f"uffdio_{name.lower()}_count", 1) for name in (
        "COPY", "COPY_DONTWAKE", "ZEROPAGE", "ZEROPAGE_DONTWAKE", "CONTINUE", "CONTINUE_DONTWAKE",
        "CONTINUE_ANY_MODE", "WAKE")),
    ("bytes by UFFDIO_COPY", "uffdio_copy_bytes", 1),
    ("reads of userfaultfd", "uffd_read_count", 1),
    ("recvmsg", "recvmsg_count", 1),
    ("bytes by recvmsg", "recvmsg_bytes", 1),
    ("futex", "futex_count", 1),
)


def show(measured, counted):
    for backend, results in measured.items():
        rounds = len(results["stock"])
        print(f"\n{backend} memory, {rounds} rounds: median (min..max)\n")
        print(table(MEASURED, results, lambda unit, middle, values: (
            f"{unit.format(middle)} ({unit.format(min(values))}..{unit.format(max(values))})")))
    for backend, results in counted.items():
        pages = {v: of["placed_page_count"] for v, of in results.items()}
        per_page = {v: [of | {key: of.get(key, 0) / pages[v] for _, key, unit in COUNTED if unit}]
                    for v, of in results.items()}
        print(f"\n{backend} memory, one run under strace: the destination's, per placed page\n")
        print(table(COUNTED, per_page,
                    lambda unit, n, _: f"{n:.3f}" if unit and n < 1000 else f"{n:.0f}"))


def machine(lab):
    """What was measured, and on what."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "host_processors_count": os.cpu_count(),
        "host_cpu_model": model and model[1],
        "host_kernel_release": platform.release(),
        "qemu_processors_count": lab.cpus,
        "qemu_kernel_release": lab.run("uname -r", check=True).output.strip(),
        "accelerator": " ".join(lab.qemu_words),
        "qemu_versions": {name: lab.run(f"{qemu(lab.arch, name)} --version", check=True).output.splitlines()[0]
                          for name in (STOCK, FORK)},
    }


def run(options):
    backends = options.backends
    strace = shutil.which("strace")
    if options.count and not strace:
        raise bench.BenchError("no strace: scripts/deps lab")
    counted = {backend: {} for backend in backends} if options.count else {}
    hugepages = 2 * options.memory + 8 if "hugetlb" in backends else 0
    if options.host:
        place = Host(options.accel, hugepages)
    else:
        say("boot the lab")
        place = Lab(name="bench", memory_mb=2048 + 6 * options.memory, hugepages=hugepages,
                    extra=[strace] if options.count else [])
    names = [name for name in VARIANTS if name != "exits on" or place.exit_on_missing]
    measured = {backend: {variant: [] for variant in names} for backend in backends}
    with place as lab:
        about = machine(lab)
        for n in range(options.rounds):
            first = n % len(names)
            for backend in backends:
                for variant in names[first:] + names[:first]:
                    say(f"round {n + 1} of {options.rounds}: {backend} memory, {variant}")
                    measured[backend][variant].append(migrate(lab, variant, backend, options))
        for backend in counted:
            for variant in names:
                say(f"count system calls: {backend} memory, {variant}")
                counted[backend][variant] = migrate(lab, variant, backend, options, count=True)
    settings = {"vcpus_count": options.cpus, "memory_mib": options.memory, "seed": options.seed,
                "pattern": options.pattern, "preempt": options.preempt, "transport": options.transport,
                "rounds_count": options.rounds}
    show(measured if options.rounds else {}, counted)
    bench.write("bench-postcopy-host" if options.host else "bench-postcopy", {"machine": about, "settings": settings, "runs": measured,
                                   "system_calls": counted})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="kinds of memory (all)")
    parser.add_argument("--rounds", type=int, help="migrations of each kind (5); 0: only --count")
    parser.add_argument("--quick", action="store_true", help="2 rounds, anonymous memory and memfd")
    parser.add_argument("--host", action="store_true",
                        help="on this machine, not in the lab; exits on only if its KVM has "
                        f"{EXIT_ON_MISSING}")
    parser.add_argument("--accel", choices=("kvm", "tcg"), help="with --host (kvm, or else tcg)")
    parser.add_argument("--count", action="store_true",
                        help="then once more under strace, to count the destination's system calls")
    parser.add_argument("--no-preempt", dest="preempt", action="store_false",
                        help="without postcopy-preempt")
    parser.add_argument("--transport", choices=URIS, default="tcp", help="of the migration (tcp)")
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, default=32, metavar="MIB",
                        help="of the guest (32; twice as much for hugetlb)")
    parser.add_argument("--pattern", choices=PATTERNS,
                        help="how the guest touches memory (disjoint; samehuge for hugetlb)")
    parser.add_argument("--seed", type=int, default=1, help="of contents and order (1)")
    options = parser.parse_args()
    options.backends = options.backends or list(BACKENDS)[:2 if options.quick else None]
    if options.rounds is None:
        options.rounds = 2 if options.quick else 5
    bench.main(run, options)


if __name__ == "__main__":
    main()
