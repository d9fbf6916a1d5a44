# SPDX-License-Identifier: GPL-2.0-or-later
"""Whether the tests find faults: break the source in small ways, one at a time, and run the file's topic.

Half of the faults are drawn from lines of our own files (by universalmutator's rules for C), half undo a part of
a commit that changed such a file and a test together. Each is built into QEMU and the unit tests; then the topic
that docs/devel/source-map.md names for the file runs up to the first failure, for six minutes at most: unit tests,
then the tests of make check, then the slow ones.

A fault that no test finds is a survivor: read it. Either it changes nothing that matters, or a test is missing.
Writes build/reports/mutants.json. The exit status is 0 whatever survives.
"""
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from tests.lab import cli
from tests.lab.cli import ProgramError, say
from tests.lab.paths import BUILD, REPORTS, ROOT

LIBRARY = "universalmutator==1.14.1"
RULES = "universal.rules", "c_like.rules", "c.rules"
# So long does a topic run for one fault
LIMIT_S = 360
BUILDS = "inject", "fork"
PROGRAM = "qemu-system-x86_64"
# A fault there changes what is reported, or nothing
TELLS = re.compile(r"trace_|(?:error|warn|info)_(?:report|setg|prepend)|_inject_|assert|monitor_printf|"
                   r"^\s*(?:\*|/\*|g_auto|\w[\w ]* \**\w+(?: = [^(]*)?;$)")


@dataclass
class Fault:
    kind: str
    file: str
    topic: str
    what: str
    text: str
    outcome: str = ""
    by: str = ""
    took_s: float = 0


def run(*command, **kwargs):
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, **kwargs)


def topics():
    """The topic of each of our C files that x86's QEMU has."""
    found = {}
    for section in re.split(r"^## ", (ROOT / "docs/devel/source-map.md").read_text(), flags=re.M):
        if topic := re.search(r"`make check-(\w+)`", section):
            for link in re.findall(r"\(\.\./\.\./((?:migration|accel|target/i386|hw/virtio)/[\w/.-]+\.c)\)", section):
                found[link] = topic[1]
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
        with open(os.devnull, "w") as null:
            shown, sys.stdout = sys.stdout, null
            found = mutate([line], RULES, ignorePatterns=[])
            sys.stdout = shown
        if not found:
            continue
        # Some rules add a line, which moves all others
        new = chance.choice(sorted({mutant.rstrip("\n") for _, mutant, *_ in found}))
        if "\n" in new:
            continue
        text = "".join([*lines[:number], new + "\n", *lines[number + 1:]])
        yield Fault("drawn", name, files[name], f"{number + 1}: {line.strip()}  ->  {new.strip()}", text)


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
        undo = run("patch", "-R", "-s", "-f", "-r", "-", "-o", "-", name, input=head + chance.choice(hunks))
        if undo.returncode == 0:
            subject = run("git", "log", "-1", "--format=%h %s", number).stdout.strip()
            yield Fault("undone", name, files[name], subject, undo.stdout)


def code(name):
    """The machine code of a file in the first build."""
    folder = BUILD / BUILDS[0]
    output = next(entry["output"] for entry in json.loads((folder / "compile_commands.json").read_text())
                  if entry["file"].endswith("src/" + name))
    done = run("ninja", "-C", folder, output)
    return run("objdump", "-drs", "-j", ".text", folder / output).stdout if done.returncode == 0 else None


def build(topic):
    for folder in BUILDS:
        more = [f"tests/unit/{unit}" for unit in topic_words(topic)[0]] if folder == "fork" else []
        done = run("scripts/ninja", f"build/{folder}", PROGRAM, *more)
        if done.returncode:
            raise ProgramError(done.stdout + done.stderr)


def topic_words(topic):
    """The names of its unit tests, and pytest's words for the others, as tests/meson.build lists them."""
    listed = json.loads((BUILD / "tests/meson-info/intro-tests.json").read_text())
    words = next(test["cmd"] for test in listed if test["name"] == topic)
    units = [unit[1] for word in words if (unit := re.search(r"\[(test-[\w-]+)\]$", word))]
    return units, [word for word in words if re.match(r"tests/(?!static)", word)]


def failure(topic):
    """The first test that fails, or None."""
    units, paths = topic_words(topic)
    end = time.monotonic() + LIMIT_S
    ways = [["tests/static/test_unit.py", "-k", " or ".join(f"{unit}]" for unit in units)]] if units else []
    ways += [["-m", "not slow", *paths], ["-m", "slow", *paths]]
    for words in ways:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "--dist", "loadgroup", "-rfE",
                   "--show-capture=no", "--tb=line", *words]
        process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=max(1, end - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as e:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate()
            if isinstance(e, KeyboardInterrupt):
                raise
        if found := re.search(r"^(?:FAILED|ERROR) (.*)", output, re.M):
            return found[1][:200]
        if process.returncode not in (0, 2, 5):
            return output.splitlines()[-1][:200] if output else f"exit status {process.returncode}"
        if time.monotonic() >= end:
            break
    return None


def try_fault(fault, before):
    path = ROOT / fault.file
    since = time.monotonic()
    path.write_text(fault.text)
    try:
        changed = code(fault.file)
        if changed is None or changed == before:
            return False
        build(fault.topic)
        found = failure(fault.topic)
        fault.outcome, fault.by = ("found", found) if found else ("survived", "")
        fault.took_s = round(time.monotonic() - since)
    finally:
        run("git", "checkout", "-q", "--", fault.file)
        os.utime(path)
    return True


def report(seed, faults):
    REPORTS.mkdir(parents=True, exist_ok=True)
    rows = [{k: v for k, v in asdict(fault).items() if k != "text"} for fault in faults]
    (REPORTS / "mutants.json").write_text(json.dumps({"seed": seed, "faults": rows}, indent=1) + "\n")


def main(options):
    files = topics()
    if run("git", "status", "--porcelain", "--", *files).stdout:
        raise ProgramError("our own files have changes that are not committed, and are about to be broken: "
                           "commit or stash them")
    seed = options.seed or random.randrange(1 << 32)
    say(f"{options.number} faults by SEED={seed}")
    chance = random.Random(seed)
    sources = drawn(chance, files), undone(chance, files)
    faults, before = [], {}
    try:
        while len(faults) < options.number:
            fault = next(sources[len(faults) % 2], None)
            if fault is None:
                raise ProgramError("no more commits can be undone: is this a shallow clone?")
            if fault.file not in before:
                before[fault.file] = code(fault.file)
            if try_fault(fault, before[fault.file]):
                faults.append(fault)
                say(f"{len(faults)}. {fault.outcome} after {fault.took_s:.0f} s, {fault.kind}, {fault.file} "
                    f"{fault.what}" + f"\n      by {fault.by}" * bool(fault.by))
                report(seed, faults)
    finally:
        say("building QEMU as it was")
        for topic in set(files.values()):
            build(topic)
    found = sum(fault.outcome == "found" for fault in faults)
    print(f"{found} of {len(faults)} faults were found; SEED={seed}; {shlex.quote(str(REPORTS / 'mutants.json'))}")


if __name__ == "__main__":
    args = cli.parser(__doc__)
    args.add_argument("--number", type=int, default=24, help="faults, half of each kind (default: %(default)s)")
    args.add_argument("--seed", type=int, help="draw the same faults again (default: a random one)")
    cli.main("mutants", main, args.parse_args())
