# SPDX-License-Identifier: GPL-2.0-or-later
"""docs/ adds lines to the right AppArmor profiles of Debian's libvirt. No kernel enforces them here."""
import re
import shutil
import subprocess

import pytest

from tests.lab.paths import ROOT

pytestmark = pytest.mark.slow
EMULATOR = "/opt/qemu-fault-exits/bin/*"
LINES = {tuple(line.split(maxsplit=1)) for page in ("usage.md",)
         for line in re.findall(r"^/etc/apparmor[.]d/(local/.*)", (ROOT / "docs" / page).read_text(), re.M)}


def parsed(root, base, profile):
    """[(file, permissions)] of a profile, by AppArmor's parser."""
    lib = root / "usr/lib/x86_64-linux-gnu"
    done = subprocess.run([lib / "ld-linux-x86-64.so.2", "--library-path", lib, root / "usr/sbin/apparmor_parser",
                           "--skip-kernel-load", "--skip-cache", "--debug", "--base", base, base / profile],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^(?:Perms|Mode):\s+(\w+):.*Name:\s+\((.*)\)", done.stdout, re.M))


@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_profiles(tmp_path, release):
    root = ROOT / subprocess.run([ROOT / "scripts" / "fetch", f"apparmor-{release}"], text=True, check=True,
                                 stdout=subprocess.PIPE).stdout.strip()
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
