# SPDX-License-Identifier: GPL-2.0-or-later
"""The work of each thread of both QEMUs for one fault: processor time, wake-ups, system calls.

Measured in the midst of a post-copy migration of a guest whose vCPUs miss pages in random order, with a slow
background: in the lab, or with --host on this machine at its full speed, where exits need a KVM that has them, or
--exits. First a span without observers, then one under strace, which counts system calls and slows all threads.
With --locks a third one, in which QEMU also traces its mutexes: how often each is taken, and the system calls under
it. Prints a table, and writes build/reports/NAME.json and .md.
"""
import contextlib
import re
import shutil
import statistics
from collections import Counter, defaultdict, namedtuple
from typing import Any

from tests.bench import bench, postcopy
from tests.lab import cli
from tests.lab.cli import ProgramError, say
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.pair import MIB, Pair, until

# Threads by their work: (side, start of its name).
THREADS = {
    "fault thread": ("destination", "mig/dst/fault"),
    "return path": ("source", "mig/src/return"),
    "preempt thread": ("destination", "mig/dst/preempt"),
    "source's fetch threads": ("source", "mig/src/fetch"),
    "destination's fetch threads": ("destination", "mig/dst/fetch"),
    "vCPUs": ("destination", "CPU "),
    "all others": (None, ""),
}
REST = "all others"
LEAST_REQUESTS = 300
LINE = re.compile(r"^/proc/(\d+)/task/(\d+)/(comm|schedstat|status):(.*)$", re.M)
STRACE_LOG = "threads.strace"
# QEMU's trace events qemu_mutex_locked and qemu_mutex_unlock, in strace's log
MUTEX = re.compile(r'"qemu_mutex_(locked|unlock) \w+ mutex (0x\w+) \((?:\S*src/)?(\S+)\)')
MUTEX_EVENTS = "qemu_mutex_locked", "qemu_mutex_unlock"

# The work of a thread of THREADS so far, or for a request.
Work = namedtuple("Work", "us wakeups")
# The time, by the clock of the QEMUs' machine, page requests so far, {thread: Work}.
Sample = namedtuple("Sample", "at_s requests work")


class Threads:
    """The threads of both QEMUs. One process reads all files, as each process takes time."""

    def __init__(self, pair):
        self.pair = pair
        self.sides = {pair.lab.run(f"cat {side.pidfile}", check=True).output.strip(): side.name for side in pair.sides}
        tasks = [f"/proc/{pid}/task/*" for pid in self.sides]
        files = " ".join(f"{task}/{name}" for name in ("comm", "schedstat") for task in tasks)
        self.look = (f"cat /proc/uptime; grep -H . {files}; "
                     f"grep -H ^voluntary_ctxt {' '.join(f'{task}/status' for task in tasks)}")
        # By thread ID, also of threads that have ended
        self.names: dict[str, str] = {}

    def sample(self):
        requests = self.pair.source.cmd("query-migrate")["ram"]["postcopy-requests"]
        uptime, looked = self.pair.lab.run(self.look).output.split("\n", 1)
        us, wakeups = dict.fromkeys(THREADS, 0.0), dict.fromkeys(THREADS, 0)
        for pid, thread, name, text in LINE.findall(looked):
            if name == "comm":
                self.names[thread] = next((of for of, (side, start) in THREADS.items()
                                           if side == self.sides[pid] and text.startswith(start)), REST)
                continue
            of = self.names.get(thread, REST)
            if name == "schedstat":
                us[of] += int(text.split()[0]) / 1e3    # from ns
            else:
                wakeups[of] += int(text.split()[1])
        return Sample(float(uptime.split()[0]), requests, {name: Work(us[name], wakeups[name]) for name in THREADS})

    def span(self, s):
        """The first and the last Sample of so many seconds, or of as many as LEAST_REQUESTS take."""
        first = last = self.sample()
        while last.at_s < first.at_s + s or last.requests < first.requests + LEAST_REQUESTS:
            # By the clock of the QEMUs' machine, on which each sample takes time, too.
            self.pair.lab.run(f"sleep {s}", check=True)
            last = self.sample()
            if self.pair.source.status() == "completed":
                raise ProgramError("post-copy was over before enough was measured: take more --memory")
        return first, last

    def strace(self, s):
        """For a span(): the number of requests, and [(thread, system call, its arguments)] in order."""
        lab, log = self.pair.lab, f"{self.pair.lab.tmp}/{STRACE_LOG}"
        job = lab.job(f"exec strace -f -ttt -s 160 -e signal=none -o {log} "
                      + " ".join(f"-p {pid}" for pid in self.sides))
        until(lambda: job.output.count(" attached") >= len(self.sides) or not job.running, "strace")
        if not job.running:
            raise ProgramError(f"strace has ended:\n{job.output}")
        per_s, _ = rates(*self.span(s))
        lab.run("kill -INT $(pidof strace)", check=True)
        job.wait()
        calls = re.findall(r"^(\d+) +([\d.]+) (\w+)\((.*)", lab.read_file(log).decode(errors="replace"), re.M)
        times_s = [float(at_s) for _, at_s, *_ in calls]
        # strace began a little earlier than the span, and ended later.
        return per_s * (max(times_s) - min(times_s)), [(thread, name, text) for thread, _, name, text in calls]

    def system_calls(self, s):
        """For a span(): {thread: {system call: how often, for one request}}"""
        requests, calls = self.strace(s)
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for thread, name, _ in calls:
            counts[self.names.get(thread, REST)][name] += 1
        return {of: {name: n / requests for name, n in by_name.most_common()} for of, by_name in counts.items()}

    def locks(self, s):
        """For a span(): {mutex: {"taken", or system call under it: how often, for one request}}. Places where a mutex
        is taken, and their threads, identify it: the trace of a QEMU_LOCK_GUARD has no useful line."""
        for side in self.pair.sides:
            for event in MUTEX_EVENTS:
                side.hmp(f"trace-event {event} on")
        requests, calls = self.strace(s)
        for side in self.pair.sides:
            for event in MUTEX_EVENTS:
                side.hmp(f"trace-event {event} off")
        held: defaultdict[str, list[str]] = defaultdict(list)
        where: defaultdict[str, set[str]] = defaultdict(set)
        takers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        under: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for thread, name, text in calls:
            if traced := MUTEX.search(text):
                what, mutex, place = traced.groups()
                if what == "locked":
                    held[thread].append(mutex)
                    where[mutex].add("QEMU_LOCK_GUARD" if "lockable.h" in place else place)
                    takers[mutex][self.names.get(thread, REST)] += 1
                elif mutex in held[thread]:
                    held[thread].remove(mutex)
            elif held[thread]:
                under[held[thread][-1]][name] += 1
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for mutex, by in takers.items():
            who = sorted(name for name, n in by.items() if n > by.total() / 10)
            of = counts[f"{', '.join(sorted(where[mutex])[:3])} | {', '.join(who)}"]
            of["taken"] += by.total()
            of.update(under[mutex])
        return {mutex: {name: n / requests for name, n in of.items()} for mutex, of in counts.items()}


def rates(first, last):
    """Requests per second, and {thread: Work} for one request."""
    requests = last.requests - first.requests
    return requests / (last.at_s - first.at_s), {name: Work(*(
        (b - a) / requests for a, b in zip(first.work[name], last.work[name], strict=True))) for name in THREADS}


@contextlib.contextmanager
def midst(lab, variant, options):
    """Threads of a post-copy migration that is under way."""
    qemu, exits, fetch = postcopy.VARIANTS[variant]
    uri = postcopy.uri_of(lab, "unix")
    wrapper = bench.wrapper(options.exits)
    # One file per thread, so that threads do not wait for each other to write.
    logs = ("-d", "tid", "-D", f"{lab.tmp}/mutexes.%d") if options.locks else ()
    with Pair(lab, exits=exits, source=qemu, destination=qemu, cpus=options.cpus, memory_mb=options.memory,
              pattern="disjoint", seed=1, zero=0, traced=False, fetch=fetch,
              source_options=logs, destination_options=logs, wrapper=wrapper, source_wrapper=wrapper) as pair:
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=MIB // 8)
        pair.destination.cmd("migrate-incoming", uri=uri)
        pair.start(uri)
        pair.source.cmd("migrate-start-postcopy")
        threads = Threads(pair)
        until(lambda: threads.sample().requests > LEAST_REQUESTS, "page requests")
        yield threads


def measure(place, variant, options):
    with midst(place, variant, options) as threads:
        per_s, work = rates(*threads.span(options.span))
        calls = threads.system_calls(options.span)
        locks = threads.locks(options.span) if options.locks else {}
        # Requested pages are received without strace; the rest at once.
        threads.pair.finish_fast()
    return {"requests_per_s": per_s, "work_us": {name: w.us for name, w in work.items()},
            "wakeup_count": {name: w.wakeups for name, w in work.items()}, "system_call_count": calls,
            "lock_count": locks}


def middle(runs):
    """Medians of each figure."""
    def of(*keys: str) -> float:
        values: list[Any] = list(runs)
        for key in keys:
            values = [v.get(key, 0) for v in values]
        return statistics.median(values)
    def all_of(key):
        """Two levels of counts, some of which are missing in some runs."""
        names = sorted({(name, what) for r in runs for name, counts in r[key].items() for what in counts})
        return {name: {what: statistics.median(r[key].get(name, {}).get(what, 0) for r in runs)
                       for of, what in names if of == name} for name, _ in names}
    return {"requests_per_s": of("requests_per_s"),
            **{key: {name: of(key, name) for name in THREADS} for key in ("work_us", "wakeup_count")},
            **{key: all_of(key) for key in ("system_call_count", "lock_count")}}


def show(results):
    print("| variant | faults/s | thread | processor time (us) | wake-ups | system calls | which |\n"
          "| --- | ---: | --- | ---: | ---: | ---: | --- |")
    for variant, r in results.items():
        for name in [*THREADS, "**both QEMUs**"]:
            names = [name] if name in THREADS else list(THREADS)
            us, wakeups = (sum(r[key][n] for n in names) for key in ("work_us", "wakeup_count"))
            calls = sum((Counter(r["system_call_count"].get(n, {})) for n in names), Counter())
            if not us:
                continue
            which = ", ".join(f"{call} {n:.2f}" for call, n in calls.most_common(5) if n >= 0.05)
            print(f"| {variant} | {r['requests_per_s']:.0f} | {name} | {us:.1f} | {wakeups:.2f} "
                  f"| {sum(calls.values()):.2f} | {which} |")
    if not any(r["lock_count"] for r in results.values()):
        return
    print("\n| variant | mutex taken at | by | for a fault | system calls under it |\n"
          "| --- | --- | --- | ---: | --- |")
    for variant, r in results.items():
        under = {mutex: Counter(of) for mutex, of in r["lock_count"].items()}
        taken = {mutex: of.pop("taken", 0) for mutex, of in under.items()}
        print(f"| {variant} | **all** | | {sum(taken.values()):.2f} "
              f"| {sum(of.total() for of in under.values()):.2f} |")
        for mutex in sorted(taken, key=lambda mutex: -taken[mutex]):
            which = ", ".join(f"{call} {n:.2f}" for call, n in under[mutex].most_common(5) if n >= 0.05)
            if taken[mutex] >= 0.1 or which:
                print(f"| {variant} | {mutex} | {taken[mutex]:.2f} | {which} |")


def run(options):
    strace = shutil.which("strace")
    if not strace:
        raise ProgramError("no strace: scripts/deps lab")
    about = bench.about()
    place = (Host(options.accel, exits=options.exits) if options.host
             else Lab(name="threads", extra=[strace], icount=options.icount))
    on = "on" if place.exit_on_missing else "off"
    postcopy.VARIANTS.update({f"{n} channels": (postcopy.FORK, on, n) for n in options.fetch})
    runs: dict[str, list[bench.Figures]] = {name: [] for name in postcopy.VARIANTS
                                            if name != "exits on" or place.exit_on_missing}
    with place as lab:
        about |= postcopy.machine(lab)
        for n in range(options.rounds):
            for variant, of in runs.items():
                say(f"round {n + 1} of {options.rounds}: {variant}")
                of.append(measure(lab, variant, options))
    results = {variant: middle(of) for variant, of in runs.items()}
    text = (f"{options.cpus} vCPUs, {options.memory} MiB, anonymous memory, postcopy-preempt where there are no "
            f"channels, a unix socket; medians of {options.rounds} rounds. The vCPUs' time is the guest's, too.\n\n"
            + bench.printed(show, results))
    bench.write(options.name, {"about": about, "settings": {"icount": options.icount,
        "vcpus_count": options.cpus, "memory_mib": options.memory, "rounds_count": options.rounds,
        "span_s": options.span, "exits_by_tcg": options.exits, "accelerator": " ".join(lab.qemu_words)},
        "runs": runs, "medians": results},
        "What each thread does for a fault, "
        f"{'on this host' if options.host else 'in the lab'}{', exits by TCG' if options.exits else ''}"
        + bench.icount_title(options), text)


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--rounds", type=int, help="(3)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--host", action="store_true", help="on this machine, not in the lab")
    bench.add_icount(place)
    parser.add_argument("--accel", choices=("kvm", "tcg"), help="with --host (kvm, or else tcg)")
    bench.add_exits(parser)
    parser.add_argument("--locks", action="store_true", help="also the mutexes of QEMU, by its trace")
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, metavar="MIB",
                        help="of the guest (64; with --icount 256, with --host 1024)")
    parser.add_argument("--fetch", nargs="*", type=int, default=[4], metavar="N", help="fetch channels (4)")
    parser.add_argument("--span", type=float, default=0.5, metavar="S", help="time of one measurement (0.5)")
    parser.add_argument("--name", help="of the report (threads, threads-host)")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.memory = options.memory or (1024 if options.host else 256 if options.icount else 64)
    if options.exits and (not options.host or options.accel == "kvm"):
        parser.error("--exits is for --host with TCG")
    options.name = options.name or ("threads-host" if options.host else "threads")
    cli.main("bench", run, options)


if __name__ == "__main__":
    main()
