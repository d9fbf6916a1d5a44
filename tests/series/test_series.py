# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU builds after each patch, the series applies to a newer QEMU, and, in a checkout with a small series of
its own, the tool keeps patches and commits equal and finds errors."""
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE = "01-fixes/0001-migration-say-one.patch"


def run(*command: str | Path, cwd: Path = ROOT, rc: int = 0, env: Mapping[str, str] = {}) -> str:
    done = subprocess.run(command, cwd=cwd, text=True, env={**os.environ, **env}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == rc, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_builds():
    run("scripts/series", "check", "--build")


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_newer_qemu():
    """Patches that upstream could take on their own apply to QEMU 10.2, which builds, and recovers."""
    source = run("scripts/fetch", "qemu-10.2").splitlines()[-1]
    tried = run("scripts/series", "try", source, "--build")
    alone = [str(file.relative_to(ROOT / "patches"))[:-len(file.name) + 4]
             for file in (ROOT / "patches").glob("[0-9][0-9]-*/*.patch") if "\nUpstream: yes\n" in file.read_text()]
    assert len(alone) > 30
    for patch in alone:
        assert re.search(rf"^{patch} .*: (applies|is left out)", tried, re.M), (patch, tried)
    for test in ("postcopy/recovery/plain", "postcopy/preempt/recovery/tls/psk", "multifd+postcopy/preempt/plain",
                 "multifd/unix/silent-connection", "multifd/unix/fixed-values", "multifd/unix/cancel/unresponsive",
                 "cancel/src/while-connecting", "postcopy/stopped", "postcopy/no-migrate", "locked-disk",
                 "multifd/file/mapped-ram/truncated"):
        output = run("tests/qtest/migration-test", "--full", "-m", "slow", "-p", f"/x86_64/migration/{test}",
                     cwd=ROOT / "build/try/fork",
                     env={"QTEST_QEMU_BINARY": "./qemu-system-x86_64", "QTEST_QEMU_MACHINE_TYPE": "pc"})
        assert f"ok 1 /x86_64/migration/{test}" in output, output


# A QEMU of one file and a VERSION, with a series of three patches in two themes, and a file of ours that belongs
# to the last one

IDENTITY = {f"GIT_{who}_{what}": word for who in ("AUTHOR", "COMMITTER")
            for what, word in (("NAME", "A"), ("EMAIL", "a@example.org"))}


@dataclass
class Checkout:
    root: Path

    def git(self, *command: str, tree: str = "build/src") -> str:
        return run("git", *command, cwd=self.root / tree, env=IDENTITY).strip()

    def commit(self, subject: str, theme: str, text: str, upstream: str) -> None:
        (self.root / "build/src/migration.txt").write_text(text)
        self.git("commit", "-qam", f"migration: {subject}\n\nThe reason is that it has to be said.\n\n"
                 f"Found by reading.\n\nPresent in 10.0.\n\nUpstream: {upstream}\nTheme: {theme}")

    def series(self, *command: str, rc: int = 0) -> str:
        return run("scripts/series", *command, cwd=self.root, rc=rc)

    def fails(self, *command: str) -> str:
        return self.series(*command, rc=1)

    def edit(self, name: str, old: str, new: str) -> None:
        file = self.root / name
        text, count = re.subn(old, new, file.read_text(), count=1, flags=re.M | re.S)
        assert count == 1, file
        file.write_text(text)

    def patches(self) -> dict[str, str]:
        folder = self.root / "patches"
        return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


PRISTINE = "".join(f"{n}\n" for n in range(20))
FIXED = PRISTINE.replace("\n5\n", "\n5\none\n")
LISTED = FIXED.replace("\n15\n", "\n15\n'x'] }\n")
LAST = LISTED.replace("'x'] }\n", "'x',\n  'y'] }\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    here = Checkout(tmp_path_factory.mktemp("series") / "checkout")
    shutil.copytree(ROOT / "scripts", here.root / "scripts")
    here.git("init", "-q", tree=".")
    for name, text in {".gitignore": "/build/\n", "patches/series": "# In this order\n",
                       "patches/overlay": "02-feature/0002 migration/*\n",
                       "patches/01-fixes/SUBJECT": "migration: fix it\n",
                       "patches/02-feature/SUBJECT": "migration: do more\n",
                       "migration/ours.c": "ours\n", "qemu/VERSION": "10.0.1\n",
                       "qemu/configure": "", "qemu/migration.txt": PRISTINE}.items():
        (here.root / name).parent.mkdir(parents=True, exist_ok=True)
        (here.root / name).write_text(text)
    (here.root / "qemu/configure").chmod(0o755)
    run("scripts/pristine", here.root / "build/src", here.root / "qemu", cwd=here.root)
    here.series("apply")
    here.commit("say one", "01-fixes", FIXED, "yes")
    here.commit("begin a list", "02-feature", LISTED, "with-feature")
    here.commit("add to the list", "02-feature", LAST, "with-feature")
    here.series("refresh")
    return here


@pytest.fixture
def checkout(made, tmp_path):
    shutil.copytree(made.root, tmp_path / "checkout", symlinks=True)
    here = Checkout(tmp_path / "checkout")
    (here.root / "build/src/migration/ours.c").unlink()
    here.series("apply")
    return here


def test_round_trip(checkout):
    assert "3 patches in 2 themes" in checkout.series("check")
    before = checkout.patches()
    assert set(before) > {ONE, "02-feature/0002-migration-add-to-the-list.patch"}
    tip = checkout.git("rev-parse", "HEAD")
    checkout.git("reset", "-q", "--hard", "pristine")
    checkout.git("update-ref", "refs/series/applied", "pristine")
    (checkout.root / "build/src/.git/series-state").unlink()
    checkout.series("apply")
    assert checkout.git("rev-parse", "HEAD") == tip
    assert (checkout.root / "build/src/migration/ours.c").readlink() == checkout.root / "migration/ours.c"
    checkout.series("refresh")
    assert checkout.patches() == before


def test_numbers_follow_the_commits(checkout):
    """A removed patch's number is reused, and patches/overlay follows."""
    (checkout.root / "build/src/migration.txt").write_text(PRISTINE)
    assert "has edits" in checkout.fails("refresh")
    checkout.git("checkout", "-q", "migration.txt")
    last = checkout.git("rev-parse", "HEAD")
    checkout.git("reset", "-q", "--soft", "HEAD~2")
    checkout.git("commit", "-q", "-C", last)
    checkout.series("refresh")
    assert [name for name in checkout.patches() if name.startswith("02-feature/0")] == \
        ["02-feature/0001-migration-add-to-the-list.patch"]
    assert (checkout.root / "patches/overlay").read_text() == "02-feature/0001 migration/*\n"
    checkout.series("check")


@pytest.mark.parametrize("change, error", [
    (["commit", "-q", "--amend", "-m", "migration: say"], "names no theme"),
    (["commit", "-q", "--amend", "-m", "migration: say\n\nTheme: 01-fixes"], "comes after one of 02-feature"),
    (["commit", "-q", "--allow-empty", "-m", "migration: say\n\nTheme: 02-feature"], "changes nothing"),
], ids=["theme", "order", "empty"])
def test_refresh_refuses(checkout, change, error):
    before = checkout.patches()
    checkout.git(*change)
    assert error in checkout.fails("refresh") and checkout.patches() == before


def test_rebase_keeps_local_commits(checkout):
    checkout.commit("end", "02-feature", LAST + "end\n", "with-feature")
    checkout.edit(f"patches/{ONE}", r"^\+one$", "+first")
    assert "scripts/series rebase keeps them" in checkout.fails("apply")
    checkout.series("rebase")
    assert (checkout.root / "build/src/migration.txt").read_text() == LAST.replace("one\n", "first\n") + "end\n"
    checkout.series("refresh")
    assert "4 patches in 2 themes" in checkout.series("check")


def test_branch(checkout):
    checkout.series("branch")

    def log(wanted: str) -> list[str]:
        return checkout.git("log", "--reverse", f"--format={wanted}", "--name-only", tree="build/branch").split("\n")
    assert [line for line in log("%s") if line] == [
        "QEMU 10.0.1", "VERSION", "configure", "migration.txt",
        "migration: fix it", "migration: say one", "migration.txt",
        "migration: do more", "migration: begin a list", "migration.txt",
        "migration: add to the list", "migration.txt", "migration/ours.c"]
    assert "  migration: begin a list" in log("%b")
    assert not [line for line in log("%b") if line.startswith(("Patch: ", "Upstream: "))]


def overlap(here: Checkout) -> None:
    here.commit("rewrite it", "02-feature", LAST.replace("one\n", "two\n"), "with-feature")
    here.series("refresh")


def rename_theme(here: Checkout) -> None:
    here.edit("patches/series", "^01-", "00-")
    (here.root / "patches/01-fixes").rename(here.root / "patches/00-fixes")


def reorder(here: Checkout) -> None:
    here.edit(f"patches/{ONE}", "^Upstream: yes", "Upstream: tests-only")
    here.edit("patches/02-feature/0001-migration-begin-a-list.patch", "^Upstream: .*?\n", "Upstream: yes\n")


CHECKS: dict[str, tuple[Callable[[Checkout], object], str]] = {
    "overlap": (overlap, "removes a line that patches/01-fixes/0001"),
    "unlisted": (lambda c: c.edit("patches/series", r"^01-fixes.*?\n", ""), "is not in patches/series"),
    "missing": (lambda c: (c.root / "patches" / ONE).unlink(), "there is no such file"),
    "theme's number": (rename_theme, "is number 1"),
    "no cover letter": (lambda c: (c.root / "patches/01-fixes/SUBJECT").unlink(), "has no SUBJECT"),
    "subject": (lambda c: c.edit(f"patches/{ONE}", r"^Subject: .*?\n\n", "Subject: [PATCH] Mend it.\n\n"),
                "the subject is not like"),
    "long subject": (lambda c: c.edit(f"patches/{ONE}", "say one", "say " + 70 * "o"), "more than 76"),
    "no reason": (lambda c: c.edit(f"patches/{ONE}", "^The reason.*?\n\n", ""), "gives no reason"),
    "no mail": (lambda c: c.edit(f"patches/{ONE}", "^---\n", ""), "is no patch in mail format"),
    "word": (lambda c: c.edit(f"patches/{ONE}", "^Upstream: yes", "Upstream: maybe"), "needs one line"),
    "order": (reorder, "comes after one that is not"),
    "signed": (lambda c: c.edit(f"patches/{ONE}", "^Upstream: ", "Signed-off-by: A <a@example.org>\nUpstream: "),
               "the person who sends it signs it"),
    "not found": (lambda c: c.edit(f"patches/{ONE}", "^Found by reading.", "It is so."), "how it was found"),
    "nowhere": (lambda c: c.edit(f"patches/{ONE}", "^Present in 10.0.", "It is so."), "does not say where the fault"),
    "of ours": (lambda c: c.edit(f"patches/{ONE}", "by reading", "by make fuzz"), "which upstream lacks"),
    "conflict": (lambda c: c.edit(f"patches/{ONE}", "^ 5$", " five"), "does not apply"),
    "bytes": (lambda c: c.edit(f"patches/{ONE}", r"^ migration.txt \|", "  migration.txt |"),
              "is not as scripts/series refresh writes it"),
    "overlay's patch": (lambda c: c.edit("patches/overlay", "/0002", "/0009"), "which is no patch"),
    "overlay's file": (lambda c: c.edit("patches/overlay", "^.*?\n", ""), "no line in patches/overlay matches"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check_finds(checkout, name):
    change, error = CHECKS[name]
    checkout.series("check")
    change(checkout)
    assert error in checkout.fails("check")


def test_alone(checkout):
    """A theme that upstream could take applies without the themes before it."""
    checkout.edit("patches/02-feature/0001-migration-begin-a-list.patch", "with-feature", "yes")
    checkout.edit("patches/02-feature/0002-migration-add-to-the-list.patch", "with-feature", "yes")
    checkout.series("rebase")
    assert "02-feature applies by itself" in checkout.series("check")
    checkout.commit("follow", "03-next", LAST.replace("'y'] }\n", "'y',\n  'z'] }\n"), "yes")
    (checkout.root / "patches/03-next").mkdir()
    (checkout.root / "patches/03-next/SUBJECT").write_text("migration: go on\n")
    checkout.series("refresh")
    assert "without the themes before it" in checkout.fails("check")


def test_each_patch_is_built_once(checkout, tmp_path, monkeypatch):
    """A failing build names its patch, and a successful build is not repeated, not even in another checkout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("fork", "fork-aarch64"):
        (checkout.root / "build" / name).mkdir()
        (checkout.root / "build" / name / "config.status").write_text(
            "printf '%s\\n' 'rule grep' ' command = echo built >>built; ! grep wrong $in && cp $in $out && sleep 0.02' "
            "'build qemu-system-x86_64: grep ../src/migration.txt' >build.ninja\n")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "aarch64-linux-gnu-gcc").write_text("#!/bin/sh\necho 1\n")
    (bin_ / "aarch64-linux-gnu-gcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")

    def lines(text: str) -> list[bool]:
        """For each patch, whether it had been built before."""
        return [line.endswith("built before") for line in text.splitlines() if re.match(r"series: \d/", line)]
    assert lines(checkout.series("check", "--build")) == [False] * 3
    assert lines(checkout.series("check", "--build")) == [True] * 3
    assert (checkout.root / "build/series/fork/built").read_text() == "built\n" * 3
    checkout.commit("say what is wrong", "02-feature", LAST + "wrong\n", "with-feature")
    checkout.commit("mend it", "02-feature", LAST + "wrong\nright\n", "with-feature")
    checkout.series("refresh")
    failed = checkout.fails("check", "--build")
    assert lines(failed) == [True] * 3 + [False] and "build/series/log/02-feature-0003.log" in failed
    (checkout.root / "migration/ours.c").write_text("changed\n")
    assert lines(checkout.fails("check", "--build")) == [True, True, False, False]


def test_another_qemu(checkout):
    """Conflicting patches are reported and left out; a patch for that version replaces one, and may be stale."""
    qemu = checkout.root / "qemu"
    (qemu / "VERSION").write_text("10.2.0\n")
    (qemu / "migration.txt").write_text(PRISTINE.replace("\n5\n", "\nfive\n"))
    tried = checkout.series("try", str(qemu))
    assert f"{ONE[:13]} migration: say one: conflicts in migration.txt" in tried
    assert "* 01-fixes: 0 of 1" in tried and "* 02-feature: 2 of 2" in tried and "* all: 2 of 3" in tried
    there = checkout.root / "build/try/src"
    (there / "migration.txt").write_text((there / "migration.txt").read_text().replace("five\n", "five\none\n"))
    checkout.git("commit", "-qam", f"migration: say one\n\nAs before.\n\nPatch: {ONE}", tree="build/try/src")
    checkout.series("try", "--port", ONE[:13])
    assert "* 01-fixes: 1 of 1" in checkout.series("try", str(qemu))
    checkout.series("check")
    checkout.edit(f"patches/10.2/{ONE}", "^Port-of: ", "Port-of: 0")
    assert "has changed since" in checkout.fails("check")
    port = checkout.root / "patches/10.2" / ONE
    port.rename(port.with_name("0002-x.patch"))
    assert "belongs to no patch" in checkout.fails("check")
    (checkout.root / "patches/10.2/upstream").write_text(
        "say-nothing abc has it\nmigration-add-to-the-list abc has it\n")
    port.with_name("0002-x.patch").unlink()
    assert "10.2/upstream: say-nothing is no patch" in checkout.fails("check")
    assert "* 02-feature: 1 of 2, 1 left out" in checkout.series("try", str(qemu))
