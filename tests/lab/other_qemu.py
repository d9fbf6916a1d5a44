# SPDX-License-Identifier: GPL-2.0-or-later
"""Debian's newest QEMU, of backports, as the other end of a migration, with its own libraries."""
import functools
import io
import tarfile
from pathlib import Path

from tests.lab import initramfs
from tests.lab.host import Host, Place
from tests.lab.paths import qemu
from tests.lab.text import search

PEER = "peer"
LOADER = "ld-linux-x86-64.so.2"
# Words before another program, which then uses these libraries
_WHERE = qemu("x86_64", PEER).rsplit("/", 1)[0]
LIBRARIES = (f"{_WHERE}/lib/{LOADER}", "--library-path", f"{_WHERE}/lib")
# Starts the program with the libraries and the firmware beside it.
SCRIPT = f"""#!/bin/sh
here=${{0%/*}}
exec "$here/lib/{LOADER}" --library-path "$here/lib" "$here/qemu" -L "$here/firmware" "$@"
"""


def version() -> str:
    """The version, for example 11.1."""
    root = initramfs.fetched(PEER)
    lib = root / "usr/lib/x86_64-linux-gnu"
    told = initramfs.tool(lib / LOADER, "--library-path", lib, root / "usr/bin/qemu-system-x86_64", "--version")
    return search(r"version (\d+\.\d+)", told)[1]


@functools.cache
def _archive() -> bytes:
    """A tar file for build/peer of a lab."""
    root = initramfs.fetched(PEER)
    program = root / "usr/bin/qemu-system-x86_64"
    lib = root / "usr/lib/x86_64-linux-gnu"
    firmware = {p.name: p for d in ("qemu", "seabios") for p in (root / "usr/share" / d).iterdir()}
    files = {"qemu": program}
    files |= {f"lib/{name}": p for name, p in initramfs.libraries_in((lib,), program).items()}
    files |= {f"firmware/{name}": firmware[name] for name in initramfs.FIRMWARE["x86_64"]}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1, dereference=True) as tar:
        for name, path in files.items():
            tar.add(path.resolve(), name)
        script = tarfile.TarInfo(Path(qemu("x86_64", PEER)).name)
        script.size, script.mode = len(SCRIPT), 0o755
        tar.addfile(script, io.BytesIO(SCRIPT.encode()))
    return out.getvalue()


def put(lab: Place) -> None:
    """Copy the QEMU to a lab as PEER; on this machine, below build."""
    path = qemu("x86_64", PEER)
    if isinstance(lab, Host):
        with tarfile.open(fileobj=io.BytesIO(_archive())) as tar:
            tar.extractall(_WHERE)
    elif lab.run(f"test -e {path}").rc:
        lab.run(f"mkdir -p {_WHERE} && tar -xz -C {_WHERE}", timeout=120, stdin=_archive(), check=True)

