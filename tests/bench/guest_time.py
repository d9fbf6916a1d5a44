# SPDX-License-Identifier: GPL-2.0-or-later
"""The effect of migrations on a guest's clocks in the lab: stock QEMU, and the fork with both policies.

First one migration each, with a blackout that is held for some seconds: the time that it adds to the TSC and to the
kvmclock beside the time that passes, which is 0 for a clock that continues and minus the blackout for one that stands
still; the movement of the kvmclock against the TSC; and whether a clock goes backwards. Then many migrations in a row,
and how long a guest of one vCPU and one of 64 wait for their clocks. Prints a table, and writes
build/reports/guest-time.json.
"""
import time

from tests.bench import bench
from tests.lab.cli import say
from tests.lab.clocks import ClockPair, backwards, clocks, kvmclock_ns, numbers, offsets, signed, took_us
from tests.lab.lab import Lab, tsc_khz
from tests.lab.pair import FORK, STOCK, until

CPUS = 4
# Name: QEMU, policy
VARIANTS = {"stock": (STOCK, None), "fork stopped": (FORK, "stopped"), "fork continuous": (FORK, "continuous")}
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
        "backwards_ticks_or_ns": jump.backwards,
    }


def in_a_row(lab, variant, number):
    """Migrate one guest this number of times, each time to a new QEMU."""
    qemu, policy = VARIANTS[variant]
    hops = []
    with ClockPair(lab, source=qemu, destination=qemu, policy=policy, cpus=CPUS, capabilities=None) as pair:
        pair.source.wait_event("ready")
        first_offsets = offsets(pair.source)
        first = clocks(pair.source, CPUS, 0)
        for n in range(1, number + 1):
            if n > 1:
                pair.next()
            pair.source.cmd("migrate", uri=pair.listen())
            pair.wait_completed()
            events = clocks(pair.destination, CPUS, n)
            now = offsets(pair.destination)
            hops.append({
                "offsets_differ_cycles": max(now) - min(now),
                "tsc_added_us": round(signed(now[0] - first_offsets[0]) * 1000 / tsc_khz(), 3),
                "kvmclock_against_tsc_ns": kvmclock_ns(events[0], events[0]["tsc"])
                - kvmclock_ns(first[0], events[0]["tsc"]),
                "backwards_ticks_or_ns": backwards(events),
            })
            if n % 10 == 0:
                say(f"{variant}: {n} migrations: {hops[-1]}")
    return hops


def waits(lab, cpus):
    """The time to read and to set all clocks of an idle guest, in the blackout."""
    with ClockPair(lab, policy="continuous", cpus=cpus, memory_mb=64, payload=IDLE, capabilities=()) as pair:
        time.sleep(3)
        pair.source.cmd("migrate", uri=pair.listen())
        pair.wait_completed()
        until(lambda: "guest_time_start" in dict(pair.destination.trace()), "the guest runs on the destination")
        return {"stop_us": took_us(pair.source, "guest_time_stop"),
                "start_us": took_us(pair.destination, "guest_time_start")}


def spread(values, unit):
    low, high = min(values), max(values)
    return f"{low:,.3f} {unit}" if low == high else f"{low:,.3f} ... {high:,.3f} {unit}"


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
        stop, start = (bench.spread([r[key] for r in rounds], "{:,.0f} us") for key in ("stop_us", "start_us"))
        print(f"\n{cpus} vCPUs: to read the clocks at the stop takes {stop}, to set them at the start {start}")


def run(options):
    report: bench.Figures = {"tsc_khz": tsc_khz(), "vcpus_count": CPUS, "held": {}, "in_a_row": {}}
    say("boot the lab")
    with Lab(name="guest-time") as lab:
        for variant in VARIANTS:
            say(f"{variant}: a blackout of {options.held} s")
            report["held"][variant] = [held(lab, variant, options.held, p) for p in (False, True)]
        for variant in VARIANTS:
            number = options.number if variant == "fork continuous" else min(options.number, 10)
            report["in_a_row"][variant] = in_a_row(lab, variant, number)
        [report["waits"]] = bench.in_turn(["vCPUs"], WAITING, options.rounds, lambda _, cpus: waits(lab, cpus)).values()
    bench.write(options, report, "Guest time: what migrations do to a guest's clocks", bench.printed(show, report))


if __name__ == "__main__":
    parser = bench.parser(__doc__, 9, "3 rounds, 5 in a row, blackouts of 1 s", "guest-time")
    parser.add_argument("--number", type=int, default=100,
                        help="migrations in a row with the fork's guest-time=continuous (100); 10 with the others")
    parser.add_argument("--held", type=int, default=3, metavar="S", help="seconds of the blackouts (3)")
    bench.main(run, bench.parse(parser, rounds=3, number=5, held=1))
