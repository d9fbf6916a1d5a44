# SPDX-License-Identifier: GPL-2.0-or-later
"""The initramfs of the lab's first-level machine.

Files of build/ on the host are in /lab/build/ there, stripped, with the shared libraries and
firmware at their paths on the host.
"""
import fcntl
import functools
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.lab.paths import BUILD, LAB, ROOT, TESTED, below, qemu
from tests.lab.text import search

CROSS = {"x86_64": "", "aarch64": "aarch64-linux-gnu-"}
# Firmware that QEMU's pc, q35 and virt machines read.
FIRMWARE = {
    "x86_64": (
        "bios.bin", "bios-256k.bin", "bios-microvm.bin", "kvmvapic.bin", "linuxboot_dma.bin",
        "multiboot_dma.bin", "pvh.bin", "vgabios-stdvga.bin", "efi-e1000.rom", "efi-e1000e.rom",
        "efi-virtio.rom",
    ),
    "aarch64": ("efi-virtio.rom",),
}


class BuildError(Exception):
    pass


def tool(*argv: str | Path, stdin: str = "") -> str:
    p = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    if p.returncode:
        raise BuildError(f"{' '.join(map(str, argv))} failed: {p.stderr.strip()}")
    return p.stdout


@functools.cache
def fetched(what: str) -> Path:
    """What scripts/fetch has downloaded; of an architecture, the directory with its packages."""
    return Path(tool(ROOT / "scripts" / "fetch", what).strip())


def programs(arch: str = "x86_64") -> dict[str, Path]:
    """Programs of the checkout's meson.build, up to date, by name."""
    where = BUILD / below("tests", arch)
    if not (where / "build.ninja").exists():
        raise BuildError(f"no {where.relative_to(ROOT)}: run make guest ARCH={arch} first")
    tool(ROOT / "scripts" / "ninja", where)
    return {p.name: p for p in sorted(where.iterdir())
            if p.suffix in ("", ".bin", ".so") and p.is_file() and os.access(p, os.X_OK)}


def stripped(path: Path, arch: str) -> Path:
    """A copy without symbols, kept until the file changes."""
    st = path.stat()
    key = f"{str(path.resolve()).strip('/').replace('/', '%')}-{st.st_size}-{st.st_mtime_ns}"
    out = BUILD / "lab" / "stripped" / key
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in out.parent.glob(key.rsplit("-", 2)[0] + "-*"):
            old.unlink(missing_ok=True)
        unfinished = out.parent / f".{os.getpid()}"
        tool(f"{CROSS[arch]}strip", "-o", unfinished, path)
        os.rename(unfinished, out)
    return out


def libraries(path: Path, arch: str) -> dict[str, Path]:
    """Shared libraries of a program, with the loader: {path in the archive: file}; none if it is
    static."""
    if arch != "x86_64":
        # The compiler's own libraries, a sanitizer's for example, are beside it
        where = (fetched(arch) / f"usr/lib/{arch}-linux-gnu", Path(f"/usr/{arch}-linux-gnu/lib"))
        return {f"/lib/{name}": file for name, file in libraries_in(where, path).items()}
    p = subprocess.run(["ldd", path], capture_output=True, text=True)
    libs: dict[str, Path] = {}
    for line in p.stdout.splitlines():
        if "not found" in line:
            raise BuildError(f"{path} needs a library that is not installed: {line.strip()}")
        libs |= {w: Path(w) for w in line.split() if w.startswith("/")}
    return libs


def libraries_in(where: tuple[Path, ...], path: Path) -> dict[str, Path]:
    """Like libraries(), of a program whose libraries are in these directories: {name: file}."""
    found: dict[str, Path] = {}

    def look(path: Path) -> None:
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-d", path)):
            if name not in found:
                file = next((d / name for d in where if (d / name).exists()), None)
                if not file:
                    raise BuildError(f"{path} needs {name}, which is not in {' or '.join(map(str, where))}")
                found[name] = file
                look(file)

    look(path)
    return found


class Archive:
    """A cpio archive as Linux unpacks it. bsdtar writes it from a list in the format of mtree, so that it can contain
    files that an ordinary user cannot make. (gen_init_cpio could, too, but Debian only has it in Linux's sources.)"""

    def __init__(self, init: Path, *directories: str) -> None:
        self.entries: dict[str, tuple[str, ...]] = {}
        for path in directories:
            self.directory(path)
        self._add("dev/console", "type=char", "device=native,5,1", "mode=0600")
        self.file("init", init)

    def _add(self, path: str, *words: str) -> None:
        path = path.strip("/")
        if path not in self.entries:
            if "/" in path:
                self.directory(os.path.dirname(path))
            self.entries[path] = words

    def directory(self, path: str) -> None:
        self._add(path, "type=dir", "mode=0755")

    def file(self, path: str, source: Path) -> None:
        executable = os.access(source, os.X_OK)
        self._add(path, "type=file", f"contents={_escaped(source)}", f"mode=0{755 if executable else 644}")

    def link(self, path: str, target: str) -> None:
        self._add(path, "type=link", f"link={_escaped(target)}", "mode=0777")

    def write(self, out: Path) -> None:
        lines = ["#mtree", "/set uid=0 gid=0 nlink=1 time=0",
                 *(" ".join((f"./{_escaped(path)}", *words)) for path, words in self.entries.items())]
        tool("bsdtar", "--format=newc", "-cf", out, "@-", stdin="\n".join(lines) + "\n")


def _escaped(path: str | Path) -> str:
    """Escaped for mtree."""
    return re.sub(rb"[^!-~]|[\\#=]", lambda m: b"\\%03o" % ord(m[0]), os.fsencode(path)).decode()


def _programs(arch: str) -> list[Path]:
    """Files of build/ in the archive, as far as they exist."""
    fork = BUILD / below("fork", arch)
    ours = {p.stem for p in (ROOT / "tests" / "qtest").glob("*.c")}
    return [fork / "qemu-img", fork / "contrib/vhost-user-blk/vhost-user-blk", fork / "tests/unit/test-snapshot-holes",
            *(ROOT / qemu(arch, name) for name in sorted({"fork", "stock", "inject", TESTED})),
            *(fork / "tests/qtest" / name for name in sorted(ours | {"migration-test"})),
            *programs(arch).values(), *sorted((BUILD / below("guest", arch)).glob("linux.*"))]


def _busybox(arch: str) -> tuple[Path, list[str]]:
    """The static program, and the names of its applets."""
    ours = Path("/bin/busybox")
    if not ours.exists() or libraries(ours, "x86_64"):
        raise BuildError("no static /bin/busybox: scripts/deps lab")
    applets = tool(ours, "--list").split()
    if arch != "x86_64":
        ours = next(p for d in ("bin", "usr/bin") if (p := fetched(arch) / d / "busybox").exists())
    return ours, applets


def build(out: Path, extra: Iterable[str], arch: str) -> None:
    """Write the archive to out. extra: more files of the checkout, by their path in it, and programs of the host, by
    their absolute path."""
    if not (ROOT / qemu(arch)).exists():
        raise BuildError(f"no {qemu(arch)}: run make ARCH={arch} first")
    busybox, applets = _busybox(arch)

    files = [(f"lab/{p.relative_to(ROOT)}", p) for p in _programs(arch) if p.is_file()]
    files += [(e if os.path.isabs(e) else f"lab/{e}", ROOT / e) for e in extra]
    archive = Archive(LAB / "init", "dev", "etc", "proc", "sys", "tmp", "root", "lab", "var/tmp")
    archive.link("bin/agent", f"/lab/build/{below('tests', arch)}/agent")
    archive.file("bin/busybox", busybox)
    for applet in applets:
        archive.link(f"bin/{applet}", "busybox")
    archive.link("sbin", "bin")
    archive.link("usr/bin", "../bin")
    config = (BUILD / below("fork", arch) / "config-host.h").read_text()
    dirs = re.findall('"(.*?)"', search("^#define CONFIG_QEMU_FIRMWAREPATH (.*)", config)[1])
    for name in FIRMWARE[arch]:
        rom = next((p for d in dirs if (p := Path(d, name)).exists()), None)
        if not rom:
            raise BuildError(f"no firmware {name} in {':'.join(dirs)}: scripts/deps lab")
        archive.file(str(rom), rom)
    # One process at a time makes stripped copies.
    with open(BUILD / "lab" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, path in files:
            with open(path, "rb") as f:
                elf = f.read(4) == b"\x7fELF"
            for lib, file in libraries(path, arch).items() if elf else ():
                archive.file(lib, stripped(file, arch))
            archive.file(name, stripped(path, arch) if elf else path)
        archive.write(out)
