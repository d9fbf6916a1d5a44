# SPDX-License-Identifier: GPL-2.0-or-later
"""Migrate a guest that keeps writing memory post-copy, in the lab, by QEMU 10.0 and by this branch.

Between the two QEMUs lies a link that delays each direction by half a millisecond, and nothing is
limited. In arm64's lab, which has no ip and no tc, this branch migrates with exits off and on, by a
Unix socket, and is to show that all faults come by exits.

Prints a table and what it says, and writes build/reports/demo.json, demo.png and demo.svg.
docs/usage.md describes what is measured, and how.
"""
import json
import statistics
import sys
import textwrap
import time
from typing import NamedTuple

from tests.bench import pictures
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


def migrate(lab, mode, link, options):
    """One migration; returns its figures and the guest's latencies of both passes."""
    say(f"{mode.name}: start the guest")
    with Pair(lab, source=mode.qemu, destination=mode.qemu, exits=mode.exits, cpus=options.cpus, fetch="auto",
              memory_mb=options.memory, seed=1, traced=False, wrapper=link.wrapper if link else (),
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


def sentence(results, link):
    """What a user gains or loses, in a newcomer's words."""
    over = (f"over a link of {DELAY_US / 1000:g} ms each way and {LINK_MBIT_PER_S} Mbit/s, nothing limited" if link
            else "on one machine, without a network")

    def each(form, get):
        return " and ".join(form.format(get(r)) for r in results)

    waits = each("{0[1]:.1f} ms with {0[0]}", lambda r: (r["mode"], r["waited_us"]["p50"] / 1000))
    text = (f"Post-copy {over}: a guest that touches memory which is still on the other host waits {waits} (medians); "
            f"one such touch in a hundred takes longer than "
            f"{each('{:.1f}', lambda r: r['waited_us']['p99'] / 1000)} ms. "
            f"{each('{}', lambda r: r['waited_count'])} of {results[0]['touch_count']} first touches wait. "
            f"The guest has written all that it uses after {each('{:.1f}', lambda r: r['switch_to_last_touch_s'])} s.")
    return textwrap.fill(text, 100)


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
            result, latencies = migrate(lab, mode, link, options)
            results.append(result)
            passes.append(latencies)
    REPORTS.mkdir(parents=True, exist_ok=True)
    name = below("demo", options.arch)
    figures = {"delay_us": DELAY_US, "bandwidth_mbit_per_s": LINK_MBIT_PER_S,
               "ping_round_trip_us": link.round_trip_us} if link else {}
    (REPORTS / f"{name}.json").write_text(json.dumps(figures | {"runs": results}, indent=2) + "\n")
    pictures.demo(name, results, passes)
    print(f"{table(results)}\n\n{sentence(results, link)}", flush=True)
    say(f"wrote {REPORTS.relative_to(ROOT)}/{name}.json, {name}.png, {name}.svg")
    problems = list(verdict(modes, results))
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--arch", choices=MODES, default="x86_64", help="of the lab (x86_64)")
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, default=128, metavar="MIB", help="of the guest (128)")
    cli.main("demo", run, parser.parse_args())
