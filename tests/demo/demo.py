# SPDX-License-Identifier: GPL-2.0-or-later
"""Migrate a guest that keeps writing memory post-copy, in the lab, by QEMU 10.0 and by this branch.

Between the two QEMUs lies a link that delays each direction by half a millisecond, and nothing is
limited. In arm64's lab, which has no ip and no tc, this branch migrates with exits off and on, by a
Unix socket, and is to show that all faults come by exits.

Prints a table, and writes build/reports/demo.json and demo.svg.
docs/usage.md describes what is measured, and how.
"""
import heapq
import itertools
import json
import statistics
import sys
import time
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from tests.lab import cli, network
from tests.lab.cli import aligned, quantile, say
from tests.lab.guest import WAIT_MEDIANS, wait_threshold_us
from tests.lab.lab import HIGHRES, Lab
from tests.lab.pair import FORK, STOCK, Pair, until
from tests.lab.paths import REPORTS, ROOT, below

# docs/usage.md gives the reasons.
DELAY_US = 500
URI = "unix:/tmp/migration.sock"
LINK_MBIT_PER_S = 300
PRECOPY_S = 1
# Without a link: nearly all of memory is to be missed.
MAX_BANDWIDTH_BYTES_PER_S = 64 << 20
MAX_POSTCOPY_BANDWIDTH_BYTES_PER_S = 1 << 20
# Of the modes
COLOURS = ("#c8501e", "#7a7a7a")
# Text of the picture stays text.
matplotlib.rcParams |= {"svg.fonttype": "none", "font.size": 9}


class Mode(NamedTuple):
    name: str
    qemu: str
    exits: str | None
    # Whether faults are to be served by exits, or none; None: it has no such faults.
    by_exits: bool | None


MODES = {
    "x86_64": (Mode("QEMU 10.0", STOCK, None, None), Mode("this branch", FORK, None, True)),
    "aarch64": (Mode("exits off", FORK, "off", False), Mode("exits on", FORK, "on", True)),
}
MIN_SHARE_BY_EXITS = 0.95
# On arm64 the guest cannot make KVM forget its mappings.
SECOND_PASS = {"x86_64": "fault on present memory", "aarch64": "touch of present memory"}


def migrate(lab, mode, link):
    """One migration; returns its figures and the guest's latencies of both passes."""
    say(f"{mode.name}: start the guest")
    with Pair(lab, source=mode.qemu, destination=mode.qemu, exits=mode.exits, fetch="auto",
              memory_mb=128, seed=1, traced=False, wrapper=link.wrapper if link else (),
              pattern="hot" if link else "disjoint") as pair:
        source, destination = pair.sides
        if not link:
            source.cmd("migrate-set-parameters", max_postcopy_bandwidth=MAX_POSTCOPY_BANDWIDTH_BYTES_PER_S)
        uri = link.uri if link else URI
        destination.cmd("migrate-incoming", uri=uri)
        source.wait_event("ready")
        boot = source.report().the("boot")
        say(f"{mode.name}: pre-copy for {PRECOPY_S} s while {boot['cpus']} vCPUs write "
            f"{boot['test_pages'] * 4 >> 10} MiB")
        pair.start(uri, bandwidth=None if link else MAX_BANDWIDTH_BYTES_PER_S)
        time.sleep(PRECOPY_S)
        say(f"{mode.name}: post-copy")
        source.cmd("migrate-start-postcopy")
        shown = 0.0

        def checked():
            nonlocal shown
            ram = source.migration().get("ram", {})
            destination.migration()
            if time.monotonic() - shown > 4:
                shown = time.monotonic()
                say(f"{mode.name}: {ram.get('postcopy-requests', 0)} pages requested, "
                    f"{ram.get('remaining', 0) >> 20} MiB to come")
            return destination.report().first("end")

        # Not often: to look takes the lab's two processors away from what is measured.
        until(checked, "the guest's report from the destination (a lost fault?)", timeout=180, pause=1)
        pair.wait_completed()
        report = destination.report()
        passes = report.latencies_us(destination.memory, boot["tsc_khz"])
        src, dst = (side.migration("completed") for side in pair.sides)
        return {"arch": lab.arch} | figures(mode, boot, src, dst, report, *passes), passes


def figures(mode, boot, src, dst, report, pass1, pass2):
    touches = sorted(t for cpu in pass1 for t in cpu)
    threshold = wait_threshold_us(pass2, Lab.wait_us)
    waited = [t for t in touches if t > threshold]
    faults = dst.get("postcopy-faults")
    served = faults and faults["exits"] + faults["uffd"]
    return {
        "mode": mode.name,
        "vcpus": boot["cpus"],
        "faults_count": faults,
        "share_by_exits": served and faults["exits"] / served,
        "touch_count": len(touches),
        "present_touch_us": {"p50": statistics.median(t for cpu in pass2 for t in cpu)},
        "switch_to_last_touch_s": max(report.from_switch_us(boot["tsc_khz"])) / 1e6,
        "waited_threshold_us": threshold,
        "waited_count": len(waited),
        "waited_us": {f"p{p}": quantile(waited, p) for p in (50, 95, 99)},
        "downtime_ms": src["downtime"],
        "total_time_ms": src["total-time"],
        "source_postcopy_requests_count": src["ram"]["postcopy-requests"],
        "memory_intact": report.intact,
        "memory_bad": report.all("bad"),
    }


def table(results):
    def cell(value, form="{}"):
        return "-" if value is None else form.format(value)

    rows = [("", *(r["mode"] for r in results))]
    for label, get, form in (
        ("faults by exits", lambda r: (r["faults_count"] or {}).get("exits"), "{}"),
        ("faults by uffd", lambda r: (r["faults_count"] or {}).get("uffd"), "{}"),
        ("received, populated", lambda r: (r["faults_count"] or {}).get("populated"), "{}"),
        ("pages requested", lambda r: r["source_postcopy_requests_count"], "{}"),
        ("share of faults by exits", lambda r: r["share_by_exits"], "{:.2%}"),
        ("touches timed by the guest", lambda r: r["touch_count"], "{}"),
        ("touches that waited (*)", lambda r: r["waited_count"], "{}"),
        ("  their latency, p50", lambda r: r["waited_us"]["p50"], "{:.0f} us"),
        ("  p95", lambda r: r["waited_us"]["p95"], "{:.0f} us"),
        ("  p99", lambda r: r["waited_us"]["p99"], "{:.0f} us"),
        (f"{SECOND_PASS[results[0]['arch']]}, p50", lambda r: r["present_touch_us"]["p50"], "{:.0f} us"),
        ("switch to the last touch", lambda r: r["switch_to_last_touch_s"], "{:.1f} s"),
        ("downtime", lambda r: r["downtime_ms"], "{} ms"),
        ("total time", lambda r: r["total_time_ms"], "{} ms"),
        ("guest memory", lambda r: "intact" if r["memory_intact"] else "DAMAGED", "{}"),
    ):
        rows.append((label, *(cell(get(r), form) for r in results)))
    lines = aligned(rows)
    lines.insert(1, "-" * len(lines[0]))
    lines += ["", f"(*) longer than {WAIT_MEDIANS} times the median {SECOND_PASS[results[0]['arch']]}, "
              f"and than {Lab.wait_us} us"]
    return "\n".join(lines)


def share(axis, values, **options):
    """For each value, the share of values that are at most as large."""
    values = sorted(values)
    axis.plot([quantile(values, i) for i in range(101)], [i / 100 for i in range(101)], **options)


def draw(name, results, passes):
    """The guest's progress, and the latency of its touches of memory. results: the runs' figures; passes: their
    latencies in microseconds."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    progress, latency = figure.subplots(1, 2)
    for colour, result, (pass1, pass2) in zip(COLOURS, results, passes, strict=True):
        # Each vCPU touches page after page, from the moment on at which the guest resumes.
        ends = list(heapq.merge(*map(itertools.accumulate, pass1)))
        some = range(0, len(ends), len(ends) // 400 or 1)
        progress.plot([ends[i] / 1e6 for i in some], [(i + 1) / 256 for i in some],
                      color=colour, linewidth=2, label=result["mode"])
        share(latency, [t / 1000 for cpu in pass1 for t in cpu if t > result["waited_threshold_us"]],
              color=colour, linewidth=2,
              label=f"{result['mode']}: missing memory,\nmedian {result['waited_us']['p50'] / 1000:.1f} ms")
        share(latency, [t / 1000 for cpu in pass2 for t in cpu], color=colour, linewidth=1, linestyle=":",
              label=f"{result['mode']}: present memory")
    progress.set(title="memory that the guest has written since it goes on", xlabel="seconds on the destination",
                 ylabel="MiB", ylim=(0, None), xlim=(0, None))
    latency.set(title="touches by their time", xscale="log", ylim=(0, 1),
                xlabel="one write, measured by the guest (ms, log scale)",
                ylabel="share of touches that took at most this long")
    for axis in progress, latency:
        axis.grid(alpha=0.3)
    progress.legend()
    figure.legend(*latency.get_legend_handles_labels(), loc="outside lower right", ncols=len(results), fontsize="small")
    figure.suptitle(f"Post-copy of a guest that writes all the time, {results[0]['vcpus']} vCPUs")
    figure.savefig(REPORTS / f"{name}.svg")


def verdict(modes, results):
    """What is not as it must be."""
    for mode, r in zip(modes, results, strict=True):
        faults = r["faults_count"]
        if not r["memory_intact"]:
            yield f"{mode.name}: guest memory is damaged: {r['memory_bad']}"
        if mode.by_exits is None:
            continue
        if faults is None:
            yield f"{mode.name}: query-migrate has no postcopy-faults"
        elif mode.by_exits and not r["share_by_exits"] >= MIN_SHARE_BY_EXITS:
            yield f"{mode.name}: only {r['share_by_exits']:.2%} of the faults came by exits"
        elif not mode.by_exits and faults["exits"]:
            yield f"{mode.name}: {faults['exits']} faults came by exits"


def run(options):
    modes = MODES[options.arch]
    linked = options.arch == "x86_64"
    say("boot the lab")
    results, passes = [], []
    with Lab(name=below("demo", options.arch), arch=options.arch, append=HIGHRES if linked else "", icount=linked,
             extra=network.programs() if linked else ()) as lab:
        say("the lab is up")
        link = network.Network(lab, DELAY_US, LINK_MBIT_PER_S) if linked else None
        for mode in modes:
            result, latencies = migrate(lab, mode, link)
            results.append(result)
            passes.append(latencies)
    REPORTS.mkdir(parents=True, exist_ok=True)
    name = below("demo", options.arch)
    figures = {"delay_us": DELAY_US, "bandwidth_mbit_per_s": LINK_MBIT_PER_S,
               "ping_round_trip_us": link.round_trip_us} if link else {}
    (REPORTS / f"{name}.json").write_text(json.dumps(figures | {"runs": results}, indent=2) + "\n")
    draw(name, results, passes)
    print(table(results), flush=True)
    say(f"wrote {REPORTS.relative_to(ROOT)}/{name}.json, {name}.svg")
    problems = list(verdict(modes, results))
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--arch", choices=MODES, default="x86_64", help="of the lab (x86_64)")
    cli.main("demo", run, parser.parse_args())
