# SPDX-License-Identifier: GPL-2.0-or-later
"""The Debian package, and the lines that docs/ adds to AppArmor profiles of Debian's libvirt. No kernel enforces them
here."""
import re
import shutil
import subprocess

import pytest

from tests.lab.initramfs import fetched, tool
from tests.lab.paths import ROOT
from tests.lab.text import search

pytestmark = pytest.mark.slow
EMULATOR = "/opt/qemu-fault-exits/bin/*"
LINES = re.findall(r"^/etc/apparmor[.]d/(local/\S+)\s+(.*)", (ROOT / "docs/usage.md").read_text(), re.M)


def parsed(root, base, profile):
    """[(file, permissions)] of a profile, by AppArmor's parser."""
    lib = root / "usr/lib/x86_64-linux-gnu"
    text = tool(lib / "ld-linux-x86-64.so.2", "--library-path", lib, root / "usr/sbin/apparmor_parser",
                "--skip-kernel-load", "--skip-cache", "--debug", "--base", base, base / profile)
    return set(re.findall(r"^(?:Perms|Mode):\s+(\w+):.*Name:\s+\((.*)\)", text, re.M))


@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_profiles(tmp_path, release):
    root = fetched(f"apparmor-{release}")
    base = tmp_path / "apparmor.d"
    shutil.copytree(root / "etc/apparmor.d", base, symlinks=True)
    guest = base / "libvirt" / "libvirt-guest"
    template = (base / "libvirt" / "TEMPLATE.qemu").read_text()
    guest.write_text(template.replace("LIBVIRT_TEMPLATE", "libvirt-guest"))
    (base / "local/abstractions").mkdir(parents=True, exist_ok=True)
    for name in ("usr.sbin.libvirtd", "abstractions/libvirt-qemu"):  # as the package's postinst does
        (base / "local" / name).touch()
    profiles = "usr.sbin.libvirtd", "libvirt/libvirt-guest"
    before = [parsed(root, base, profile) for profile in profiles]
    for file, line in LINES:
        with (base / file).open("a") as local:
            local.write(f"{line}\n")
    libvirtd, qemu = ({name: may for may, name in parsed(root, base, profile) - old}
                      for profile, old in zip(profiles, before, strict=True))
    assert libvirtd == {EMULATOR: "x"}
    assert qemu == {EMULATOR: "rmx", "/dev/userfaultfd": "rwa"}


@pytest.mark.timeout(3600)      # The build
def test_deb(tmp_path):
    """QEMU runs at its prefix, and finds its files there and the distribution's."""
    made = subprocess.run([ROOT / "scripts" / "deb"], capture_output=True, text=True, check=True)
    deb = ROOT / search(r"wrote (\S+)", made.stderr)[1]
    assert "libglib2.0" in tool("dpkg-deb", "--field", deb, "Depends")
    tool("dpkg", "-x", deb, tmp_path)
    # The package can be at any prefix, not only at /opt: no file contains the build's directory.
    prefix = tmp_path / "opt" / "qemu-fault-exits"
    run = subprocess.run([prefix / "bin" / "qemu-system-x86_64", "-accel", "tcg", "-display", "none", "-k", "de",
                          "-device", "virtio-net", "-monitor", "stdio", "-S"],
                         input="info status\nquit\n", capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "paused" in run.stdout, run.stdout + run.stderr
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")} == {"opt/qemu-fault-exits", "usr/share"}
