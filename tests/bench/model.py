# SPDX-License-Identifier: GPL-2.0-or-later
"""How post-copy scales with vCPUs: a model of its queues (queues.py), fed and checked by measurements in the lab.

Measured, for some numbers of vCPUs and each variant, in the midst of a post-copy migration: page requests per
second, and the processor time of each thread per request. The times at one vCPU, where each thread sleeps before each
job, and at the most, where it seldom does, feed the model; so does the time that passes at one vCPU while no thread
works. The rates beyond one vCPU are the model's, and are compared with those measured. For all numbers of fetch
channels, the times are those of the fewest, whose threads are the busiest. A vCPU that reads a channel by itself is
the only one that does meanwhile: for that the model takes what the preempt thread takes without channels, which does
the same for a page. What one more thread that waits in userfaultfd costs a wake-up comes from
build/tests/demand-paging, with few and many vCPUs.

Then the model for many vCPUs, on a host with a processor for each of them. Prints tables, and writes
build/reports/model.json, .md and a picture.
"""
import json
import statistics

from tests.bench import bench, pictures, postcopy, threads
from tests.bench.bench import Figures
from tests.bench.queues import Step, simulate
from tests.bench.threads import THREADS
from tests.lab import cli
from tests.lab.cli import say
from tests.lab.lab import Lab

FETCH = ("source's fetch threads", "destination's fetch threads")
PREDICTED = (64, 256)


def measure(lab, variant, vcpus, options):
    """{"requests_per_s", "work_us": {thread: per request}}"""
    with threads.midst(lab, variant, vcpus, options.memory) as of:
        per_s, work = threads.rates(*of.span(options.window))
        of.pair.finish()
    return {"requests_per_s": per_s, "work_us": {name: w.us for name, w in work.items()}}


def waiters_cost_us(lab, rounds):
    """What a wake-up costs more for each thread that waits in userfaultfd; of demand-paging's reader."""
    few, many = 16, 64
    reader: dict[int, list[float]] = {n: [] for n in (few, many)}
    for _ in range(rounds):
        for n in reader:
            figures = json.loads(lab.run(f"build/tests/demand-paging -v {n} -b 1", check=True).output)
            reader[n].append(figures["reader_threads_cpu_s"] / figures["touch_count"] * 1e6)
    return (statistics.median(reader[many]) - statistics.median(reader[few])) / (many - few)


def exits(variant):
    return postcopy.VARIANTS[variant][1] == "on"


def in_turn(work_us, without_us):
    """Times of threads with channels, of which what the vCPUs read is the channel's; without_us: without channels."""
    read_us = max(0.0, without_us["preempt thread"] - work_us[FETCH[1]])
    return work_us | {FETCH[1]: work_us[FETCH[1]] + read_us, "vCPUs": work_us["vCPUs"] - read_us}


def cycle_of(variant, alone, together, wakeup_us):
    """Steps of one fault; alone, together: processor time of each thread per fault, in us."""
    fetch = postcopy.VARIANTS[variant][2]

    def step(name, share=1.0, more_us=0.0):
        return Step(None if name == "vCPUs" else name, alone[name] * share + more_us, together[name] * share + more_us,
                    max(1, fetch))
    sends, places = FETCH if fetch else ("return path", "preempt thread")
    # Half of a vCPU's work comes before its wait.
    return [step("vCPUs", 0.5), *(step("fault thread") for _ in range(not exits(variant))), step(sends),
            step(places, 1, wakeup_us), step("vCPUs", 0.5)]


def servers(variant):
    return sum(step.threads for step in cycle_of(variant, dict.fromkeys(THREADS, 0), dict.fromkeys(THREADS, 0), 0)
               if step.server)


def fitted(variant, measured):
    """(processor times alone, together, time of a hand-over) of the rates and times that were measured."""
    one, most = measured[min(measured)], measured[max(measured)]
    steps = cycle_of(variant, one["work_us"], one["work_us"], 0)
    idle_us = 1e6 / one["requests_per_s"] - sum(step.slept_us for step in steps)
    return one["work_us"], most["work_us"], max(0.0, idle_us) / len(steps)


def model(variant, vcpus, fit, waiter_us, processors):
    alone, together, wake_us = fit
    # Who places a page by userfaultfd wakes its waiters, and walks past all others. Exits do not wait there.
    walk_us = 0.0 if exits(variant) else waiter_us * vcpus
    return simulate(cycle_of(variant, alone, together, walk_us), vcpus, processors, wake_us)


def evaluate(measured, waiter_us, processors):
    """What the model says of each variant: {"hand_over_us", "points": [...]}"""
    result = {}
    fewest = next((variant for variant in measured if postcopy.VARIANTS[variant][2]), None)
    for variant, of in measured.items():
        if postcopy.VARIANTS[variant][2]:
            fit = fitted(variant, {n: m | {"work_us": in_turn(m["work_us"], measured["exits on"][n]["work_us"])}
                                   for n, m in measured[fewest].items()})
        else:
            fit = fitted(variant, of)
        points = []
        for vcpus in [*of, *PREDICTED]:
            told = vcpus in of
            there = processors if told else vcpus + servers(variant)
            m = model(variant, vcpus, fit, waiter_us, there)
            busiest = max(m.busy_share, key=m.busy_share.get)
            points.append({"vcpus_count": vcpus, "processors_count": there,
                           "model_per_s": m.faults_per_s, "model_fault_us": m.span_us, "busiest": busiest,
                           "busiest_share": m.busy_share[busiest],
                           "measured_per_s": of[vcpus]["requests_per_s"] if told else None,
                           "error": m.faults_per_s / of[vcpus]["requests_per_s"] - 1 if told else None})
        result[variant] = {"hand_over_us": fit[2], "points": points}
    return result


def show(measured, told, waiter_us):
    print("Processor time per fault, us:\n")
    print("| variant | vCPUs | " + " | ".join(THREADS) + " |\n| --- | ---: " + "| ---: " * len(THREADS) + "|")
    for variant, of in measured.items():
        for vcpus, m in of.items():
            print(f"| {variant} | {vcpus} | " + " | ".join(f"{m['work_us'][name]:.0f}" for name in THREADS) + " |")
    print(f"\nEach further waiter in userfaultfd costs a wake-up {waiter_us:.2f} us.\n")
    print("| variant | vCPUs | processors | faults/s, measured | model | error | a fault takes (us) "
          "| busiest server |\n"
          "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for variant, of in told.items():
        for p in of["points"]:
            measured_per_s, error = ("", "") if p["measured_per_s"] is None else (
                f"{p['measured_per_s']:.0f}", f"{100 * p['error']:+.0f} %")
            print(f"| {variant} | {p['vcpus_count']} | {p['processors_count']} | {measured_per_s} "
                  f"| {p['model_per_s']:.0f} | {error} | {p['model_fault_us']:.0f} "
                  f"| {p['busiest']}, {p['busiest_share']:.0%} |")
    errors = [abs(p["error"]) for of in told.values() for p in of["points"] if p["error"] is not None
              and p["vcpus_count"] > 1]
    print(f"\nError of the model beyond one vCPU: mean {statistics.mean(errors):.0%}, worst {max(errors):.0%}.")
    for n in PREDICTED:
        last = {v: next(p for p in of["points"] if p["vcpus_count"] == n) for v, of in told.items()}
        for variant, p in last.items():
            if exits(variant):
                print(f"At {n} vCPUs, {variant}: {p['model_per_s'] / last['stock']['model_per_s']:.1f} x stock; "
                      f"the next bottleneck: {p['busiest']}, {p['busiest_share']:.0%} busy.")


def run(options):
    about = bench.about()
    postcopy.VARIANTS.update({f"{n} channels": (postcopy.FORK, "on", n) for n in sorted(options.fetch)})
    measured: dict[str, dict[int, list[Figures]]] = {
        variant: {n: [] for n in options.cpus} for variant in postcopy.VARIANTS}
    say("boot the lab")
    with Lab(name="model", icount=options.icount) as lab:
        about |= postcopy.machine(lab)
        for n in range(options.rounds):
            for vcpus in options.cpus:
                for variant, of in measured.items():
                    say(f"round {n + 1} of {options.rounds}: {variant}, {vcpus} vCPUs")
                    of[vcpus].append(measure(lab, variant, vcpus, options))
        say("waiters of userfaultfd")
        waiter_us = max(0.0, waiters_cost_us(lab, 5))
        processors = lab.processors
    middle = {variant: {vcpus: {
        "requests_per_s": statistics.median(r["requests_per_s"] for r in runs),
        "work_us": {name: statistics.median(r["work_us"][name] for r in runs) for name in THREADS},
    } for vcpus, runs in of.items()} for variant, of in measured.items()}
    told = evaluate(middle, waiter_us, processors)
    pictures.rates("model", "Post-copy faults per second: measured in the lab, and by the model", {
        f"{processors} processors": {
            f"{variant}, {what}": {p["vcpus_count"]: [p[f"{what}_per_s"]] for p in told[variant]["points"]
                                   if p["error"] is not None}
            for variant in told if variant != "exits off" for what in ("measured", "model")},
        "as many processors as vCPUs": {
            variant: {p["vcpus_count"]: [p["model_per_s"]] for p in told[variant]["points"] if p["error"] is None}
            for variant in told}}, "faults/s", dashed={*told, *(f"{variant}, model" for variant in told)})
    text = (f"{options.memory} MiB of guest, anonymous memory, postcopy-preempt, disjoint load, a unix socket; "
            f"{options.rounds} rounds.\n\n" + bench.printed(show, middle, told, waiter_us))
    bench.write("model", {"about": about, "settings": {"icount": options.icount, "memory_mib": options.memory,
                                                       "rounds_count": options.rounds,
                                                       "fetch_channels_counts": options.fetch,
                                                       "window_s": options.window},
                          "waiter_us": waiter_us, "runs": measured, "model": told},
                "Beyond this machine: a model of the queues" + bench.icount_title(options), text,
                [("model", "rates measured and by the model")])


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--rounds", type=int, help="(3; with --icount 1)")
    bench.add_icount(parser)
    parser.add_argument("--cpus", nargs="+", type=int, default=[1, 2, 4, 8], help="vCPUs to measure (1 2 4 8)")
    parser.add_argument("--fetch", nargs="*", type=int, default=[1, 2, 4, 8], metavar="N",
                        help="fetch channels, with exits on (1 2 4 8)")
    parser.add_argument("--memory", type=int, metavar="MIB", help="of the guest (48; with --icount 128)")
    parser.add_argument("--window", type=float, metavar="S", help="time of one measurement (0.8; with --icount 0.5)")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick or options.icount else 3)
    # Faults take less time by instructions.
    options.memory = options.memory or (128 if options.icount else 48)
    options.window = options.window or (0.5 if options.icount else 0.8)
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
