# SPDX-License-Identifier: GPL-2.0-or-later
"""QEMU builds after each patch and without each theme, and the check of the series finds what is wrong."""
import difflib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALONE = "05-lab/0001-target-i386-tcg-do-not-write-hflags2-of-another-CPU.patch"
PORT = "10.2/02-postcopy-fixes/0008-migration-do-not-run-a-guest-whose-memory-will-not-come.patch"


def run(root, *command):
    return subprocess.run(["scripts/series", *command], cwd=root, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_builds():
    done = run(ROOT, "check", "--build")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_newer_qemu():
    """What upstream could take alone applies to QEMU 10.2, builds, and recovers."""
    source = subprocess.run(["scripts/fetch", "qemu-10.2"], cwd=ROOT, text=True, check=True,
                            stdout=subprocess.PIPE).stdout.strip()
    done = run(ROOT, "try", source, "--build")
    assert done.returncode == 0, done.stdout
    [report] = (ROOT / "build/reports").glob("try-10.2.*.json")
    alone = [line for line in json.loads(report.read_text()) if line["upstream"] == "yes"]
    assert len(alone) > 30 and not [line for line in alone if line["conflicts"]], alone
    for test in ("postcopy/recovery/plain", "postcopy/preempt/recovery/tls/psk", "multifd+postcopy/preempt/plain"):
        done = subprocess.run(["tests/qtest/migration-test", "--full", "-m", "slow", "-p", f"/x86_64/migration/{test}"],
                              cwd=ROOT / "build/try/fork", text=True, timeout=600,
                              env={**os.environ, "QTEST_QEMU_BINARY": "./qemu-system-x86_64"},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0 and f"ok 1 /x86_64/migration/{test}" in done.stdout, done.stdout


def edit(old, new, *, file=ALONE):
    def change(patches):
        text = (patches / file).read_text()
        assert re.search(old, text, re.M | re.S)
        (patches / file).write_text(re.sub(old, new, text, count=1, flags=re.M | re.S))
    return change


def rewrite(patches):
    """A patch that rewrites a line of another one."""
    old = subprocess.run(["git", "show", "refs/series/applied:migration/socket.c"], text=True,
                         cwd=ROOT / "build/src", stdout=subprocess.PIPE, check=True).stdout
    new = old.replace("Nor must the last segment of a page", "Nor that of a page")
    diff = "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True),
                                        "a/migration/socket.c", "b/migration/socket.c"))
    mail = (patches / ALONE).read_text().partition("diff --git")[0]
    theme, _, name = (patches / "series").read_text().splitlines()[-1].partition("/")
    last = f"{theme}/{int(name[:4]) + 1:04}-x.patch"
    (patches / last).write_text(
        mail.replace("Upstream: yes", "Upstream: with-feature")
        + f"diff --git a/migration/socket.c b/migration/socket.c\n{diff}")
    with (patches / "series").open("a") as series:
        series.write(f"{last}\n")


@pytest.mark.slow
@pytest.mark.parametrize("change, error", [
    (rewrite, "-x.patch removes a line that patches/02-postcopy-fixes/0003"),
    (lambda patches: (patches / ALONE).rename(patches / "05-lab/0004-x.patch"), "is not in patches/series"),
    (edit("^05-lab/0001.*?\n", "", file="series"), "is not in patches/series"),
    (edit("^02-", "03-", file="series"), "is number"),
    (edit(r"^Subject: .*?\n\n", "Subject: [PATCH] Mend it.\n\n"), "the subject is not like"),
    (edit("\n\n.*?\n\nUpstream", "\n\nUpstream"), "gives no reason"),
    (edit("^Upstream: yes", "Upstream: maybe"), "needs one line"),
    (edit("^Upstream: yes", "Upstream: tests-only"), "comes after one that is not"),
    (edit("^-    env->hflags2", "-    env->hflags3"), "does not apply"),
    (edit("^ (target/i386.*?) 6 ", r" \1 7 "), "is not as scripts/series refresh writes it"),
    (edit("^# needs: 12-clock-arm.*?\n", "", file="series"), "uses migration/guest-time-gap.c of 10-guest-time"),
    (edit("^# needs: 14-async-pf.*?\n", "", file="series"), "adds to a list"),
    (edit("^06-inject/0001", "07-kvm/0001", file="overlay"), "which patches/overlay gives to 07-kvm/0001"),
    (edit("^06-inject/0001 ", "06-inject/0009 ", file="overlay"), "which is no patch"),
    (edit("^06-inject/0001.*?\n", "", file="overlay"), "no line in patches/overlay matches"),
    (edit("^Port-of: ", "Port-of: 0", file=PORT), "has changed since"),
    (lambda patches: (patches / PORT).rename(patches / PORT.replace("0008-", "0009-")), "belongs to no patch"),
    (edit("^02-postcopy-fixes/0010", "02-postcopy-fixes/0099", file="10.2/upstream"), "is no patch"),
])
def test_check_finds(tmp_path, change, error):
    here = tmp_path / "checkout"
    shutil.copytree(ROOT, here, ignore=shutil.ignore_patterns(".git", "build", "__pycache__"))
    subprocess.run(["git", "init", "-q", here], check=True)
    (here / "build").mkdir()
    (here / "build/src").symlink_to((ROOT / "build/src").resolve())
    change(here / "patches")
    done = run(here, "check")
    assert done.returncode == 1 and error in done.stdout, done.stdout
