# SPDX-License-Identifier: GPL-2.0-or-later
"""Many post-copy migrations in the lab, each with a random guest, load, backend and trouble.

Source or destination are killed, connections cut and paused, at each phase (failures.py); background
snapshots are cancelled before, and memory is unplugged; the guest is stopped and continued. Both sides share its
disk, with or without an image lock. The guest never runs on both sides: the test tries to resume it on a source
without news of the destination; and a paused side reports how to recover. After each migration, the guest checks
all of its memory, if it is whole; if it is not, the remaining QEMU must report that. Prints seed and plan of each
migration, and writes build/reports/soak.json. A hang or another end stops the run, with the seed that repeats it and
a diagnosis.
"""
import contextlib
import functools
import json
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter

from qemu.qmp import ExecuteError

from tests.lab import cli, kvm_interface, tls
from tests.lab.backends import shared_disk
from tests.lab.failures import ACTIONS, HELD, PHASES, Ended, Failures, diagnosis, phase_wire
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.pair import MIB, Pair, until
from tests.lab.paths import REPORTS, ROOT
from tests.lab.qtest import Qtest, eject_memory

REPORT = REPORTS / "soak.json"
HUGEPAGES = 256
SMALL = ("anonymous", "memfd", "shm")
HUGE = ("hugetlb", "hugetlb-private")
DIMM_MB = 16
DIMM = ("-object", f"memory-backend-ram,id=dimm-ram,size={DIMM_MB}M", "-device", "pc-dimm,id=dimm,memdev=dimm-ram")
WHOLE = (Ended.DESTINATION, Ended.SOURCE)


def chosen(seed, fetch=False):
    """A migration's plan, only from the seed; fetch: with fetch channels in any case."""
    r = random.Random(seed)
    huge = r.random() < 0.3
    phase = r.choice([None, None, *PHASES, *PHASES])
    troubles = [{"action": r.choice(["pause", "cut"]), "after_s": r.uniform(0, 0.7)}
                for _ in range(r.choice([0, 1, 1, 2]))]
    c = {
        "seed": seed,
        "backend": r.choice(HUGE if huge else SMALL),
        "exits": r.choice(["on", "off"]),
        "preempt": r.random() < 0.5,
        "cpus": r.randint(1, 4),
        "pattern": r.choice(["disjoint", "shared"] + (["samehuge"] if huge else ["zerowrite"])),
        "mem_mib": 48 if huge else r.randrange(4, 21, 2),
        "zero_percent": r.choice([0, 12, 50, 90]),
        "bandwidth_bytes_per_s": r.choice([8, 64] if huge else [1, 4, 64]) * MIB,
        # Seconds until migrate_cancel
        "snapshot_cancelled_s": [r.uniform(0, 0.6) for _ in range(r.choice([0, 0, 0, 1, 2]))],
        "dimm": r.random() < 0.25,
        # Failures with a recovery, before the fault
        "troubles": troubles if phase in (None, "postcopy") else [],
        "phase": phase,
        "action": phase and r.choice(ACTIONS[phase]),
        # The position within the phase
        "part_ratio": r.random(),
        "delay_s": r.choice([0, r.uniform(0, 0.05), r.uniform(0, 0.7)]),
        # Whether data in flight are lost with a killed source
        "under_way_lost": r.random() < 0.5,
        # With half of the seeds, or with all
        "fetch_channels": r.choice(["auto", "auto", r.randint(1, 8), 0][:3 if fetch else 4]),
        # Both sides share the disk.
        "disk": r.choice([None, "locked", "locking-off"]),
        "stop": r.choice([None, "source", "destination"]),
        # The destination receives all, and the source receives nothing before the connection is cut.
        "mute": r.random() < 0.5 and phase in ("switch", "listen", "eof"),
        "here": r.random() < 0.5,
        "interface": r.choice(kvm_interface.ALL),
        # PhaseWire reads a stream of one connection.
        "tls": r.random() < 0.3 and phase not in HELD,
        "multifd_channels": r.choice([0, 0, 2, 4]) if phase not in HELD else 0,
    }
    # QEMU would also begin TLS in a snapshot's file.
    c["tls"] &= not c["snapshot_cancelled_s"]
    return c | {"action": "cut"} if c["mute"] else c


def on_this_machine(c):
    """By TCG, which needs no exits; many times as fast as the lab."""
    return c["here"] and c["exits"] == "off" and c["backend"] in SMALL


def told(c):
    """The plan in a line."""
    words = ["on this machine"] * on_this_machine(c)
    words += [c["backend"], c["pattern"], f"{c['mem_mib']} MiB", f"{c['cpus']} vCPUs", f"exits {c['exits']}",
              f"{c['fetch_channels']} fetch channels" if c["fetch_channels"] else
              "preempt" if c["preempt"] else "one channel"]
    words += [c["interface"]] * (c["exits"] == "on") + ["TLS"] * c["tls"]
    words += [f"{c['multifd_channels']} multifd channels"] * bool(c["multifd_channels"])
    words += [f"snapshot cancelled after {s:.2f} s" for s in c["snapshot_cancelled_s"]]
    words += ["DIMM unplugged"] * c["dimm"]
    words += [f"disk {c['disk']}"] * bool(c["disk"]) + [f"stopped on the {c['stop']}"] * bool(c["stop"])
    words += [f"{t['action']} after {t['after_s']:.2f} s, recovery" for t in c["troubles"]]
    if c["phase"]:
        part = f" at {c['part_ratio']:.2f}" if c["phase"] in ("switch", "eof") else ""
        lost = " and what is under way" if c["action"] == "kill-source" and c["under_way_lost"] else ""
        lost += " behind what the source does not hear of" * c["mute"]
        words.append(f"{c['action']}{lost} in phase {c['phase']}{part} after {c['delay_s']:.2f} s")
    return ", ".join(words)


def cancel_snapshots(pair, delays_s, note):
    """Each snapshot ends cancelled or completed, and leaves the source as it was."""
    source = pair.source
    if not delays_s:
        return
    source.wait_event("ready")
    source.set_capabilities(*pair.capabilities, state=False)
    source.set_capabilities("background-snapshot")
    for delay_s in delays_s:
        source.cmd("migrate", uri=f"file:{pair.lab.tmp}/snapshot")
        time.sleep(delay_s)
        before = source.status()
        source.cmd("migrate_cancel")
        status = until(lambda: (now := source.status()) in ("completed", "cancelled", "failed") and now,
                       "the snapshot's end")
        assert status == "completed" if before == "completed" else status != "failed", (before, status)
        assert source.cmd("query-status")["running"], f"the guest is stopped by a snapshot that was {status}"
        note(f"snapshot {status}")
    source.set_capabilities("background-snapshot", state=False)
    source.set_capabilities(*pair.capabilities)
    pair.lab.run(f"rm -f {pair.lab.tmp}/snapshot")


def refused(side, note):
    """Memory that takes part in the migration cannot be unplugged, and the error states that."""
    try:
        side.cmd("device_del", id="dimm")
    except ExecuteError as e:
        note(f"DIMM of the {side.name}: {e}")
        return True
    # The migration has ended before.
    assert side.status() in ("completed", "none"), f"a DIMM is unplugged while the {side.name} is {side.status()}"
    return False


def unplug(pair, asked, note):
    """Unplug the DIMM after the end; the test ejects it in place of the guest."""
    side = pair.destination
    if not asked:
        side.cmd("device_del", id="dimm")
    eject_memory(pair.lab, side.name)
    until(lambda: not side.cmd("query-memory-devices"), "the DIMM is unplugged")
    side.cmd("object-del", id="dimm-ram")
    side.check()
    note("DIMM unplugged")


def migrate(lab, c, note=lambda text: None):
    """Migrate by the plan c; returns (Ended, faults, recoveries, the survivor's message)."""
    huge = c["backend"] in HUGE
    memory_mb = 64 if huge else 32
    def dimm(side):
        return ["-m", f"{memory_mb}M,slots=1,maxmem=1G", *DIMM, *Qtest.arguments(lab, side)] if c["dimm"] else []

    disk = shared_disk(lab, "file.locking=off" * (c["disk"] == "locking-off"))[1] if c["disk"] else ()
    interface = kvm_interface.offered(lab, c["interface"]) if c["exits"] == "on" else contextlib.nullcontext()
    with interface, Pair(lab, exits=c["exits"], backend=c["backend"], cpus=c["cpus"],
              capabilities=("postcopy-preempt",) if c["preempt"] else (),
              memory_mb=memory_mb, pattern=c["pattern"], mem=c["mem_mib"], fetch=c["fetch_channels"],
              zero=c["zero_percent"], seed=c["seed"] & 0xffff, tls=tls.directory(lab) if c["tls"] else None,
              source_options=[*dimm("source"), *disk],
              destination_options=[*dimm("destination"), *disk]) as pair:
        try:
            faults = Failures(pair, note, locked=c["disk"] == "locked", stop=c["stop"])
            cancel_snapshots(pair, c["snapshot_cancelled_s"], note)
            if c["multifd_channels"]:
                pair.use_multifd(c["multifd_channels"])
            uri = pair.listen()
            wire = (phase_wire(pair, uri, c["phase"], c["part_ratio"], c["mute"]) if c["phase"] in HELD else
                    pair.wire(uri))
            pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=c["bandwidth_bytes_per_s"])
            pair.start(wire.uri)
            asked = False

            def meanwhile():
                nonlocal asked
                if c["dimm"]:
                    asked = not refused(pair.destination, note)

            if c["dimm"]:
                refused(pair.source, note)
            ended = faults.carry_through(
                wire, [(t["action"], t["after_s"]) for t in c["troubles"]], c["phase"], c["action"],
                c["delay_s"], c["under_way_lost"], meanwhile)
            if c["dimm"] and ended in WHOLE:
                unplug(pair, asked, note)
            return ended, pair.faults() if ended in WHOLE else None, faults.recoveries, faults.said
        except BaseException as e:
            e.add_note(diagnosis(pair))
            raise


class Soak:
    """Runs two migrations at a time, each in a first-level machine of its own."""

    def __init__(self, options):
        self.todo = iter(range(options.seed, options.seed + options.number))
        self.number = options.number
        self.done = []
        self.failures = []
        self.keep_going = options.keep_going
        self.fetch = options.fetch
        self.started = time.monotonic()
        self.lock = threading.Lock()    # protects the fields above

    def take(self):
        with self.lock:
            return None if self.failures and not self.keep_going else next(self.todo, None)

    def work(self, name):
        """Replaces a first-level machine after a failure in it."""
        try:
            with Host("tcg", name=f"{name}-host") as host:
                if why_not := host.why_not():
                    self.say(f"in the lab, not on this machine: {why_not}")
                seed = 0
                while seed is not None:
                    with contextlib.ExitStack() as stack:
                        @functools.cache
                        def lab(stack=stack):
                            return stack.enter_context(Lab(name=name, memory_mb=3072, hugepages=HUGEPAGES))
                        while (seed := self.take()) is not None and self.one(lab, None if why_not else host, seed):
                            pass
        except BaseException:
            self.fail(traceback.format_exc())

    def one(self, lab, host, seed):
        """Whether the migration ended in a valid way; lab: boots a first-level machine."""
        notes: list[str] = []
        c, begun = chosen(seed, self.fetch), time.monotonic()
        self.say(f"seed {seed}: {told(c)}")
        try:
            if on_this_machine(c) and host:
                ended, faults, recoveries, said = migrate(host, c, notes.append)
            else:
                ended, faults, recoveries, said = migrate(lab(), c, notes.append)
                lab().check_kernel()
        except BaseException:
            self.fail(f"seed {seed}: {told(c)}\nso far: {'; '.join(notes)}\n{traceback.format_exc()}\n"
                      f"repeat with: make soak SOAK=1 SEED={seed}")
            return False
        self.tell(c | {"ended": ended.name, "said": said, "notes": notes,
                       "recoveries_count": recoveries, "faults_count": faults or {},
                       "duration_s": round(time.monotonic() - begun, 1)})
        return True

    def fail(self, text):
        with self.lock:
            self.failures.append(text)
            self.say(f"FAILED: {text}")

    def say(self, text):
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def tell(self, result):
        with self.lock:
            self.done.append(result)
            self.say(f"{len(self.done)}/{self.number} seed {result['seed']}: {'; '.join(result['notes'])}: "
                     f"{Ended[result['ended']].value}{' (' + result['said'] + ')' if result['said'] else ''}")

    def run(self):
        threads = [threading.Thread(target=self.work, args=(f"soak{i}",)) for i in range(2)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.keep_going = False
            self.fail("interrupted")
            print("soak: interrupted; waiting for the migrations under way", file=sys.stderr)
            for thread in threads:
                thread.join()

    def summary(self):
        totals: Counter[str] = Counter()
        for result in self.done:
            for key, value in result["faults_count"].items():
                if isinstance(value, int):
                    totals[key] += value
        return {
            "migrations_count": len(self.done),
            "recoveries_count": sum(result["recoveries_count"] for result in self.done),
            "duration_s": round(time.monotonic() - self.started, 1),
            "by_choice_count": {key: dict(Counter(str(result[key]) for result in self.done))
                                for key in ("backend", "exits", "preempt", "fetch_channels", "pattern", "cpus",
                                            "dimm", "disk", "stop", "mute", "interface", "tls", "multifd_channels",
                                            "phase", "action", "ended")},
            "by_fault_count": dict(Counter(f"{r['action']} in phase {r['phase']}: {r['ended']}"
                                           for r in self.done if r["phase"])),
            "snapshots_cancelled_count": sum(n == "snapshot cancelled" for r in self.done for n in r["notes"]),
            "snapshots_completed_count": sum(n == "snapshot completed" for r in self.done for n in r["notes"]),
            "faults_count": totals,
            "failures": self.failures,
            "migrations": sorted(self.done, key=lambda result: result["seed"]),
        }


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--number", type=int, default=200, help="of migrations (200)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6),
                        help="of the first one; the others follow (a random one)")
    parser.add_argument("--fetch", action="store_true", help="each by fetch channels: by themselves, or 1 to 8")
    parser.add_argument("--keep-going", action="store_true", help="go on with the next one after a failure")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    soak = Soak(parser.parse_args())
    soak.run()
    summary = soak.summary()
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps({k: v for k, v in summary.items() if k not in ("migrations", "failures")}, indent=2))
    print(f"wrote {REPORT.relative_to(ROOT)}")
    if soak.failures:
        sys.exit("\n\n".join(f"soak: FAILED: {text}" for text in soak.failures))
    for name, count in Counter(r["ended"] for r in soak.done).items():
        print(f"{count} x {Ended[name].value}")
    print(f"soak: {len(soak.done)} migrations, {summary['recoveries_count']} recoveries, and memory intact "
          "wherever the guest was left whole")


if __name__ == "__main__":
    main()
