# SPDX-License-Identifier: GPL-2.0-or-later
"""Whether the tests find faults: break the source in small ways, one at a time, and run the file's topic.

Half of the faults are drawn from lines of our own files (by universalmutator's rules for C), half undo a part of
a commit that changed such a file and a test together. Each is built into QEMU and the unit tests; then the topic
that docs/devel/source-map.md names for the file runs up to the first failure, for six minutes at most: unit tests,
then the tests of make check, then the slow ones.

A fault that all tests pass has survived: read it. Either it changes nothing that matters, or a test is missing.
"no time" means that the tests which ran in six minutes passed. A test that fails is run once more without the
fault: if it fails again, the program ends. Writes build/reports/mutants.json; the exit status is 0 whatever survives.
"""
import contextlib
import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

from tests.lab import cli
from tests.lab.cli import ProgramError, say
from tests.lab.paths import BUILD, REPORTS, ROOT

LIBRARY = "universalmutator==1.14.1"
RULES = "universal.rules", "c_like.rules", "c.rules"
# So long does a topic run for one fault
LIMIT_S = 360
BUILDS = "inject", "fork"
PROGRAM = "qemu-system-x86_64"
# A fault there changes what is reported, or does not compile
TELLS = re.compile(r"trace_|(?:error|warn|info)_(?:report|setg|prepend)|_inject_|assert|monitor_printf|"
                   r"^\s*(?:\*|/\*|g_auto|(?!return|goto)\w[\w ]* \**\w+;$)")


class Place(NamedTuple):
    file: str
    topic: str
    object: str


@dataclass
class Fault:
    kind: str
    place: Place
    what: str
    text: str
    outcome: str = ""
    by: str = ""
    took_s: float = 0


def run(*command, **kwargs):
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, **kwargs)


def topics():
    """The topic of each of our C files that x86's QEMU has, with its object file."""
    compiled = {entry["file"].split("src/", 1)[-1]: entry["output"]
                for entry in json.loads((BUILD / BUILDS[0] / "compile_commands.json").read_text())}
    found = {}
    for section in re.split(r"^## ", (ROOT / "docs/devel/source-map.md").read_text(), flags=re.M):
        if topic := re.search(r"`make check-(\w+)`", section):
            for link in re.findall(r"\(\.\./\.\./((?:migration|accel|target/i386|hw)/[\w/.-]+\.c)\)", section):
                if link in compiled:
                    found[link] = Place(link, topic[1], compiled[link])
    return found


def mutator():
    """universalmutator's function, from a directory of its own: no other program needs it."""
    library = BUILD / "mutants" / LIBRARY
    if not library.exists():
        say(f"installing {LIBRARY}")
        done = run(sys.executable, "-m", "pip", "install", "-q", "--target", library, LIBRARY)
        if done.returncode:
            raise ProgramError(f"pip could not install {LIBRARY}: no network to PyPI?\n{done.stderr}")
    sys.path.append(str(library))
    from universalmutator.mutator import mutants_regexp  # type: ignore[import-not-found]
    return mutants_regexp


def drawn(chance, files):
    """Faults in lines of function bodies; long files have more of them."""
    mutate = mutator()
    names = sorted(files)
    sizes = [(ROOT / name).read_text().count("\n") for name in names]
    while True:
        name = chance.choices(names, sizes)[0]
        lines = (ROOT / name).read_text().splitlines(keepends=True)
        number = chance.randrange(len(lines))
        line = lines[number]
        if not line.startswith("    ") or TELLS.search(line) or not line.rstrip().endswith((";", "{", ")")):
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            found = mutate([line], RULES, ignorePatterns=[])
        if not found:
            continue
        # Some rules add a line, which moves all others
        new = chance.choice(sorted({mutant.rstrip("\n") for _, mutant, *_ in found}))
        if "\n" in new:
            continue
        text = "".join([*lines[:number], new + "\n", *lines[number + 1:]])
        yield Fault("drawn", files[name], f"{number + 1}: {line.strip()}  ->  {new.strip()}", text)


def undone(chance, files):
    """Parts of commits that can still be undone: such a commit changed one of our files and a test."""
    log = run("git", "log", "--no-merges", "--format=@%h", "--name-only").stdout
    commits = []
    for commit in log.split("@")[1:]:
        number, *names = commit.split()
        ours = [name for name in names if name in files]
        if 1 <= len(ours) <= 3 and any(name.startswith("tests/") and name.endswith((".py", ".c")) for name in names):
            commits.append((number, chance.choice(ours)))
    chance.shuffle(commits)
    for number, name in commits:
        diff = run("git", "show", "--format=", "-U3", number, "--", name).stdout
        head, *hunks = re.split(r"^(?=@@ )", diff, flags=re.M)
        hunks = [hunk for hunk in hunks if 1 <= len(re.findall(r"^[-+]", hunk, re.M)) <= 16
                 and re.search(r"^\+(?!\s*/?\*)\s*\S", hunk, re.M)]
        if not hunks:
            continue
        undo = run("patch", "-R", "-s", "-f", "-F0", "-r", "-", "-o", "-", name, input=head + chance.choice(hunks))
        if undo.returncode == 0:
            subject = run("git", "log", "-1", "--format=%h %s", number).stdout.strip()
            yield Fault("undone", files[name], subject, undo.stdout)


def code(name):
    """What an object file of the first build has but for debug information, or None if it does not compile."""
    folder = BUILD / BUILDS[0]
    if run("ninja", "-C", folder, name).returncode:
        return None
    without = BUILD / "mutants/object"
    run("objcopy", "--strip-debug", folder / name, without)
    return without.read_bytes()


def build(topic):
    """Returns the messages of a build that fails."""
    for folder in BUILDS:
        more = [f"tests/unit/{unit}" for unit in topic_words(topic)[0]] if folder == "fork" else []
        done = run("scripts/ninja", f"build/{folder}", PROGRAM, *more)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


def topic_words(topic):
    """The names of its unit tests, and pytest's words for the others, as tests/meson.build lists them."""
    listed = json.loads((BUILD / "tests/meson-info/intro-tests.json").read_text())
    words = next(test["cmd"] for test in listed if test["name"] == topic)
    units = [unit[1] for word in words if (unit := re.search(r"\[(test-[\w-]+)\]$", word))]
    return units, [word for word in words if re.match(r"tests/(?!static)", word)]


def pytest(words, limit_s):
    """The first test that fails, "" if none does, None if time was up."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "--dist", "loadgroup", "-rfE",
               "--show-capture=no", "--tb=line", *words]
    # A group of its own: Ctrl-C reaches it once
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True,
                               env={k: v for k, v in os.environ.items() if k not in ("TESTS", "TESTED")})
    try:
        output, _ = process.communicate(timeout=max(1, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=90)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?: [^-]\S*)*)", output, re.M)
    # With -x, xdist ends by the status of an interruption
    if process.returncode not in (0, 5) and not found:
        raise ProgramError(f"pytest could not run:\n{output}")
    return found[1] if found else ""


def failure(topic):
    """The outcome, and the first test that fails."""
    units, paths = topic_words(topic)
    end = time.monotonic() + LIMIT_S
    ways = [["tests/static/test_unit.py", "-k", " or ".join(f"{unit}]" for unit in units)]] if units else []
    ways += [["-m", "not slow", *paths], ["-m", "slow", *paths]]
    for words in ways:
        test = pytest(words, end - time.monotonic())
        if test is None:
            return "no time", ""
        if test:
            return "found", test
    return "survived", ""


def try_fault(fault, before):
    """Returns false if it is none: it does not compile, or changes nothing."""
    path = ROOT / fault.place.file
    since = time.monotonic()
    was = path.read_text()
    try:
        path.write_text(fault.text)
        if code(fault.place.object) in (None, before) or build(fault.place.topic):
            return False
        fault.outcome, fault.by = failure(fault.place.topic)
        fault.took_s = round(time.monotonic() - since)
    finally:
        path.write_text(was)
    if fault.by:
        if build(fault.place.topic):
            raise ProgramError("QEMU does not build as it was")
        if pytest([fault.by], LIMIT_S):
            raise ProgramError(f"{fault.by} also fails without a fault: mend it first")
    return True


def report(seed, faults):
    REPORTS.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": fault.kind, "file": fault.place.file, "topic": fault.place.topic, "what": fault.what,
             "outcome": fault.outcome, "by": fault.by, "took_s": fault.took_s} for fault in faults]
    (REPORTS / "mutants.json").write_text(json.dumps({"seed": seed, "faults": rows}, indent=1) + "\n")


def main(options):
    files = topics()
    status = run("git", "status", "--porcelain", "--", *files)
    if status.returncode or status.stdout:
        raise ProgramError("our own files, which are about to be broken, have changes that are not committed: commit "
                           f"them, or git checkout them if a run was killed\n{status.stdout}{status.stderr}")
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    say(f"{options.number} faults by SEED={seed}")
    chance = random.Random(seed)
    sources = drawn(chance, files), undone(chance, files)
    faults: list[Fault] = []
    before: dict[Place, bytes | None] = {}
    try:
        while len(faults) < options.number:
            fault = next(sources[len(faults) % 2], None)
            if fault is None:
                raise ProgramError("no more commits can be undone: is this a shallow clone?")
            if fault.place not in before:
                before[fault.place] = code(fault.place.object)
            if try_fault(fault, before[fault.place]):
                faults.append(fault)
                say(f"{len(faults)}. {fault.outcome} after {fault.took_s:.0f} s, {fault.kind}, {fault.place.file} "
                    f"{fault.what}" + f"\n      by {fault.by}" * bool(fault.by))
                report(seed, faults)
    finally:
        if before:
            say("building QEMU as it was")
            for topic in sorted({place.topic for place in files.values()}):
                build(topic)
    outcomes = [fault.outcome for fault in faults]
    path = shlex.quote(str(REPORTS / "mutants.json"))
    print(f"{outcomes.count('found')} of {len(faults)} faults were found, {outcomes.count('survived')} survived; "
          f"SEED={seed}; {path}")


if __name__ == "__main__":
    args = cli.parser(__doc__)
    args.add_argument("--number", type=int, default=24, help="faults, half of each kind (default: %(default)s)")
    args.add_argument("--seed", type=int, help="draw the same faults again (default: a random one)")
    cli.main("mutants", main, args.parse_args())
