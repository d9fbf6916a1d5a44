# SPDX-License-Identifier: GPL-2.0-or-later
"""The Linux guest: Debian's kernel for clouds, unchanged, with init.c as the only program.

    linux_guest.build()                     # build/guest/linux.kernel, build/guest/linux.initrd
    linux_guest.arguments(log, writers=1)   # QEMU's arguments, without accelerator and monitor
    linux_guest.Report(text).lines          # what init.c has told: a dictionary a line

It knows nothing of migration and does not take part in it.
"""
import re
import subprocess
from pathlib import Path

from tests.lab import initramfs
from tests.lab.paths import ROOT

KERNEL = "build/guest/linux.kernel"
INITRD = "build/guest/linux.initrd"
# What must not be in the guest's log.
COMPLAINTS = re.compile(r"WARNING:|BUG:|Oops|Call Trace|Kernel panic|general protection fault|"
                        r"blocked for more than|Out of memory|oom-kill|soft lockup|hard LOCKUP|rcu.*stall|segfault|"
                        r"[Cc]locksource.*unstable")


def build() -> None:
    """Both files, made anew where what they are made of is newer."""
    deb = Path(initramfs.tool(ROOT / "scripts" / "fetch", "cloud").strip())
    kernel = ROOT / KERNEL
    stamp = kernel.with_suffix(".from")
    kernel.parent.mkdir(parents=True, exist_ok=True)
    if not stamp.exists() or stamp.read_text() != deb.name:
        tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE, check=True)
        image = subprocess.run(["tar", "-xO", "--wildcards", "./boot/vmlinuz-*"], input=tar.stdout,
                               stdout=subprocess.PIPE, check=True)
        kernel.write_bytes(image.stdout)
        stamp.write_text(deb.name)
    archive = initramfs.Archive()
    for d in ("dev", "proc", "sys"):
        archive.directory(d)
    archive.console()
    archive.file("init", initramfs.stripped(initramfs.programs()["linux-init"], "x86_64"))
    archive.write(ROOT / INITRD)


def arguments(report: str, log: str, cpus: int = 1, memory_mb: int = 160, machine: str = "pc", append: str = "",
              reboot: bool = False, **parameters: int | str) -> list[str]:
    """report, log: files for what init.c tells and for the kernel's log; reboot: a reset does not
    end QEMU. Parameters: see init.c."""
    # On a busy host the TSC looks unstable while the guest boots
    words = ["console=ttyS0", "panic=-1", "tsc=reliable", append]
    words += [f"guest.{key}={value}" for key, value in parameters.items()]
    return [
        *("-nodefaults", "-no-user-config", "-display", "none"), *("-no-reboot",) * (not reboot),
        *("-machine", machine, "-smp", str(cpus), "-m", str(memory_mb)),
        *("-kernel", KERNEL, "-initrd", INITRD, "-append", " ".join(filter(None, words))),
        *("-chardev", f"file,id=report,path={report}"),
        *("-device", "virtio-serial-pci", "-device", "virtconsole,chardev=report"),
        *("-chardev", f"file,id=log,path={log}", "-serial", "chardev:log"),
    ]


class Report:
    """What init.c has said: lines of counters, and what was bad."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")[:-1]       # the last one is not complete
        self.boots = lines.count("ready")
        self.bad = [line for line in lines if line.startswith("bad")]
        self.lines = [{k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}
                      for line in lines if re.match(r"ms=\d+ .* bad=\d+$", line)]


if __name__ == "__main__":
    build()
