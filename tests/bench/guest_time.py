# SPDX-License-Identifier: GPL-2.0-or-later
"""The effect of migrations on a guest's clocks in the lab: stock QEMU, and the fork with both policies.

First one migration each, with a blackout that is held for some seconds: the time that it adds to the TSC and to the
kvmclock beside the time that passes, which is 0 for a clock that continues and minus the blackout for one that stands
still; the movement of the kvmclock against the TSC; and whether a clock goes backwards. Then many migrations in a row,
and how long a guest of one vCPU and one of 64 wait for their clocks. Prints a table, and writes
build/reports/guest-time.json.
"""
import statistics
import time

from tests.bench import bench
from tests.lab import cli
from tests.lab.cli import say
from tests.lab.clocks import (
    CLOCK,
    ClockPair,
    backwards,
    clocks,
    kvmclock_ns,
    numbers,
    offsets,
    set_host_clock,
    signed,
)
from tests.lab.lab import Lab, tsc_khz
from tests.lab.pair import FORK, STOCK, Pair, Side, until
from tests.lab.text import search

CPUS = 4
# Name: QEMU, policy
VARIANTS = {"stock": (STOCK, None), "fork stopped": (FORK, "stopped"), "fork continuous": (FORK, "continuous")}
TSC_STABLE = 1
# vCPUs of guests that wait for their clocks, and firmware that has nothing to boot
WAITING = (1, 64)
IDLE = "/usr/share/seabios/bios-256k.bin"


def held(lab, variant, gap_s, postcopy):
    """One migration with a blackout that is held for gap_s."""
    qemu, policy = VARIANTS[variant]
    with ClockPair(lab, source=qemu, destination=qemu, policy=policy, cpus=CPUS,
                   destination_options=("-S",), capabilities=() if postcopy else None) as pair:
        jump = pair.moved(gap_s, postcopy)
        blackout = {}
        if qemu == FORK:
            stop = numbers(pair.source, "kvm_guest_time_stop")
            start = numbers(pair.destination, "kvm_guest_time_start")
            cycles = start["host TSC"] - stop["host TSC"]
            blackout = {"blackout_us": round(cycles * 1000 / tsc_khz(), 3),
                        "tsc_in_blackout_us": round(pair.passed_in_blackout_us(jump), 3),
                        "kvmclock_in_blackout_us": (start["kvmclock"] - stop["kvmclock"]) / 1000}
    return {
        "postcopy": postcopy,
        "held_s": gap_s,
        **blackout,
        "tsc_added_us": [round(us, 3) for us in jump.tsc_us],
        "kvmclock_added_us": [round(ns / 1000, 3) for ns in jump.kvmclock_ns],
        "kvmclock_against_tsc_ns": jump.relation_ns,
        "offsets_differ_cycles": jump.offsets_differ,
        "largest_step_s": round(jump.steps_s[1], 3),
        "backwards_ticks_or_ns": jump.backwards,
        "masterclock": all(e["pv_flags"] & TSC_STABLE for e in jump.after),
    }


def in_a_row(lab, variant, number):
    """Migrate one guest this number of times, each time to a new QEMU."""
    qemu, policy = VARIANTS[variant]
    words = ("-global", f"migration.guest-time={policy}") if policy else ()
    options = {"machine": "pc", "memory_mb": 32, "cpus": CPUS, "payload": CLOCK}
    sides = [Side(lab, "source", qemu, [*words], options)]
    hops = []
    try:
        sides[0].connect()
        sides[0].wait_event("ready")
        first_offsets = offsets(sides[0])
        first = clocks(sides[0], CPUS, 0)
        for n in range(1, number + 1):
            name = ("source", "destination")[n % 2]
            sides.append(Side(lab, name, qemu, [*words, "-incoming", "defer"], options))
            old, new = sides
            new.connect()
            old.set_capabilities("return-path")
            new.cmd("migrate-incoming", uri=f"tcp:127.0.0.1:{4010 + n % 2}")
            old.cmd("migrate", uri=f"tcp:127.0.0.1:{4010 + n % 2}")
            for side in sides:
                side.wait_status("completed")
            events = clocks(new, CPUS, n)
            now = offsets(new)
            sides.pop(0).end()
            hops.append({
                "offsets_differ_cycles": max(now) - min(now),
                "tsc_added_us": round(signed(now[0] - first_offsets[0]) * 1000 / tsc_khz(), 3),
                "kvmclock_against_tsc_ns": kvmclock_ns(events[0], events[0]["tsc"])
                - kvmclock_ns(first[0], events[0]["tsc"]),
                "masterclock": all(e["pv_flags"] & TSC_STABLE for e in events),
                "backwards_ticks_or_ns": backwards(events),
            })
            if n % 10 == 0:
                say(f"{variant}: {n} migrations: {hops[-1]}")
    finally:
        for side in sides:
            side.end()
    return hops


def took_us(side, event):
    return float(search(r"took (\d+) ns", dict(side.trace())[event])[1]) / 1000


def waits(lab, cpus):
    """The time to read and to set all clocks of an idle guest, in the blackout."""
    with Pair(lab, cpus=cpus, memory_mb=64, payload=IDLE, capabilities=("return-path",),
              destination_options=("-global", "migration.guest-time=continuous")) as pair:
        set_host_clock(lab)
        time.sleep(3)
        pair.source.cmd("migrate", uri=pair.listen())
        pair.wait_completed()
        until(lambda: "guest_time_start" in dict(pair.destination.trace()), "the guest runs on the destination")
        return {"stop_us": took_us(pair.source, "guest_time_stop"),
                "start_us": took_us(pair.destination, "guest_time_start")}


def spread(values, unit):
    low, high = min(values), max(values)
    return f"{low:,.3f} {unit}" if low == high else f"{low:,.3f} ... {high:,.3f} {unit}"


def spread_of(values):
    return f"{statistics.median(values):,.0f} us ({min(values):,.0f} ... {max(values):,.0f})"


def show(report):
    print("| | added to TSC | added to kvmclock | kvmclock against TSC | offsets differ | backwards "
          "| passed in the blackout |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for variant, runs in report["held"].items():
        for r in runs:
            passed = f"{r['tsc_in_blackout_us']:.0f} us of {r['blackout_us']:.0f}" if "blackout_us" in r else ""
            print(f"| {variant}, {'post-copy' if r['postcopy'] else 'pre-copy'}, {r['held_s']} s "
                  f"| {spread(r['tsc_added_us'], 'us')} | {spread(r['kvmclock_added_us'], 'us')} "
                  f"| {spread([ns / 1000 for ns in r['kvmclock_against_tsc_ns']], 'us')} "
                  f"| {r['offsets_differ_cycles']} | {r['backwards_ticks_or_ns']} "
                  f"| {passed} |")
    for variant, hops in report["in_a_row"].items():
        last = hops[-1]
        print(f"| {variant}, {len(hops)} in a row | {last['tsc_added_us']:,.3f} us | "
              f"{last['tsc_added_us'] + last['kvmclock_against_tsc_ns'] / 1000:,.3f} us | "
              f"{last['kvmclock_against_tsc_ns'] / 1000:,.3f} us "
              f"| {max(h['offsets_differ_cycles'] for h in hops)} "
              f"| {max(h['backwards_ticks_or_ns'] for h in hops)} | |")
    for cpus, rounds in report["waits"].items():
        print(f"\n{cpus} vCPUs: to read the clocks at the stop takes "
              f"{spread_of([r['stop_us'] for r in rounds])}, to set them at the start "
              f"{spread_of([r['start_us'] for r in rounds])}")


def run(options):
    report = {"about": bench.about(), "tsc_khz": tsc_khz(), "vcpus_count": CPUS, "held": {}, "in_a_row": {}}
    say("boot the lab")
    with Lab(name="guest-time") as lab:
        for variant in VARIANTS:
            say(f"{variant}: a blackout of {options.held} s")
            report["held"][variant] = [held(lab, variant, options.held, p) for p in (False, True)]
        for variant in VARIANTS:
            number = options.number if variant == "fork continuous" else min(options.number, 10)
            set_host_clock(lab)
            report["in_a_row"][variant] = in_a_row(lab, variant, number)
        report["waits"] = {cpus: [] for cpus in WAITING}
        for _ in range(options.waits):
            for cpus in WAITING:
                report["waits"][cpus].append(waits(lab, cpus))
    bench.write("guest-time", report, "Guest time: what migrations do to a guest's clocks",
                bench.printed(show, report))


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="5 in a row, blackouts of 1 s")
    parser.add_argument("--number", type=int,
                        help="migrations in a row with the fork's guest-time=continuous (100); 10 with the others")
    parser.add_argument("--held", type=int, metavar="S", help="seconds of the blackouts (3)")
    options = parser.parse_args()
    options.number = options.number or (5 if options.quick else 100)
    options.waits = 3 if options.quick else 9
    options.held = options.held or (1 if options.quick else 3)
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
