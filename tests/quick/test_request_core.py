# SPDX-License-Identifier: GPL-2.0-or-later
"""The unit test of migration/postcopy-request.c, as it is built and under ThreadSanitizer."""
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORK = ROOT / "build/fork"
NAME = "tests/unit/test-postcopy-request"


def run(*command, cwd=FORK):
    done = subprocess.run([str(word) for word in command], cwd=cwd, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def test_plain():
    assert "ok 5 /postcopy-request/stress" in run(FORK / NAME)


def test_thread_sanitizer(tmp_path):
    """What orders the threads is compiled in anew: the core, the test, QEMU's threads."""
    src = ROOT / "build/src"
    glib = run("pkg-config", "--cflags", "--libs", "glib-2.0", "gmodule-2.0").split()
    objects = sorted(FORK.glob("libqom.a.p/*.o")) + sorted(FORK.glob("libevent-loop-base.a.p/*.o"))
    binary = tmp_path / "test"
    run("cc", "-fsanitize=thread", "-g", "-O1", "-std=gnu11", "-D_GNU_SOURCE", "-fwrapv",
        "-fno-strict-aliasing", "-Wno-tsan", "-iquote", FORK, "-iquote", src,
        "-iquote", src / "include", "-iquote", src / "host/include/x86_64",
        "-iquote", src / "host/include/generic", "-I", FORK, "-o", binary,
        src / f"{NAME}.c", src / "migration/postcopy-request.c",
        src / "util/qemu-thread-posix.c", *objects,
        "-Wl,--start-group", FORK / "libqemuutil.a", "-Wl,--end-group", *glib, "-lm")
    # Without randomised addresses, which older sanitizers cannot cope with.
    output = run("setarch", "--addr-no-randomize", binary)
    assert "ok 5 /postcopy-request/stress" in output
    assert "WARNING: ThreadSanitizer" not in output, output
