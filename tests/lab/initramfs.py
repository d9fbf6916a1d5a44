# SPDX-License-Identifier: GPL-2.0-or-later
"""The initramfs of the lab's first-level machine: a cpio archive in the "newc" format.

What lies in build/ on the host lies in /lab/build/ there, stripped, with the shared
libraries and firmware at the paths that they have on the host.
"""
import fcntl
import functools
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tests.lab.paths import BUILD, LAB, ROOT, TESTED, below, qemu
from tests.lab.text import search

CROSS = {"x86_64": "", "aarch64": "aarch64-linux-gnu-"}
# What QEMU's pc, q35 and virt machines read.
FIRMWARE = {
    "x86_64": (
        "bios.bin", "bios-256k.bin", "bios-microvm.bin", "kvmvapic.bin", "linuxboot_dma.bin",
        "multiboot_dma.bin", "pvh.bin", "vgabios-stdvga.bin", "efi-e1000.rom", "efi-e1000e.rom",
        "efi-virtio.rom",
    ),
    "aarch64": ("efi-virtio.rom",),
}
# Of the programs of this directory
ONLY_X86 = ("clock-difference", "tsc-khz")


class BuildError(Exception):
    pass


def tool(*argv: str | Path) -> str:
    p = subprocess.run(argv, capture_output=True, text=True)
    if p.returncode:
        raise BuildError(f"{' '.join(map(str, argv))} failed: {p.stderr.strip()}")
    return p.stdout


def compiled(source: Path, arch: str = "x86_64") -> Path:
    """The static program of one C source file of ours, in build/lab/bin."""
    out = BUILD / "lab" / below("bin", arch) / source.stem
    if not out.exists() or out.stat().st_mtime < source.stat().st_mtime:
        out.parent.mkdir(parents=True, exist_ok=True)
        tmp = out.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        tool(f"{CROSS[arch]}gcc", "-O2", "-Wall", "-Wextra", "-static", "-pthread", "-o", tmp, source)
        tmp.rename(out)
    return out


def stripped(path: Path, arch: str) -> Path:
    """A copy without symbols, kept until the file changes."""
    st = path.stat()
    key = f"{str(path.resolve()).strip('/').replace('/', '%')}-{st.st_size}-{st.st_mtime_ns}"
    out = BUILD / "lab" / "stripped" / key
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in out.parent.glob(key.rsplit("-", 2)[0] + "-*"):
            old.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as f:
            pass
        tool(f"{CROSS[arch]}strip", "-o", f.name, path)
        os.rename(f.name, out)
    return out


def _libraries(path: Path, arch: str) -> dict[str, Path]:
    """Shared libraries of a program, with the loader: {path in the archive: file}; none if it is
    static."""
    if arch != "x86_64":
        return _foreign_libraries(path, arch, {})
    p = subprocess.run(["ldd", path], capture_output=True, text=True)
    libs: dict[str, Path] = {}
    for line in p.stdout.splitlines():
        if "not found" in line:
            raise BuildError(f"{path} needs a library that is not installed: {line.strip()}")
        libs |= {w: Path(w) for w in line.split() if w.startswith("/")}
    return libs


@functools.cache
def _packages(arch: str) -> Path:
    """The directory with that architecture's packages."""
    return Path(tool(ROOT / "scripts" / "fetch", arch).strip())


def _foreign_libraries(path: Path, arch: str, found: dict[str, Path]) -> dict[str, Path]:
    """What ldd would tell, in the directories of the cross compiler and of scripts/fetch."""
    triplet = f"{arch}-linux-gnu"
    dirs = [Path(f"/usr/{triplet}/lib"), *(_packages(arch) / top / triplet for top in ("usr/lib", "lib"))]
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", path)):
        if f"/lib/{name}" not in found:
            file = next((d / name for d in dirs if (d / name).exists()), None)
            if not file:
                raise BuildError(f"{path} needs {name}, which is not in {', '.join(map(str, dirs))}")
            found[f"/lib/{name}"] = file
            _foreign_libraries(file, arch, found)
    return found


def _is_elf(path: Path) -> bool:
    with open(path, "rb") as f:
        return f.read(4) == b"\x7fELF"


def firmware_dirs(arch: str = "x86_64") -> list[str]:
    """QEMU's --firmwarepath."""
    header = BUILD / below("fork", arch) / "config-host.h"
    try:
        line = search("^#define CONFIG_QEMU_FIRMWAREPATH (.*)", header.read_text())
    except OSError as e:
        raise BuildError(f"{e}: run make first") from None
    return re.findall('"(.*?)"', line[1])


class Cpio:
    def __init__(self, f: BinaryIO) -> None:
        self.f = f
        self.seen: set[str] = set()
        self.inode = 0

    def _entry(self, path: str, mode: int, data: bytes = b"", rdev: tuple[int, int] = (0, 0)) -> None:
        self.inode += 1
        name = path.encode() + b"\0"
        fields = (self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *rdev, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % x for x in fields) + name
        self.f.write(head + bytes(-len(head) % 4))
        self.f.write(data)
        self.f.write(bytes(-len(data) % 4))

    def _add(self, path: str, mode: int, data: bytes = b"", rdev: tuple[int, int] = (0, 0)) -> None:
        path = path.strip("/")
        if path in self.seen:
            return
        self.seen.add(path)
        if "/" in path:
            self.directory(os.path.dirname(path))
        self._entry(path, mode, data, rdev)

    def directory(self, path: str) -> None:
        self._add(path, 0o040755)

    def file(self, path: str, source: Path) -> None:
        executable = os.access(source, os.X_OK)
        self._add(path, 0o100755 if executable else 0o100644, data=source.read_bytes())

    def text(self, path: str, text: str) -> None:
        self._add(path, 0o100644, data=text.encode())

    def link(self, path: str, target: str) -> None:
        self._add(path, 0o120777, data=target.encode())

    def console(self) -> None:
        self._add("dev/console", 0o020600, rdev=(5, 1))

    def end(self) -> None:
        self._entry("TRAILER!!!", 0)


def _programs(arch: str) -> Iterator[tuple[str, Path]]:
    """What of build/ goes in: (path below /lab, file)."""
    fork = f"build/{below('fork', arch)}"
    ours = {p.stem for p in (ROOT / "tests" / "qtest").glob("*.c")}
    names = [f"{fork}/qemu-img", f"{fork}/tests/unit/test-snapshot-holes",
             *(qemu(arch, name) for name in sorted({"fork", "stock", "inject", TESTED})),
             f"build/{below('bench', arch)}/demand-paging"]
    names += [f"{fork}/tests/qtest/{name}" for name in sorted(ours | {"migration-test"})]
    for name in names:
        yield name, ROOT / name
    guest = below("guest", arch)
    for path in sorted((BUILD / guest).glob("*")):
        yield f"build/{guest}/{path.name}", path
    for source in sorted(LAB.glob("*.c")):
        if arch == "x86_64" or source.stem not in ONLY_X86:
            yield f"build/lab/{below('bin', arch)}/{source.stem}", compiled(source, arch)


def _busybox(arch: str) -> tuple[Path, list[str]]:
    """The static program, and the names of its applets."""
    ours = Path("/bin/busybox")
    if not ours.exists() or _libraries(ours, "x86_64"):
        raise BuildError("no static /bin/busybox: scripts/deps lab")
    applets = tool(ours, "--list").split()
    if arch != "x86_64":
        packages = _packages(arch)
        ours = next(p for p in (packages / "bin/busybox", packages / "usr/bin/busybox") if p.exists())
    return ours, applets


def build(out: Path, extra: Iterable[str] = (), arch: str = "x86_64") -> None:
    """Write the archive to out. extra: more files of the checkout, by their path in it, and
    programs of the host, by their absolute path."""
    if not (ROOT / qemu(arch)).exists():
        raise BuildError(f"no {qemu(arch)}: run make ARCH={arch} first")
    busybox, applets = _busybox(arch)

    files = [(f"lab/{name}", p) for name, p in _programs(arch) if p.is_file()]
    files += [(e if os.path.isabs(e) else f"lab/{e}", ROOT / e) for e in extra]
    out.parent.mkdir(parents=True, exist_ok=True)
    (BUILD / "lab").mkdir(exist_ok=True)
    # One at a time makes the stripped copies.
    with open(BUILD / "lab" / ".lock", "w") as lock, open(out, "wb") as f:
        fcntl.flock(lock, fcntl.LOCK_EX)
        c = Cpio(f)
        for d in ("dev", "proc", "sys", "tmp", "root", "lab", "var/tmp"):
            c.directory(d)
        c.console()
        c.file("init", LAB / "init")
        c.file("bin/agent", compiled(LAB / "agent.c", arch))
        c.file("bin/busybox", busybox)
        for applet in applets:
            c.link(f"bin/{applet}", "busybox")
        c.link("sbin", "bin")
        c.link("usr/bin", "../bin")
        for name, path in files:
            elf = _is_elf(path)
            for lib, file in _libraries(path, arch).items() if elf else ():
                c.file(lib, stripped(file, arch))
            # Guest payloads may be ELF files of which QEMU needs all.
            strip = elf and not name.startswith("lab/build/guest")
            c.file(name, stripped(path, arch) if strip else path)
        dirs = firmware_dirs(arch)
        for name in FIRMWARE[arch]:
            for d in dirs:
                path = Path(d, name)
                if path.exists():
                    c.file(str(path), path)
                    break
            else:
                raise BuildError(f"no firmware {name} in {':'.join(dirs)}: scripts/deps lab")
        c.text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        c.text("etc/group", "root:x:0:\n")
        c.text("etc/hosts", "127.0.0.1 localhost\n")
        c.end()
