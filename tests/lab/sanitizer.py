# SPDX-License-Identifier: GPL-2.0-or-later
"""What a sanitizer's build of QEMU reports in a place, with the names of functions and lines.

    TESTED=tsan pytest tests/postcopy

AddressSanitizer's reports all fail a test. ThreadSanitizer finds races that QEMU has had for long (counters of
statistics, GLib's sources); of its reports those fail in which a function of ours, or one that it calls, makes
one of the accesses. All are kept in build/lab/sanitizer.
"""
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.lab.initramfs import CROSS, tool
from tests.lab.lab import Place
from tests.lab.paths import BUILD, ROOT, TESTED, qemu

# Where QEMU reports, which then goes on, and the environment that lets it. It frees little when it ends.
REPORTS = "/tmp/sanitizer"
ENVIRONMENT = {
    "asan": f"ASAN_OPTIONS=log_path={REPORTS}:detect_leaks=0:handle_abort=0",
    "tsan": f"TSAN_OPTIONS=log_path={REPORTS}:exitcode=0:history_size=4:report_signal_unsafe=0",
}.get(TESTED, "")

REPORT = re.compile(r"(?:ERROR|WARNING): (?:Address|Thread)Sanitizer.*?(?=\n=====|\Z)", re.DOTALL)
FRAME = re.compile(r"(#\d+ ).*\(\S*qemu-system-(\w+)\+(0x[0-9a-f]+)\)")
# Where memory, threads and mutexes come from says nothing about who races.
ACCESS = re.compile(r"^ *(?:Previous )?(?:[Aa]tomic )?(?:[Rr]ead|[Ww]rite) of size .*?(?=\n\n|\Z)",
                    re.DOTALL | re.MULTILINE)
# QEMU's way: all who kick a vCPU set CPUState.thread_kicked, and all who shut a QEMUFile down mark it with the same
# error, without a lock, while the thread that closes it looks whether it has one, again and again;
# object_unref() reads the count once more than it changes it.
KNOWN = {"cpus_kick_thread", "kvm_exit_on_missing_kick", "qemu_file_shutdown", "qemu_file_set_error_obj",
         "postcopy_fault_channel_broken", "postcopy_fault_channel_is_broken", "postcopy_fetch_failed",
         "postcopy_fetch_open_one",
         # Of util/async.c, whose name one of ours has
         "aio_bh_enqueue", "aio_bh_poll", "aio_bh_schedule_oneshot_full", "qemu_bh_schedule"}
# Reads the list's last hit without the lock with which plugging resets it: whoever asks for a block.
ASKED = {"qemu_ram_block_from_host"}
# One thread allocates a QIOTask or a channel, and another one gets it through GLib, whose locks ThreadSanitizer does
# not see. What the first one writes to it afterwards is an access of its own.
HANDED_OVER = re.compile(r"^ *Previous write of size .*\n *#0 [cm]alloc ", re.MULTILINE)


def ours() -> set[str]:
    """Names of our files, without their directories."""
    listed = subprocess.run([ROOT / "scripts" / "series", "files"], stdout=subprocess.PIPE, text=True, check=True)
    return {Path(line).name for line in listed.stdout.split()}


def named(report: str) -> str:
    """With functions and lines in the frames of QEMU."""
    frames = FRAME.findall(report)
    if not frames:
        return report
    arch = frames[0][1]
    places = sorted({place for _, _, place in frames})
    names = tool(f"{CROSS[arch]}addr2line", "-f", "-p", "-s", "-e", ROOT / qemu(arch, TESTED), *places).splitlines()
    of = dict(zip(places, names, strict=True))
    return FRAME.sub(lambda m: m[1] + of[m[3]], report)


def accessors(report: str) -> Iterator[tuple[str, str]]:
    """(function, file) of the two innermost frames of each access."""
    if HANDED_OVER.search(report):
        return
    for access in ACCESS.findall(report):
        frames = re.findall(r"#\d+ (\w+) at (\S+?):", access)
        yield from frames[:1 if frames and frames[0][0] in ASKED else 2]


def check(place: Place, name: str) -> None:
    """Of all reports of a test, those that fail it."""
    if not ENVIRONMENT:
        return
    found = failures(place.run(f"cat {REPORTS}.*; rm -f {REPORTS}.*").output, name)
    assert not found, "\n\n".join(found)


def failures(text: str, name: str) -> list[str]:
    reports = [named(report) for report in REPORT.findall(text)]
    if reports:
        to = BUILD / "lab" / "sanitizer"
        to.mkdir(parents=True, exist_ok=True)
        (to / (re.sub(r"\W+", "-", name) + ".txt")).write_text("\n\n".join(reports))
    files = ours()
    return [report for report in reports if "AddressSanitizer" in report
            or any(file in files and function not in KNOWN for function, file in accessors(report))]
