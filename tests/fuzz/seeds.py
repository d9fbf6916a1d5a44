# SPDX-License-Identifier: GPL-2.0-or-later
"""Real migrations of the fuzzer's machine, recorded as inputs for both sides.

tests/qtest/fuzz/migration_fuzz.h describes the format of an input.
"""
import contextlib
import os
import re
import socket
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from qemu.qmp import ExecuteError
from qemu.qmp.legacy import QEMUMonitorProtocol

from tests.lab.fetch_proxy import HELLO_SIZE, REQUEST

OPEN, SEND, CLOSE, WAIT, DO = range(5)
READ, RUNNING = 0xff, 0xfe
START_POSTCOPY, PAUSE, RECOVER, CANCEL, QUERY, TOUCH = range(6)
# Bits of the first byte; the second byte sets bandwidths.
CAPABILITIES = ("return-path", "postcopy-ram", "postcopy-preempt", "postcopy-blocktime", "xbzrle", "switchover-ack",
                "multifd", "x-ignore-shared")
SLOW = 1            # 32 KiB/s
UNLIMITED = 0
MAIN = 0
# Messages of the return path that request pages
REQUESTS = 3, 4
TIMEOUT_S = 60
# Attempts to record a page request, since the background may send all pages before one
ATTEMPTS = 20
# Of a recorded migration, each connection keeps this many separate requests.
SINGLE_REQUESTS = 3

POSTCOPY = "return-path", "postcopy-ram"
# Both capabilities stand for fetch channels.
FETCH = "postcopy-preempt", "postcopy-blocktime"
FETCH_CHANNELS = 2
# The first bytes of a fetch channel, and of a request on one; messages of the return path begin with 0.
HELLO = b"QPFC"
FETCH_REQUEST = bytes([REQUEST])
# Name, capabilities, and the user's actions
SEEDS = (
    ("precopy", (), "precopy"),
    ("xbzrle", ("return-path", "xbzrle"), "precopy"),
    ("switchover-ack", ("return-path", "switchover-ack"), "precopy"),
    ("multifd", ("return-path", "multifd"), "precopy"),
    ("ignore-shared", ("return-path", "x-ignore-shared"), "precopy"),
    ("postcopy", POSTCOPY, "postcopy"),
    ("blocktime", (*POSTCOPY, "postcopy-blocktime"), "postcopy"),
    ("preempt", (*POSTCOPY, "postcopy-preempt"), "postcopy"),
    ("recovery", POSTCOPY, "recovery"),
    ("preempt-recovery", (*POSTCOPY, "postcopy-preempt"), "recovery"),
    ("fetch", (*POSTCOPY, *FETCH), "postcopy"),
    ("fetch-recovery", (*POSTCOPY, *FETCH), "recovery"),
)


# Writes to a file, at offsets, are combined to blocks of this many bytes
FILE_BLOCK = 4096
FILE_SEEDS = (("eager", ()), ("lazy", POSTCOPY[1:]), ("blocktime", ("postcopy-ram", "postcopy-blocktime")))


def record(op, arg, data=b""):
    return struct.pack("<BBI", op, arg, len(data)) + data


def first_request(data):
    """The position of a page request in a part of a return path or fetch channel, of whole messages, or None."""
    at = HELLO_SIZE if data.startswith(HELLO) else 0
    if data.startswith(FETCH_REQUEST, at):
        return at
    while len(data) >= at + 4:
        kind, length = struct.unpack_from(">HH", data, at)
        if kind in REQUESTS:
            return at
        at += 4 + length
    return None


def asks(data):
    return first_request(data) is not None


def statuses(build):
    """The numbers of migration statuses, by name."""
    text = (build / "qapi/qapi-types-migration.h").read_text()
    names = re.findall(r"^ +MIGRATION_STATUS_(\w+),$", text, re.M)
    return {name.lower().replace("_", "-"): number for number, name in enumerate(names)}


class Tape:
    """A proxy between both sides: passes on and records their data, in order."""

    def __init__(self, to, slow):
        self.to = to
        self.slow = slow                # delay the source's stream, so that pages are missed
        self.events = []                # (kind, channel, bytes)
        self.lock = threading.Lock()
        self.open = {}

    def note(self, what, channel=0, data=b""):
        with self.lock:
            last = self.events[-1] if self.events else (None, None, b"")
            if data and last[:2] == (what, channel) and (what == "source" or asks(data) == asks(last[2])):
                data = self.events.pop()[2] + data
            self.events.append((what, channel, data))

    def listen(self, path):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()

    def _accept(self, listening):
        while True:
            source, _ = listening.accept()
            destination = socket.socket(socket.AF_UNIX)
            destination.connect(self.to)
            with self.lock:
                channel = min(set(range(9)) - set(self.open))
                self.open[channel] = source, destination
            self.note("open", channel)
            for a, b, what in (source, destination, "source"), (destination, source, "destination"):
                threading.Thread(target=self._copy, args=(a, b, what, channel), daemon=True).start()

    def _copy(self, a, b, what, channel):
        with contextlib.suppress(OSError):
            slow = self.slow and what == "source" and channel == MAIN
            while (data := a.recv(4096 if slow else 65536)) and a in self.open.get(channel, ()):
                self.note(what, channel, data)
                b.sendall(data)
                time.sleep(0.01 if slow else 0)
        for end in a, b:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def requests(self):
        with self.lock:
            return sum(what == "destination" and asks(data) for what, _, data in self.events)

    def cut(self):
        self.note("cut")
        for ends in self.open.values():
            for end in ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self.open = {}


def listens(path):
    """Whether the flag __SO_ACCEPTCON of the Unix socket is set."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(words[-1] == path and words[3] == "00010000" for words in sockets)


class Side:
    def __init__(self, binary, name, directory):
        qmp = f"{directory}/{name}.qmp"
        self.log = open(f"{directory}/{name}.log", "w+")    # noqa: SIM115 - __exit__ closes it
        self.process = subprocess.Popen(
            [binary, f"--fuzz-target=migration-{name}"], stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL,
            env=os.environ | {"MIGRATION_FUZZ_PLAIN": f"-qmp unix:{qmp},server=on,wait=off"})
        self.qmp = QEMUMonitorProtocol(qmp)
        self.until(lambda: listens(qmp), "QMP")
        self.qmp.connect()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(Exception):
            self.qmp.close()
        self.log.close()

    def until(self, condition, what):
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                self.log.seek(0)
                info = self.process.poll() is None and self.cmd("query-migrate")
                raise AssertionError(f"no {what} within {TIMEOUT_S} s: {info}\n{self.log.read()}")
            time.sleep(0.01)

    def cmd(self, name, **arguments):
        return self.qmp.cmd(name, **{key.replace("_", "-"): value for key, value in arguments.items()})

    def wait_status(self, *wanted):
        self.until(lambda: self.cmd("query-migrate").get("status") in wanted, " or ".join(wanted))


def completed(side):
    return side.cmd("query-migrate").get("status") == "completed"


def migrate(source, destination, tape, directory, capabilities, way):
    for side in source, destination:
        side.cmd("migrate-set-capabilities",
                 capabilities=[{"capability": c, "state": c in capabilities} for c in CAPABILITIES])
        side.cmd("migrate-set-parameters",
                 postcopy_fetch_channels=FETCH_CHANNELS if set(FETCH) <= set(capabilities) else 0)
    if way != "precopy":
        source.cmd("migrate-set-parameters", max_bandwidth=16384 << SLOW, downtime_limit=1,
                   max_postcopy_bandwidth=16384 << SLOW)
    destination.cmd("migrate-incoming", uri=f"unix:{tape.to}")
    tape.listen(f"{directory}/first")
    source.cmd("migrate", uri=f"unix:{directory}/first")
    if way != "precopy":
        source.cmd("migrate-start-postcopy")
        for side in source, destination:
            side.wait_status("postcopy-active", "completed")
        if completed(destination):
            return False                # All was sent before a request
        destination.until(lambda: tape.requests() or completed(destination), "page requests")
        if not tape.requests():
            return False
    if way == "recovery":
        tape.cut()
        for side in source, destination:
            side.wait_status("postcopy-paused")
        Path(tape.to).unlink(missing_ok=True)
        destination.cmd("migrate-recover", uri=f"unix:{tape.to}")
        tape.listen(f"{directory}/second")
        source.cmd("migrate", uri=f"unix:{directory}/second", resume=True)
        source.wait_status("postcopy-active", "completed")
    with contextlib.suppress(ExecuteError):
        # Not during a recovery
        source.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)
    for side in source, destination:
        side.wait_status("completed")
    return True


def events(tape):
    """The events, in which data that were sent at once are merged after some requests."""
    merged: list[tuple[str, int, bytes]] = []
    requests = 0
    for what, channel, data in tape.events:
        if what == "destination" and asks(data):
            requests += 1
        elif what in ("cut", "open"):
            requests = 0
        same = (i for i in range(len(merged) - 1, -1, -1) if merged[i][:2] == (what, channel))
        if requests > SINGLE_REQUESTS and (i := next(same, None)) is not None:
            merged[i] = what, channel, merged[i][2] + data
        else:
            merged.append((what, channel, data))
    return merged


def after_cut(status):
    """Records that close all channels, and begin a recovery."""
    return [*(record(CLOSE, channel) for channel in range(1 + FETCH_CHANNELS)),
            record(WAIT, status["postcopy-paused"]), record(DO, QUERY), record(DO, RECOVER)]


def for_destination(tape, status):
    records, last = [], None
    for what, channel, data in events(tape):
        if what == "cut":
            records += [record(WAIT, RUNNING), *after_cut(status)]
        elif what == "open":
            records += [record(WAIT, READ), record(OPEN, channel)]
        elif what == "source":
            if last == "destination":
                records.append(record(WAIT, READ))
            records.append(record(SEND, channel, data))
        elif what == "destination" and asks(data):
            records += [record(WAIT, RUNNING), record(DO, TOUCH, bytes([10]))]
        last = what
    return records


def for_source(tape, status, way):
    # QEMU would ignore an answer that precedes the question.
    records = [record(WAIT, status["active"])]
    if way != "precopy":
        records.append(record(DO, START_POSTCOPY))
    for what, channel, data in events(tape):
        if what == "cut":
            records += [*after_cut(status), record(WAIT, status["postcopy-recover"])]
        elif what == "open":
            records.append(record(OPEN, channel))
        elif what == "destination":
            if (at := first_request(data)) is not None:
                # Data before the request may be needed to reach postcopy-active.
                if at:
                    records.append(record(SEND, channel, data[:at]))
                records.append(record(WAIT, status["postcopy-active"]))
                data = data[at:]
            records.append(record(SEND, channel, data))
    return [*records, record(WAIT, status["completed"])]


def saved(binary):
    """Records that write a guest's file."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as tmp, Side(binary, "source", tmp) as source:
        source.cmd("migrate-set-capabilities", capabilities=[{"capability": "mapped-ram", "state": True}])
        source.cmd("migrate", uri=f"file:{tmp}/file")
        source.wait_status("completed")
        data = Path(f"{tmp}/file").read_bytes()
    parts: list[tuple[int, bytes]] = []
    for at in range(0, len(data), FILE_BLOCK):
        block = data[at:at + FILE_BLOCK]
        if parts and parts[-1][0] + len(parts[-1][1]) == at and any(block):
            parts[-1] = parts[-1][0], parts[-1][1] + block
        elif any(block):
            parts.append((at, block))
    return [*(record(SEND, 0, struct.pack("<I", at) + part) for at, part in parts),
            # Trailing zeros
            record(SEND, 0, struct.pack("<I", len(data) - 1) + b"\0")]


def for_file(binary, status):
    """{name: records that use the file}"""
    touches = [record(WAIT, RUNNING), *(record(DO, TOUCH, bytes([page])) for page in range(0, 64, 5))]
    pauses = [record(DO, PAUSE), record(WAIT, status["postcopy-paused"]), record(DO, RECOVER)]
    file = saved(binary)
    for name, capabilities in FILE_SEEDS:
        lazy = bool(capabilities)
        yield name, capabilities, file + touches * lazy + pauses * lazy + [record(WAIT, status["completed"])]


def save(directory, name, capabilities, speed, records):
    directory.mkdir(parents=True, exist_ok=True)
    bits = sum(1 << CAPABILITIES.index(c) for c in capabilities)
    (directory / name).write_bytes(bytes([bits, speed]) + b"".join(records))


def write(binary, to):
    """Record all seeds, in a directory for each side."""
    status = statuses(binary.parent)
    for name, capabilities, way in SEEDS:
        for _ in range(ATTEMPTS):
            with (tempfile.TemporaryDirectory(prefix="fuzz-") as tmp, Side(binary, "source", tmp) as source,
                  Side(binary, "destination", tmp) as destination):
                tape = Tape(f"{tmp}/in", way != "precopy")
                if migrate(source, destination, tape, tmp, capabilities, way):
                    break
        else:
            raise AssertionError(f"no page was requested in {ATTEMPTS} migrations: {name}")
        # Slow enough to begin postcopy, and to break a recovery
        speed = UNLIMITED if way == "precopy" else SLOW
        if way == "recovery":
            speed |= SLOW << 4
        save(to / "source", name, capabilities, speed, for_source(tape, status, way))
        save(to / "destination", name, capabilities, speed, for_destination(tape, status))
    for name, capabilities, records in for_file(binary, status):
        save(to / "file", name, capabilities, UNLIMITED, records)
