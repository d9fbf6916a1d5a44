# SPDX-License-Identifier: GPL-2.0-or-later
"""The time of one demand fault, by stage: stock QEMU, the fork with exits off, and with exits on.

Both QEMUs of a migration in the lab write trace events with time stamps of their common clock. For each requested page
of main memory, the bench combines the events of its stages: fault known to QEMU, request handled by the source, page
taken, header seen by the destination, page placed, vCPU thread woken. The rest of the guest's measured time is spent in
KVM, userfaultfd and until a thread runs.

Events cost time too; the same migration without traces shows how much. Prints a table, and writes
build/reports/breakdown.json and .md.
"""
import re
import statistics
from collections import defaultdict, namedtuple

from tests.bench import bench, postcopy
from tests.lab.cli import say
from tests.lab.lab import Lab
from tests.lab.pair import FORK, Pair

SOURCE = ("migrate_handle_rp_req_pages", "postcopy_preempt_send_host_page")
DESTINATION = {
    "stock": ("postcopy_ram_fault_thread_request", "ram_load_postcopy_loop", "postcopy_place_page"),
    "fork": ("postcopy_fault_uffd", "kvm_exit_on_missing", "postcopy_fault_exit", "ram_load_postcopy_loop",
             "postcopy_place", "postcopy_fault_exit_end"),
}
BLOCK = "pc.ram"
PAGE_BITS = 12
ASK = 1         # state of a fault that requests its page
HAS_DATA = 0x08         # flag of a page with data
PREEMPT_CHANNEL = 1
SAME_FAULT_US = 2_000_000       # later events belong to another fault
TRACED = {"traced": True, "without trace": False}

Event = namedtuple("Event", "us thread name text")

# Stage: (from, to), by names of a fault's stamps.
STAGES = {
    "KVM's exit translated, request queued": ("exit", "known"),
    "request sent, source's thread woken": ("known", "handled"),
    "source takes the page": ("handled", "taken"),
    "page sent, destination's thread woken": ("taken", "header"),
    "page received and placed": ("header", "placed"),
    "vCPU thread woken": ("placed", "woken"),
}
# Of the table, below the stages
ROWS = {
    "**from first to last event**": "in_qemu_p50_us",
    "rest: KVM, userfaultfd, until a thread runs": "outside_of_qemu_p50_us",
    "**touch that waited, timed by the guest**": "traced_touch_p50_us",
    "the same, without trace": "touch_p50_us",
    "so each trace event costs, within each line above": "trace_event_us",
    "touch of present memory that KVM has to map": "present_touch_p50_us",
    "faults whose way is known": "faults_count",
}


def events(text):
    return [Event(int(s) * 1_000_000 + int(us), int(thread), name, rest) for thread, s, us, name, rest in
            re.findall(r"^(\d+)@(\d+)\.(\d+):(\w+) (.*)$", text, re.M)]


def trace_options(names, log):
    return [*(word for name in names for word in ("-trace", name)), "-D", log, "-msg", "timestamp=on"]


class Times:
    """Times of one kind of event, by page or processor."""

    def __init__(self, all_events, name, pattern, key=lambda match: int(match[1], 0)):
        self.of = defaultdict(list)
        for e in all_events:
            if e.name == name and (match := re.search(pattern, e.text)):
                self.of[key(match)].append(e.us)

    def next(self, key, us):
        """The first time from us on, or None."""
        return next((t for t in self.of.get(key, ()) if us <= t < us + SAME_FAULT_US), None)

    def last(self, key, us):
        return next((t for t in reversed(self.of.get(key, ())) if us - SAME_FAULT_US < t <= us), None)


def faults(variant, source, destination):
    """The stamps, in us, by name, of each fault with all stages."""
    handled = Times(source, "migrate_handle_rp_req_pages", rf"in (?:{BLOCK}|\(null\)) at (0x\w+) ")
    taken = Times(source, "postcopy_preempt_send_host_page", rf"ramblock {BLOCK} offset (0x\w+)")
    header = Times(destination, "ram_load_postcopy_loop", rf"chan={PREEMPT_CHANNEL} addr=(0x\w+) flags=(0x\w+)",
                   lambda m: int(m[1], 0) if int(m[2], 0) & HAS_DATA else -1)
    exits = Times(destination, "kvm_exit_on_missing", r"cpu_index (\d+)")
    woken = Times(destination, "postcopy_fault_exit_end", r"cpu (\d+) placed 1")
    base: int | None = None
    begins: list[tuple[int, int | None, int]]   # us, vCPU, offset
    if variant == "stock":
        placed = Times(destination, "postcopy_place_page", r"host=(0x\w+)")
        of_stock = [(e.us, int(m[2], 0), int(m[1], 0)) for e in destination
                    if e.name == "postcopy_ram_fault_thread_request"
                    and (m := re.search(rf"HVA=(0x\w+) rb={BLOCK} offset=(0x\w+)", e.text))]
        base = of_stock[0][2] - of_stock[0][1]
        begins = [(us, None, offset) for us, offset, _ in of_stock]
    else:
        placed = Times(destination, "postcopy_place", rf"{BLOCK} (0x\w+) ")
        begins = [(e.us, int(m[1]) if m[1] else None, int(m[2], 0)) for e in destination
                  if e.name in ("postcopy_fault_uffd", "postcopy_fault_exit")
                  and (m := re.search(rf"(?:cpu (\d+) )?{BLOCK} (0x\w+) state {ASK}$", e.text))]
    for us, cpu, offset in begins:
        f = {"known": us, "handled": handled.next(offset, us), "taken": taken.next(offset >> PAGE_BITS, us),
             "header": header.next(offset, us),
             "placed": placed.next(offset if base is None else base + offset & ~((1 << PAGE_BITS) - 1), us)}
        if cpu is not None:
            f |= {"exit": exits.last(cpu, us), "woken": woken.next(cpu, us)}
        if None not in f.values():
            yield f


def migrate(lab, variant, options, traced):
    """(faults, latencies of the guest)"""
    qemu, exits, _ = postcopy.VARIANTS[variant]
    logs = [f"{lab.tmp}/{side}.events" for side in ("source", "destination")]
    names = DESTINATION["fork" if qemu == FORK else "stock"]
    words = [trace_options(n, log) if traced else [] for n, log in zip((SOURCE, names), logs, strict=True)]
    uri = postcopy.uri_of(lab, "unix")
    with Pair(lab, exits=exits, source=qemu, destination=qemu, cpus=options.cpus, memory_mb=options.memory,
              pattern="disjoint", seed=1, traced=False, source_options=words[0], destination_options=words[1]) as pair:
        src, dst = pair.sides
        dst.cmd("migrate-incoming", uri=uri)
        pair.postcopy(uri)
        dst.wait_event("end")
        pair.finish(limited=True)
        guest = postcopy.latencies(pair, dst.report(), src.report().the("boot")["tsc_khz"])
        found = []
        if traced:
            source, destination = (events(lab.read_file(log).decode()) for log in logs)
            found = list(faults(variant, source, destination))
            lab.run("rm " + " ".join(logs), check=True)
    return found, guest


def median_of(found, begin, end):
    spans = [f[end] - f[begin] for f in found if begin in f and end in f]
    return statistics.median(spans) if spans else None


def figures(runs):
    """Figures of one variant's runs, with and without trace."""
    traced, untraced = (runs[way] for way in TRACED)
    found = [f for faults_of, _ in traced for f in faults_of]
    result = {"faults_count": len(found),
              "stages_p50_us": {stage: median_of(found, *of) for stage, of in STAGES.items()},
              "traced_touch_p50_us": statistics.median(guest["latency_p50_us"] for _, guest in traced),
              "touch_p50_us": statistics.median(guest["latency_p50_us"] for _, guest in untraced),
              "present_touch_p50_us": statistics.median(guest["present_touch_p50_us"] for _, guest in untraced)}
    whole = statistics.median(max(f.values()) - min(f.values()) for f in found)
    # Events of one fault follow each other, so that a touch takes longer by the cost of all of them.
    event_us = max(0.0, result["traced_touch_p50_us"] - result["touch_p50_us"]) / len(found[0])
    return result | {"in_qemu_p50_us": whole, "outside_of_qemu_p50_us": result["traced_touch_p50_us"] - whole,
                     "trace_event_us": event_us}


def show(results):
    print("| median, us | " + " | ".join(results) + " |\n| --- " + "| ---: " * len(results) + "|")
    rows = {stage: [r["stages_p50_us"][stage] for r in results.values()] for stage in STAGES}
    rows |= {label: [r[key] for r in results.values()] for label, key in ROWS.items()}
    for label, values in rows.items():
        print(f"| {label} | " + " | ".join("" if v is None else f"{v:.0f}" for v in values) + " |")


def run(options):
    say("boot the lab")
    with Lab(name="breakdown", icount=options.icount) as lab:
        bench.describe(lab)
        runs = bench.in_turn(postcopy.VARIANTS, TRACED, options.rounds,
                             lambda variant, way: migrate(lab, variant, options, TRACED[way]))
    results = {variant: figures(of) for variant, of in runs.items()}
    text = (f"{options.cpus} vCPUs, {options.memory} MiB, anonymous memory, postcopy-preempt, disjoint load, "
            f"unix, {options.rounds} rounds. Medians do not add up.\n\n" + bench.printed(show, results))
    bench.write(options, {"results": results},
                f"Where the time of one demand fault goes: {options.cpus} vCPUs" + bench.icount_title(options), text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 3, "1 round", "breakdown")
    bench.add_icount(parser)
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, default=32, metavar="MIB", help="of the guest (32)")
    bench.main(run, bench.parse(parser, rounds=1))
