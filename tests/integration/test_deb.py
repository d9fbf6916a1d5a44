# SPDX-License-Identifier: GPL-2.0-or-later
"""The Debian package: QEMU runs at its prefix, and finds its files there and the distribution's."""
import subprocess

import pytest

from tests.lab.paths import ROOT
from tests.lab.text import search

# The build
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_deb(tmp_path):
    made = subprocess.run([ROOT / "scripts" / "deb"], capture_output=True, text=True, check=True)
    deb = ROOT / search(r"wrote (\S+)", made.stderr)[1]
    needs = subprocess.run(["dpkg-deb", "--field", deb, "Depends"], capture_output=True, text=True, check=True).stdout
    assert "libglib2.0" in needs
    subprocess.run(["dpkg", "-x", deb, tmp_path], check=True)
    # The package can be at any prefix, not only at /opt: no file contains the build's directory.
    prefix = tmp_path / "opt" / "qemu-fault-exits"
    run = subprocess.run([prefix / "bin" / "qemu-system-x86_64", "-accel", "tcg", "-display", "none", "-k", "de",
                          "-device", "virtio-net", "-monitor", "stdio", "-S"],
                         input="info status\nquit\n", capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "paused" in run.stdout, run.stdout + run.stderr
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")} == {"opt/qemu-fault-exits", "usr/share"}
