# SPDX-License-Identifier: GPL-2.0-or-later
"""The work of each thread of both QEMUs for one fault: processor time, wake-ups, system calls.

Measured in the midst of a post-copy migration of a guest whose vCPUs miss pages in random order, with a slow
background: in the lab, or with --host on this machine at its full speed, where exits need a KVM that has them, or
--exits. First a span without observers, then one under strace, which counts system calls and slows all threads.
Prints a table, and writes build/reports/NAME.json and .md.
"""
import re
import shutil
import statistics
from collections import Counter, defaultdict, namedtuple

from tests.bench import bench, postcopy
from tests.lab.cli import ProgramError
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
SPAN_S = 0.5            # of one measurement, at least
LEAST_REQUESTS = 300
LINE = re.compile(r"^/proc/(\d+)/task/(\d+)/(comm|schedstat|status):(.*)$", re.M)

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

    def span(self):
        """Requests per second, and {thread: Work} for one request, of SPAN_S, or of as long as LEAST_REQUESTS take."""
        first = last = self.sample()
        while last.at_s < first.at_s + SPAN_S or last.requests < first.requests + LEAST_REQUESTS:
            # By the clock of the QEMUs' machine, on which each sample takes time, too.
            self.pair.lab.run(f"sleep {SPAN_S}", check=True)
            last = self.sample()
            if self.pair.source.status() == "completed":
                raise ProgramError("post-copy was over before enough was measured: take more --memory")
        requests = last.requests - first.requests
        return requests / (last.at_s - first.at_s), {name: Work(*(
            (b - a) / requests for a, b in zip(first.work[name], last.work[name], strict=True))) for name in THREADS}

    def system_calls(self):
        """For a span(): {thread: {system call: how often, for one request}}"""
        lab, log = self.pair.lab, f"{self.pair.lab.tmp}/threads.strace"
        job = lab.job(f"exec strace -f -ttt -s 0 -e signal=none -o {log} "
                      + " ".join(f"-p {pid}" for pid in self.sides))
        until(lambda: job.output.count(" attached") >= len(self.sides) or not job.running, "strace")
        if not job.running:
            raise ProgramError(f"strace has ended:\n{job.output}")
        per_s, _ = self.span()
        lab.run("kill -INT $(pidof strace)", check=True)
        job.wait()
        calls = re.findall(r"^(\d+) +([\d.]+) (\w+)\(", lab.read_file(log).decode(errors="replace"), re.M)
        times_s = [float(at_s) for _, at_s, _ in calls]
        # strace began a little earlier than the span, and ended later.
        requests = per_s * (max(times_s) - min(times_s))
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for thread, _, name in calls:
            counts[self.names.get(thread, REST)][name] += 1
        return {of: {name: n / requests for name, n in by_name.most_common()} for of, by_name in counts.items()}


def measure(lab, options, variant):
    """Of threads of a post-copy migration that is under way."""
    qemu, exits, fetch = postcopy.VARIANTS[variant]
    uri = postcopy.uri_of(lab, "unix")
    wrapper = bench.wrapper(options.exits)
    with Pair(lab, exits=exits, source=qemu, destination=qemu, cpus=options.cpus, memory_mb=options.memory,
              pattern="disjoint", seed=1, zero=0, traced=False, fetch=fetch, wrapper=wrapper,
              source_wrapper=wrapper) as pair:
        pair.destination.cmd("migrate-incoming", uri=uri)
        pair.postcopy(uri, MIB // 8)
        threads = Threads(pair)
        until(lambda: threads.sample().requests > LEAST_REQUESTS, "page requests")
        per_s, work = threads.span()
        calls = threads.system_calls()
        # Requested pages are received without strace; the rest at once.
        pair.finish_fast()
    return {"requests_per_s": per_s, "work_us": {name: w.us for name, w in work.items()},
            "wakeup_count": {name: w.wakeups for name, w in work.items()}, "system_call_count": calls}


def middle(runs):
    """The medians of figures, by names, which some runs may lack: there, a figure is 0."""
    if not any(isinstance(run, dict) for run in runs):
        return statistics.median(run or 0 for run in runs)
    runs = [run or {} for run in runs]
    return {name: middle([run.get(name) for run in runs]) for name in sorted({name for run in runs for name in run})}


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


def run(options):
    strace = shutil.which("strace")
    if not strace:
        raise ProgramError("no strace: scripts/deps lab")
    place = bench.place(options, "threads", extra=[strace])
    names = postcopy.variants(place, options.fetch)
    with place as lab:
        bench.describe(lab)
        [runs] = bench.in_turn([options.cpus], names, options.rounds, lambda _, variant: measure(lab, options, variant),
                               "{} vCPUs".format).values()
    results = {variant: middle(of) for variant, of in runs.items()}
    text = (f"{options.cpus} vCPUs, {options.memory} MiB, anonymous memory, postcopy-preempt where there are no "
            f"channels, a unix socket; medians of {options.rounds} rounds. The vCPUs' time is the guest's, too.\n\n"
            + bench.printed(show, results))
    bench.write(options, {"runs": runs, "medians": results},
                f"What each thread does for a fault, {bench.place_title(options)}" + bench.icount_title(options), text)


if __name__ == "__main__":
    parser = bench.parser(__doc__, 3, "1 round")
    bench.add_place(parser)
    parser.add_argument("--cpus", type=int, default=4, help="vCPUs of the guest (4)")
    parser.add_argument("--memory", type=int, metavar="MIB",
                        help="of the guest (64; with --icount 256, with --host 1024)")
    parser.add_argument("--fetch", nargs="*", type=int, default=[4], metavar="N", help="fetch channels (4)")
    options = bench.parse(parser, rounds=1)
    options.memory = options.memory or (1024 if options.host else 256 if options.icount else 64)
    options.name = options.name or ("threads-host" if options.host else "threads")
    bench.main(run, options)
