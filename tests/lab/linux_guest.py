# SPDX-License-Identifier: GPL-2.0-or-later
"""The Linux guest, with init.c as the only program: Debian's kernel for clouds, unchanged. On arm64, for which
upstream Linux has no async page faults, the lab's own kernel.

The guest neither supports migration nor takes part in it.
"""
import lzma
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab import guest, initramfs, lab
from tests.lab.paths import LAB, ROOT, SANITIZED, below

# The disk's driver, for init.c to load
MODULE = "build/guest/virtio_blk.ko"
# A newer kernel, of backports, with ptp_vmclock and phc2sys. For labs with extra=build_newer().
NEWER = ("build/guest/newer.kernel", "build/guest/newer.initrd")
# On a busy host the TSC looks unstable while the guest boots. Each character of the console is an exit: until
# init.c requests all messages, only warnings and errors go there.
WORDS = {"x86_64": ["console=ttyS0", "loglevel=5", "tsc=reliable"], "aarch64": ["console=ttyAMA0", "loglevel=5"]}
# Words for a QEMU whose guest has async page faults: on arm64 they are off by default
ASYNC_PF = {"x86_64": (), "aarch64": ("-global", "arm-cpu.kvm-sdei=on", "-global", "arm-cpu.x-kvm-async-pf=on")}
# Errors in the guest's log.
COMPLAINTS = re.compile(lab.COMPLAINTS.pattern + "|blocked for more than|Out of memory|oom-kill|soft lockup|"
                        "hard LOCKUP|rcu.*stall|segfault|[Cc]locksource.*unstable")
# Known messages of Linux 6.12: one where a processor goes off, seen without migration, with QEMU 10.0 and TCG, after
# some 60 times; another one for a named AMD processor.
KNOWN = re.compile(r"-\[ cut here \]-+[\r\n]+\[[^\n]*dl_rq->running_bw > old.*?-\[ end trace [^\n]*"
                   r"|Speculative Return Stack Overflow: WARNING", re.DOTALL)


def files(arch: str = "x86_64") -> tuple[str, str]:
    """Kernel and initial RAM disk, in the checkout and in the lab."""
    return f"build/{below('guest', arch)}/linux.kernel", f"build/{below('guest', arch)}/linux.initrd"


def _unpacked(deb: Path, patterns: dict[str, str]) -> None:
    """Extracts files of a package, whose paths match, again if the package has changed; decompresses modules of the
    kernel."""
    for name, pattern in patterns.items():
        file = ROOT / name
        stamp = file.with_suffix(".from")
        if file.exists() and stamp.exists() and stamp.read_text() == deb.name:
            continue
        tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE, check=True)
        content = subprocess.run(["tar", "-xO", "--wildcards", pattern], input=tar.stdout, stdout=subprocess.PIPE,
                                 check=True).stdout
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(lzma.decompress(content) if pattern.endswith(".xz") else content)
        stamp.write_text(deb.name)


def _archive(arch: str = "x86_64") -> initramfs.Archive:
    init = initramfs.stripped(initramfs.programs(arch)["linux-init"], arch)
    return initramfs.Archive(init, "dev", "proc", "sys")


def build(arch: str = "x86_64") -> None:
    """Make the files, again if their sources are newer."""
    kernel, initrd = files(arch)
    archive = _archive(arch)
    if arch == "x86_64":
        _unpacked(initramfs.fetched("cloud"), {kernel: "./boot/vmlinuz-*", MODULE: "*/virtio_blk.ko.xz"})
        archive.file(Path(MODULE).name, ROOT / MODULE)
    else:
        (ROOT / kernel).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(initramfs.tool(LAB / "kernel" / "build", arch).strip(), ROOT / kernel)
    archive.write(ROOT / initrd)


def build_newer() -> tuple[str, ...]:
    """Like build(), for NEWER; returns the files for a lab's extra."""
    kernel, initrd = NEWER
    driver = "build/guest/ptp_vmclock.ko"
    deb = initramfs.fetched("newer")
    _unpacked(deb, {kernel: "*/vmlinuz"})
    _unpacked(deb.with_name(deb.name.replace("linux-binary", "linux-modules")), {driver: "*/ptp_vmclock.ko.xz"})
    program = Path("/usr/sbin/phc2sys")
    if not program.exists():
        raise initramfs.BuildError("no phc2sys: scripts/deps lab")
    archive = _archive()
    archive.file("ptp_vmclock.ko", ROOT / driver)
    archive.file("phc2sys", program)
    for path, file in initramfs.libraries(program, "x86_64").items():
        archive.file(path, file)
    archive.write(ROOT / initrd)
    return NEWER


def arguments(report: str, log: str, cpus: int = 1, memory_mb: int = 160, machine: str | None = None,
              append: str = "", reboot: bool = False, newer: bool = False, arch: str = "x86_64",
              **parameters: int | str) -> list[str]:
    """Like guest.arguments(). report, log: files for init.c's reports and for the kernel's log; reboot: QEMU does not
    exit at a reset. newer: the kernel NEWER. Parameters: see init.c."""
    # With a sanitizer, a second of the kernel's own work can take half a minute.
    words = [*WORDS[arch], "panic=-1", "nowatchdog" if SANITIZED else "", append]
    words += [f"guest_{key}={value}" for key, value in parameters.items()]
    kernel, initrd = NEWER if newer else files(arch)
    return [
        *("-nodefaults", "-no-user-config", "-display", "none"), *("-no-reboot",) * (not reboot),
        *("-machine", machine or guest.MACHINE[arch], "-smp", str(cpus), "-m", str(memory_mb)),
        *("-kernel", kernel, "-initrd", initrd, "-append", " ".join(filter(None, words))),
        *("-chardev", f"file,id=report,path={report}"),
        *("-device", "virtio-serial-pci", "-device", "virtconsole,chardev=report"),
        *("-chardev", f"file,id=log,path={log}", "-serial", "chardev:log"),
    ]


def complaints(log: str) -> list[str]:
    """Lines of the kernel's log that are errors."""
    return [line for line in KNOWN.sub("", log).split("\n") if COMPLAINTS.search(line)]


class Report:
    """The reports of init.c: lines of counters, and errors."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")[:-1]       # the last one is not complete
        self.boots = lines.count("ready")
        # The addresses of counters, by kind of thread, in guest physical memory
        self.addresses = {k: int(v) for line in lines if line.startswith("at ")
                          for k, v in re.findall(r"(\w+)=(\d+)", line)}
        self.bad = [line for line in lines if line.startswith("bad")]
        self.lines = [{k: int(v) for k, v in re.findall(r"(\w+)=(-?\d+)", line)}
                      for line in lines if re.match(r"ms=\d+ .* bad=\d+$", line)]


if __name__ == "__main__":
    build(*sys.argv[1:])
