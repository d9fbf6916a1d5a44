# SPDX-License-Identifier: GPL-2.0-or-later
"""Our unit tests, as they are built, under ThreadSanitizer, and with a rule broken on purpose."""
import shlex
import subprocess

import pytest

from tests.lab.paths import BUILD, FORK

SRC = BUILD / "src"
# The test, and what of QEMU it tests.
SOURCES = {
    "test-postcopy-request": ["migration/postcopy-request.c", "migration/postcopy-meter.c"],
    "test-postcopy-place": ["migration/postcopy-place.c", "migration/postcopy-request.c",
                            "migration/postcopy-meter.c"],
    "test-postcopy-mirror": ["migration/postcopy-mirror.c"],
    "test-postcopy-async": ["migration/postcopy-async.c", "migration/postcopy-request.c",
                            "migration/postcopy-meter.c"],
    "test-snapshot-holes": ["migration/snapshot-holes.c"],
}
SKIPPED = 77  # the exit status that Meson takes for it


def output(*command, rc=0, cwd=FORK):
    done = subprocess.run([str(word) for word in command], cwd=cwd, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    if done.returncode == SKIPPED and rc == 0:
        pytest.skip(done.stdout)
    assert done.returncode == rc, f"{shlex.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def compiled(name, to, *options):
    """What orders the threads is compiled in anew: the test, what it tests, QEMU's threads."""
    glib = output("pkg-config", "--cflags", "--libs", "glib-2.0", "gmodule-2.0").split()
    objects = sorted(FORK.glob("libqom.a.p/*.o")) + sorted(FORK.glob("libevent-loop-base.a.p/*.o"))
    output("cc", *options, "-g", "-O1", "-std=gnu11", "-D_GNU_SOURCE", "-fwrapv",
           "-fno-strict-aliasing", "-iquote", FORK, "-iquote", SRC,
           "-iquote", SRC / "include", "-iquote", SRC / "host/include/x86_64",
           "-iquote", SRC / "host/include/generic", "-I", FORK, "-o", to / name,
           SRC / f"tests/unit/{name}.c", *(SRC / source for source in SOURCES[name]),
           SRC / "util/qemu-thread-posix.c", *objects,
           "-Wl,--start-group", FORK / "libqemuutil.a", "-Wl,--end-group", *glib, "-lm")
    return to / name


def passed(tap):
    assert "\nok 1 " in tap and "not ok" not in tap, tap


@pytest.mark.parametrize("name", [*SOURCES, "test-guest-time", "test-guest-time-arm"])
def test_plain(name):
    passed(output(FORK / "tests/unit" / name))


@pytest.mark.parametrize("name", SOURCES)
def test_thread_sanitizer(name, tmp_path):
    binary = compiled(name, tmp_path, "-fsanitize=thread", "-Wno-tsan")
    # Without randomised addresses, which older sanitizers cannot cope with.
    tap = output("setarch", "--addr-no-randomize", binary)
    passed(tap)
    assert "WARNING: ThreadSanitizer" not in tap, tap


def test_a_broken_wake_rule_is_found(tmp_path):
    """Who reads a fault whose page has come does not wake: a thread sleeps for ever."""
    binary = compiled("test-postcopy-place", tmp_path, "-DTEST_BREAK_WAKE_RULE", "-DLOST=3")
    assert "Bail out! A reader sleeps for ever" in output(binary, rc=1)
