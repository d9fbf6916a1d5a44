# SPDX-License-Identifier: GPL-2.0-or-later
"""Many post-copy migrations in the lab, each with a random guest, load, backend and trouble.

Source or destination are killed, connections cut and paused, at each phase (failures.py); background
snapshots are cancelled before, and memory is unplugged; the guest is stopped and continued. Both sides share its
disk, with or without an image lock, or each has a vhost-user backend for it. The guest never runs on both sides: the
test tries to resume it on a source without news of the destination; and a paused side reports how to recover. After
each migration, the guest checks all of its memory, if it is whole; if it is not, the remaining QEMU must report that.
Prints seed and plan of each migration, and writes build/reports/soak.json. A hang or another end stops the run, with
the seed that repeats it and a diagnosis.
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
from concurrent.futures import ThreadPoolExecutor, wait

from qemu.qmp import ExecuteError

from tests.lab import cli, kvm_interface, tls
from tests.lab.backends import shared_disk
from tests.lab.failures import ACTIONS, HELD, PHASES, Ended, Failures, PhaseWire, diagnosis
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.linux_pair import LinuxPair
from tests.lab.pair import MIB, Pair, until
from tests.lab.paths import REPORTS, ROOT
from tests.lab.qtest import Qtest, eject_memory
from tests.lab.vhost_user import DiskPair

REPORT = REPORTS / "soak.json"
SMALL = ("anonymous", "memfd", "shm")
HUGE = ("hugetlb", "hugetlb-private")
DIMM = ("-object", "memory-backend-ram,id=dimm-ram,size=16M", "-device", "pc-dimm,id=dimm,memdev=dimm-ram")


def chosen(seed, fetch=False):
    """A migration's plan, only from the seed; fetch: with fetch channels in any case."""
    r = random.Random(seed)

    def up_to(most):
        return round(r.uniform(0, most), 3)

    huge = r.random() < 0.3
    phase = r.choice([None, None, *PHASES, *PHASES])
    troubles = [{"action": r.choice(["pause", "cut"]), "after_s": up_to(0.7)}
                for _ in range(r.choice([0, 1, 1, 2]))]
    c = {
        "seed": seed,
        "guest": "touch",
        "backend": r.choice(HUGE if huge else SMALL),
        "exits": r.choice(["on", "off"]),
        "preempt": r.random() < 0.5,
        "cpus": r.randint(1, 4),
        "pattern": r.choice(["disjoint", "shared"] + (["samehuge"] if huge else ["zerowrite"])),
        "mem_mib": 48 if huge else r.randrange(4, 21, 2),
        "zero_percent": r.choice([0, 12, 50, 90]),
        "bandwidth_bytes_per_s": r.choice([8, 64] if huge else [1, 4, 64]) * MIB,
        # Seconds until migrate_cancel
        "snapshot_cancelled_s": [up_to(0.6) for _ in range(r.choice([0, 0, 0, 1, 2]))],
        "dimm": r.random() < 0.25,
        # Failures with a recovery, before the fault
        "troubles": troubles if phase in (None, "postcopy") else [],
        "phase": phase,
        "action": phase and r.choice(ACTIONS[phase]),
        # The position within the phase
        "part_ratio": up_to(1),
        "delay_s": r.choice([0, up_to(0.05), up_to(0.7)]),
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
    if r.random() < 0.2:
        disk = r.choice([None, None, "vhost-user"]) if c["disk"] is None else c["disk"]
        c |= {"guest": "linux", "dimm": False, "disk": disk, "mem_mib": 16,
              "snapshot_cancelled_s": c["snapshot_cancelled_s"] if disk != "vhost-user" else [],
              "backend": r.choice(["memfd", "shm"] if disk == "vhost-user" else SMALL),
              "bandwidth_bytes_per_s": r.choice([8, 64]) * MIB}
    # QEMU would also begin TLS in a snapshot's file.
    c["tls"] &= not c["snapshot_cancelled_s"]
    return c | {"action": "cut"} if c["mute"] else c


def told(c):
    """The plan in a line, without what it leaves out."""
    return ", ".join(f"{key} {value}" for key, value in c.items() if value or key == "seed")


def cancel_snapshots(pair, delays_s, note):
    """Each snapshot ends cancelled or completed, and leaves the source as it was."""
    source = pair.source
    source.wait_ready()
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
    else:
        # The migration has ended before.
        assert side.status() in ("completed", "none"), f"a DIMM is unplugged while the {side.name} is {side.status()}"


def unplug(pair, note):
    """Unplug the DIMM after the end; the test ejects it in place of the guest."""
    side = pair.destination
    # It may have been requested when the guest had moved.
    with contextlib.suppress(ExecuteError):
        side.cmd("device_del", id="dimm")
    eject_memory(pair.lab, side.name)
    until(lambda: not side.cmd("query-memory-devices"), "the DIMM is unplugged")
    side.cmd("object-del", id="dimm-ram")
    side.check()
    note("DIMM unplugged")


def new_pair(lab, c):
    options = {"exits": c["exits"], "backend": c["backend"], "cpus": c["cpus"], "fetch": c["fetch_channels"],
               "capabilities": ("postcopy-preempt",) if c["preempt"] else (),
               "tls": tls.directory(lab) if c["tls"] else None}
    if c["disk"] == "vhost-user":
        return DiskPair(lab, **options)
    disk = shared_disk(lab, "file.locking=off" * (c["disk"] == "locking-off"))[1] if c["disk"] else ()
    if c["guest"] == "linux":
        return LinuxPair(lab, source_options=disk, destination_options=disk, mem=c["mem_mib"], writers=1, computers=1,
                         disk=int(bool(disk)), interval=100, **options)
    memory_mb = 64 if c["backend"] in HUGE else 32

    def words(side):
        dimm = ["-m", f"{memory_mb}M,slots=1,maxmem=1G", *DIMM, *Qtest.arguments(lab, side)] if c["dimm"] else []
        return [*dimm, *disk]

    return Pair(lab, memory_mb=memory_mb, pattern=c["pattern"], mem=c["mem_mib"], zero=c["zero_percent"],
                seed=c["seed"] & 0xffff, source_options=words("source"), destination_options=words("destination"),
                **options)


def migrate(lab, c, note=lambda text: None):
    """Migrate by the plan c; returns (Ended, recoveries, the survivor's message)."""
    interface = kvm_interface.offered(lab, c["interface"]) if c["exits"] == "on" else contextlib.nullcontext()
    with interface, new_pair(lab, c) as pair:
        try:
            faults = Failures(pair, note, locked=c["disk"] == "locked", stop=c["stop"])
            if c["snapshot_cancelled_s"]:
                cancel_snapshots(pair, c["snapshot_cancelled_s"], note)
            if c["multifd_channels"]:
                pair.use_multifd(c["multifd_channels"])
            uri = pair.listen()
            wire = (pair.wire_of(PhaseWire, uri, phase=c["phase"], part=c["part_ratio"], mute=c["mute"])
                    if c["phase"] in HELD else pair.wire(uri))
            pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=c["bandwidth_bytes_per_s"])
            pair.start(wire.uri)
            if c["dimm"]:
                refused(pair.source, note)
            ended = faults.carry_through(
                wire, [(t["action"], t["after_s"]) for t in c["troubles"]], c["phase"], c["action"],
                c["delay_s"], c["under_way_lost"],
                lambda: refused(pair.destination, note) if c["dimm"] else None)
            if c["dimm"] and ended in (Ended.DESTINATION, Ended.SOURCE):
                unplug(pair, note)
            return ended, faults.recoveries, faults.said
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
        self.fetch = options.fetch
        self.started = time.monotonic()
        self.lock = threading.Lock()    # protects the fields above

    def take(self):
        with self.lock:
            return None if self.failures else next(self.todo, None)

    def work(self, name):
        try:
            with Host("tcg", name=f"{name}-host") as host, contextlib.ExitStack() as stack:
                if why_not := host.why_not():
                    self.say(f"in the lab, not on this machine: {why_not}")

                @functools.cache
                def lab():
                    return stack.enter_context(Lab(name=name, memory_mb=3072, hugepages=256))

                while (seed := self.take()) is not None:
                    self.one(lab, None if why_not else host, seed)
        except BaseException:
            self.fail(traceback.format_exc())

    def one(self, lab, host, seed):
        """lab: boots a first-level machine."""
        notes: list[str] = []
        c, begun = chosen(seed, self.fetch), time.monotonic()
        # TCG, which needs no exits, is many times as fast as the lab.
        here = c["here"] and c["exits"] == "off" and c["backend"] in SMALL and c["guest"] == "touch" and host
        self.say(told(c))
        try:
            ended, recoveries, said = migrate(here or lab(), c, notes.append)
            if not here:
                lab().check_kernel()
        except BaseException:
            self.fail(f"{told(c)}\nso far: {'; '.join(notes)}\n{traceback.format_exc()}\n"
                      f"repeat with: make soak SOAK=1 SEED={seed}")
            return
        with self.lock:
            self.done.append(c | {"ended": ended.name, "said": said, "notes": notes, "recoveries_count": recoveries,
                                  "duration_s": round(time.monotonic() - begun, 1)})
            self.say(f"{len(self.done)}/{self.number} seed {seed}: {'; '.join(notes)}: {ended.value}"
                     + f" ({said})" * bool(said))

    def fail(self, text):
        with self.lock:
            self.failures.append(text)
            self.say(f"FAILED: {text}")

    def say(self, text):
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def run(self):
        with ThreadPoolExecutor(2) as pool:
            try:
                wait([pool.submit(self.work, f"soak{i}") for i in range(2)])
            except KeyboardInterrupt:
                self.fail("interrupted")
                print("soak: interrupted; waiting for the migrations under way", file=sys.stderr)

    def summary(self):
        return {
            "migrations_count": len(self.done),
            "recoveries_count": sum(result["recoveries_count"] for result in self.done),
            "duration_s": round(time.monotonic() - self.started, 1),
            "by_choice_count": {key: Counter(str(result[key]) for result in self.done)
                                for key in ("guest", "backend", "exits", "preempt", "fetch_channels", "pattern", "cpus",
                                            "dimm", "disk", "stop", "mute", "interface", "tls", "multifd_channels",
                                            "phase", "action", "ended")},
            "failures": self.failures,
            "migrations": sorted(self.done, key=lambda result: result["seed"]),
        }


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("--number", type=int, default=200, help="of migrations (200)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6),
                        help="of the first one; the others follow (a random one)")
    parser.add_argument("--fetch", action="store_true", help="each by fetch channels: by themselves, or 1 to 8")
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
    print(f"soak: {len(soak.done)} migrations, {summary['recoveries_count']} recoveries, and memory intact "
          "wherever the guest was left whole")


if __name__ == "__main__":
    main()
