# SPDX-License-Identifier: GPL-2.0-or-later
"""Reports of a sanitizer's build of QEMU in a place, with the names of functions and lines, and which of them fail a
test: docs/devel/testing.md."""
import re
from collections.abc import Iterator

from tests.lab.host import Place
from tests.lab.initramfs import CROSS, tool
from tests.lab.paths import BUILD, ROOT, TESTED, qemu

# Files of QEMU's reports, and the environment that lets QEMU continue after one. QEMU frees little when it exits.
REPORTS = "/tmp/sanitizer"
ENVIRONMENT = {
    "asan": f"ASAN_OPTIONS=log_path={REPORTS}:detect_leaks=0:handle_abort=0",
    "tsan": f"TSAN_OPTIONS=log_path={REPORTS}:exitcode=0:history_size=4:report_signal_unsafe=0",
}.get(TESTED, "")

REPORT = re.compile(r"(?:ERROR|WARNING): (?:Address|Thread)Sanitizer.*?(?=\n=====|\Z)", re.DOTALL)
FRAME = re.compile(r"(#\d+ ).*\(\S*qemu-system-(\w+)\+(0x[0-9a-f]+)\)")
# A prefix of file names: the compiler runs in the build directory, and headers have absolute paths.
BELOW_TREE = re.compile(r" at \S*?/build/(?:[\w-]+/\.\./)?src/")
# The origin of memory, threads and mutexes does not show which code races.
ACCESS = re.compile(r"^ *(?:Previous )?(?:[Aa]tomic )?(?:[Rr]ead|[Ww]rite) of size .*?(?=\n\n|\Z)",
                    re.DOTALL | re.MULTILINE)
# Accesses in these files belong to their callers.
HELPERS = re.compile(r"include/|util/bit(?:map|ops)\.c")
# One thread allocates a QIOTask or a channel, and another one gets it through GLib, whose locks ThreadSanitizer does
# not see. Later writes of the first thread are separate accesses.
HANDED_OVER = re.compile(r"^ *Previous write of size .*\n *#0 [cm]alloc ", re.MULTILINE)


def named(report: str) -> str:
    """The report with functions, and lines of files in QEMU's tree, in the frames of QEMU."""
    frames = FRAME.findall(report)
    if not frames:
        return report
    arch = frames[0][1]
    places = sorted({place for _, _, place in frames})
    lines = tool(f"{CROSS[arch]}addr2line", "-f", "-i", "-p", "-e", ROOT / qemu(arch, TESTED), *places)
    names = re.split(r"\n(?! \()", BELOW_TREE.sub(" at ", lines).rstrip())
    of = dict(zip(places, names, strict=True))
    return FRAME.sub(lambda m: m[1] + of[m[3]], report)


def accessors(report: str) -> Iterator[str]:
    """For each access, the file of QEMU's tree that makes it."""
    accesses = ACCESS.findall(report)
    # Accesses under the same mutex do not race: a coroutine's stack may have been another thread's at that time.
    held = [set(re.findall(r"\bM\d+", access.splitlines()[0])) for access in accesses]
    if HANDED_OVER.search(report) or (len(held) == 2 and held[0] & held[1]):
        return
    for access in accesses:
        files = re.findall(r"(?:#\d+|\(inlined by\)) \S+ at (\S+?):", access)
        yield next((file for file in files if not HELPERS.match(file)), "")


def check(place: Place, name: str) -> None:
    """Fails if one of the test's reports is to fail it."""
    if not ENVIRONMENT:
        return
    reports = [named(report) for report in REPORT.findall(place.run(f"cat {REPORTS}.*; rm -f {REPORTS}.*").output)]
    if reports:
        to = BUILD / "lab" / "sanitizer"
        to.mkdir(parents=True, exist_ok=True)
        (to / (re.sub(r"\W+", "-", name) + ".txt")).write_text("\n\n".join(reports))
    # Paths of our files in QEMU's tree
    ours = tool(ROOT / "scripts" / "series", "files").split()
    found = [report for report in reports
             if "AddressSanitizer" in report or any(file in ours for file in accessors(report))]
    assert not found, "\n\n".join(found)
