#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Migrate a guest that keeps writing memory post-copy, in the lab, with exits on and then off.

Prints a table, and writes build/reports/demo.json, demo.png and demo.svg.
What is measured, and how, is told in docs/demo.md.
"""
import argparse
import json
import sys
import time

from tests.demo import picture
from tests.lab import program
from tests.lab.lab import MACHINES, Lab
from tests.lab.pair import Pair, until
from tests.lab.paths import REPORTS, ROOT, below
from tests.lab.program import aligned, quantile, say

# Why these, is told in docs/demo.md.
URI = "unix:/tmp/migration.sock"
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


def migrate(lab, mode, options):
    """One migration; returns its figures and the guest's latencies of both passes."""
    say(f"exits {mode}: start the guest")
    with Pair(lab, exits=mode, cpus=options.cpus, memory_mb=options.memory, seed=1, traced=False) as pair:
        source, destination = pair.sides
        source.cmd("migrate-set-parameters", max_postcopy_bandwidth=MAX_POSTCOPY_BANDWIDTH_BYTES_PER_S)
        destination.cmd("migrate-incoming", uri=URI)
        source.wait_event("ready")
        boot = source.report().the("boot")
        say(f"exits {mode}: pre-copy for {PRECOPY_S} s while {boot['cpus']} vCPUs write "
            f"{boot['test_pages'] * 4 >> 10} MiB")
        pair.start(URI, bandwidth=MAX_BANDWIDTH_BYTES_PER_S)
        time.sleep(PRECOPY_S)
        say(f"exits {mode}: post-copy")
        source.cmd("migrate-start-postcopy")
        shown = 0.0

        def checked():
            nonlocal shown
            ram = source.migration().get("ram", {})
            destination.migration()
            if time.monotonic() - shown > 4:
                shown = time.monotonic()
                say(f"exits {mode}: {ram.get('postcopy-requests', 0)} pages asked for, "
                    f"{ram.get('remaining', 0) >> 20} MiB to come")
            return destination.report().first("end")

        # Not often: to look takes the lab's two processors away from what is measured.
        until(checked, "the guest's report from the destination (a lost fault?)", timeout=180, pause=1)
        for side in pair.sides:
            side.wait_status("completed")
        report = destination.report()
        passes = report.latencies_us(destination.memory(*report.sample_span()), boot["tsc_khz"])
        src, dst = (side.migration("completed") for side in pair.sides)
        return {"arch": lab.arch} | figures(mode, boot, src, dst, report, *passes), passes


def figures(mode, boot, src, dst, report, pass1, pass2):
    touches = sorted(t for cpu in pass1 for t in cpu)
    present = sorted(t for cpu in pass2 for t in cpu)
    threshold = max(THRESHOLD_MEDIANS * (quantile(present, 50) or 0), THRESHOLD_US)
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
        "present_touch_us": {f"p{p}": quantile(present, p) for p in (50, 95, 99)},
        "waited_threshold_us": threshold,
        "present_over_threshold_count": sum(t > threshold for t in present),
        "waited_count": len(waited),
        "waited_us": {f"p{p}": quantile(waited, p) for p in (50, 95, 99)}
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
    lines = aligned(rows)
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
    problems = list(verdict(results))
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=MACHINES, default="x86_64", help="of the lab (x86_64)")
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, default=128, metavar="MIB", help="of the guest (128)")
    program.main("demo", run, parser.parse_args())


if __name__ == "__main__":
    main()
