#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Migrate a guest that keeps writing memory post-copy, in the lab, with exits on and then off.

Prints a table, and writes build/reports/demo.json, demo.png and demo.svg.
What is measured, and how, is told in docs/demo.md.
"""
import argparse
import contextlib
import json
import signal
import sys
import time

from qemu.qmp import QMPError
from qemu.qmp.legacy import QEMUMonitorProtocol

from tests.demo import picture
from tests.lab import guest
from tests.lab.initramfs import BuildError
from tests.lab.lab import MACHINES, CommandFailed, Lab, LabError
from tests.lab.paths import REPORTS, ROOT, below, qemu

QMP_PORT = {"source": 4001, "destination": 4002}
# Why these, is told in docs/demo.md.
URI = "unix:/tmp/migration.sock"
CAPABILITIES = ("postcopy-ram", "postcopy-preempt")
MAX_BANDWIDTH_BYTES_PER_S = 64 << 20
MAX_POSTCOPY_BANDWIDTH_BYTES_PER_S = 1 << 20
PRECOPY_S = 1

MODES = ("on", "off")
MIN_SHARE_BY_EXITS = 0.95
# A touch has waited if it took longer than this many medians of the second pass, and than this.
THRESHOLD_MEDIANS = 2
THRESHOLD_US = 100
# On arm64 the guest cannot make KVM forget its mappings.
SECOND_PASS = {"x86_64": "fault on present memory", "aarch64": "touch of present memory"}


class DemoError(Exception):
    """The demo could not be carried out."""


started = time.monotonic()


def say(text):
    print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)


def until(condition, what, timeout=60, pause=0.1):
    """Wait until condition() is true, and return what it returned."""
    end = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > end:
            raise DemoError(f"{what}: not within {timeout} s")
        time.sleep(pause)
    return result


class Side:
    """One QEMU in the lab, with the guest in it."""

    def __init__(self, lab, name, options):
        self.lab = lab
        self.name = name
        self.log = f"/tmp/{name}.log"
        argv = [
            qemu(lab.arch), *("-name", f"{name},debug-threads=on", "-accel", "kvm", "-cpu", "max"),
            *guest.arguments(name, self.log, payload=guest.payload("touch", lab.arch), cpus=options.cpus,
                             memory_mb=options.memory, arch=lab.arch, seed=1),
            *("-qmp", f"tcp:0.0.0.0:{QMP_PORT[name]},server=on,wait=off"),
        ]
        if name == "destination":
            argv += ["-incoming", "defer"]
        self.job = lab.job(" ".join(f"'{word}'" for word in argv))
        self.qmp = until(self.connect, f"QMP of the {name}", timeout=30)

    def connect(self):
        self.check()
        qmp = QEMUMonitorProtocol(("127.0.0.1", self.lab.host_port(QMP_PORT[self.name])))
        try:
            qmp.connect()
            return qmp
        except QMPError:
            qmp.close()
            return None

    def check(self):
        if not self.job.running:
            raise DemoError(f"QEMU on the {self.name} has ended:\n{self.job.output}")

    def cmd(self, name, **arguments):
        self.check()
        return self.qmp.cmd(name, **{k.replace("_", "-"): v for k, v in arguments.items()})

    def report(self):
        self.check()
        report = guest.Report(self.lab.read_file(self.log).decode())
        if report.error:
            raise DemoError(f"the guest gave up on the {self.name}: {report.error}")
        return report

    def status(self):
        """query-migrate's status; an error ends the demo."""
        info = self.cmd("query-migrate")
        if info.get("status") in ("failed", "cancelled", "postcopy-paused"):
            raise DemoError(f"migration {info['status']} on the {self.name}: "
                            f"{info.get('error-desc', self.job.output)}")
        return info.get("status")

    def memory(self, address, size):
        path = f"/tmp/{self.name}.memory"
        self.cmd("pmemsave", val=address, size=size, filename=path)
        return self.lab.read_file(path)

    def quit(self):
        with contextlib.suppress(QMPError):
            self.qmp.cmd("quit")
        with contextlib.suppress(EOFError):
            self.qmp.close()
        self.job.wait(20)


def migrate(lab, mode, options):
    """One migration; returns its figures and the guest's latencies of both passes."""
    say(f"exits {mode}: start the guest")
    destination = Side(lab, "destination", options)
    source = Side(lab, "source", options)
    for side in destination, source:
        side.cmd("migrate-set-capabilities", capabilities=[
            {"capability": c, "state": True} for c in CAPABILITIES])
    source.cmd("migrate-set-parameters", max_bandwidth=MAX_BANDWIDTH_BYTES_PER_S,
               max_postcopy_bandwidth=MAX_POSTCOPY_BANDWIDTH_BYTES_PER_S)
    destination.cmd("migrate-set-parameters", postcopy_fault_exits=mode)
    destination.cmd("migrate-incoming", uri=URI)
    until(lambda: source.report().first("ready"), "the guest's filling of its memory")
    boot = source.report().first("boot")

    say(f"exits {mode}: pre-copy for {PRECOPY_S} s while {boot['cpus']} vCPUs write "
        f"{boot['test_pages'] * 4 >> 10} MiB")
    source.cmd("migrate", uri=URI)
    until(lambda: source.status() == "active", "the begin of pre-copy")
    time.sleep(PRECOPY_S)
    say(f"exits {mode}: post-copy")
    source.cmd("migrate-start-postcopy")

    def progress(shown=[0.0]):
        for side in source, destination:
            side.status()
        if time.monotonic() - shown[0] > 4:
            shown[0] = time.monotonic()
            ram = source.cmd("query-migrate").get("ram", {})
            say(f"exits {mode}: {ram.get('postcopy-requests', 0)} pages asked for, "
                f"{ram.get('remaining', 0) >> 20} MiB to come")
        return destination.report().first("end")

    # Not often: to look takes the lab's two processors away from what is measured.
    until(progress, "the guest's report from the destination (a lost fault?)", 180, pause=1)
    until(lambda: source.status() == destination.status() == "completed", "the end of migration")
    report = destination.report()
    memory = destination.memory(*report.sample_span())
    src, dst = source.cmd("query-migrate"), destination.cmd("query-migrate")
    for side in source, destination:
        side.quit()
    passes = report.latencies_us(memory, boot["tsc_khz"])
    return {"arch": lab.arch} | figures(mode, boot, src, dst, report, *passes), passes


def quantile(values, q):
    """Of sorted values, the one below which a share q lies."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else None


def figures(mode, boot, src, dst, report, pass1, pass2):
    touches = sorted(t for cpu in pass1 for t in cpu)
    present = sorted(t for cpu in pass2 for t in cpu)
    threshold = max(THRESHOLD_MEDIANS * quantile(present, 0.5), THRESHOLD_US)
    waited = [t for t in touches if t > threshold]
    faults = dst.get("postcopy-faults")
    served = faults and faults["exits"] + faults["uffd"]
    return {
        "exits_mode": mode,
        "vcpus": boot["cpus"],
        "guest_tsc_khz": boot["tsc_khz"],
        "faults_count": faults,
        "share_by_exits": served and faults["exits"] / served,
        "touch_count": len(touches),
        "present_touch_us": {f"p{p}": quantile(present, p / 100) for p in (50, 95, 99)},
        "waited_threshold_us": threshold,
        "present_over_threshold_count": sum(t > threshold for t in present),
        "waited_count": len(waited),
        "waited_us": {f"p{p}": quantile(waited, p / 100) for p in (50, 95, 99)}
        | {"max": waited[-1] if waited else None},
        "downtime_ms": src["downtime"],
        "total_time_ms": src["total-time"],
        "source_postcopy_requests_count": src["ram"]["postcopy-requests"],
        "memory_intact": report.intact,
        "memory_check": report.first("end"),
        "memory_bad": report.all("bad"),
    }


def table(results):
    def cell(value, form="{}"):
        return "-" if value is None else form.format(value)

    rows = [("", *(f"exits {r['exits_mode']}" for r in results))]
    for label, get, form in (
        ("faults by exits", lambda r: (r["faults_count"] or {}).get("exits"), "{}"),
        ("faults by uffd", lambda r: (r["faults_count"] or {}).get("uffd"), "{}"),
        ("received, populated", lambda r: (r["faults_count"] or {}).get("populated"), "{}"),
        ("pages asked for", lambda r: (r["faults_count"] or {}).get("requests"), "{}"),
        ("share of faults by exits", lambda r: r["share_by_exits"], "{:.2%}"),
        ("touches timed by the guest", lambda r: r["touch_count"], "{}"),
        ("touches that waited (*)", lambda r: r["waited_count"], "{}"),
        ("  their latency, p50", lambda r: r["waited_us"]["p50"], "{:.0f} us"),
        ("  p95", lambda r: r["waited_us"]["p95"], "{:.0f} us"),
        ("  p99", lambda r: r["waited_us"]["p99"], "{:.0f} us"),
        (f"{SECOND_PASS[results[0]['arch']]}, p50", lambda r: r["present_touch_us"]["p50"], "{:.0f} us"),
        ("downtime", lambda r: r["downtime_ms"], "{} ms"),
        ("total time", lambda r: r["total_time_ms"], "{} ms"),
        ("guest memory", lambda r: "intact" if r["memory_intact"] else "DAMAGED", "{}"),
    ):
        rows.append((label, *(cell(get(r), form) for r in results)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [row[0].ljust(widths[0]) + "".join("  " + cell.rjust(w)
             for cell, w in zip(row[1:], widths[1:])) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    lines += ["", f"(*) longer than {THRESHOLD_MEDIANS} times the median {SECOND_PASS[results[0]['arch']]}, "
              f"and than {THRESHOLD_US} us"]
    return "\n".join(lines)


def verdict(results):
    """What is not as it must be."""
    for r in results:
        mode, faults = r["exits_mode"], r["faults_count"]
        if not r["memory_intact"]:
            yield f"exits {mode}: guest memory is damaged: {r['memory_bad']}"
        if faults is None:
            yield f"exits {mode}: query-migrate has no postcopy-faults"
        elif mode == "on" and not r["share_by_exits"] >= MIN_SHARE_BY_EXITS:
            yield f"exits on: only {r['share_by_exits']:.2%} of the faults came by exits"
        elif mode == "off" and faults["exits"]:
            yield f"exits off: {faults['exits']} faults came by exits"


def run(options):
    say("boot the lab")
    results, passes = [], []
    with Lab(name=below("demo", options.arch), arch=options.arch) as lab:
        say("the lab is up")
        for mode in MODES:
            result, latencies = migrate(lab, mode, options)
            results.append(result)
            passes.append(latencies)
    REPORTS.mkdir(parents=True, exist_ok=True)
    name = below("demo", options.arch)
    (REPORTS / f"{name}.json").write_text(json.dumps({"runs": results}, indent=2) + "\n")
    picture.draw(results, passes, REPORTS / name)
    print(table(results))
    say(f"wrote {REPORTS.relative_to(ROOT)}/{name}.json, {name}.png, {name}.svg")
    return list(verdict(results))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=MACHINES, default="x86_64", help="of the lab (x86_64)")
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, default=128, metavar="MIB", help="of the guest (128)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        problems = run(options)
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    except (DemoError, BuildError, LabError, CommandFailed, QMPError) as e:
        sys.exit(f"demo: error: {e}")
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
