# SPDX-License-Identifier: GPL-2.0-or-later
"""Choices for tests, by name: the guest's memory, the channels for its pages, and its disk."""
from typing import Any

from tests.lab.host import Place

# For -object; with a directory, each QEMU has a file of its own.
BACKENDS = {
    "anonymous": "",
    "anonymous-shared": "memory-backend-ram,share=on",
    "memfd": "memory-backend-memfd",
    "shm": "memory-backend-shm",
    "shmem-file": "memory-backend-file,mem-path=/dev/shm,share=on",
    "shmem-file-private": "memory-backend-file,mem-path=/dev/shm,share=off",
    "hugetlb": "memory-backend-memfd,hugetlb=on,hugetlbsize=2M",
    "hugetlb-file": "memory-backend-file,mem-path=/dev/hugepages,share=on",
    "hugetlb-private": "memory-backend-file,mem-path=/dev/hugepages,share=off",
}
# Options of a pair
CHANNELS: dict[str, dict[str, Any]] = {
    "preempt": {"capabilities": ("postcopy-preempt",)}, "one-channel": {"capabilities": ()}, "fetch": {"fetch": 4}}


def memory(backend: str, memory_mb: int | str) -> list[str]:
    """Words for the command line. backend: of BACKENDS, or words for -object."""
    words = BACKENDS.get(backend, backend)
    return ["-object", f"{words},id=ram,size={memory_mb}M", "-machine", "memory-backend=ram"] if words else []


def guest_on(backend: str, pattern: str = "shared") -> dict[str, Any]:
    """Options of a pair whose vCPUs miss the same pages, or parts of the same huge pages."""
    if "huge" in backend:
        return {"backend": backend, "pattern": "samehuge", "memory_mb": 64, "mem": 48}
    return {"backend": backend, "pattern": pattern, "mem": 16}


def shared_disk(place: Place, in_file: str = "", in_device: str = "") -> tuple[str, tuple[str, ...]]:
    """Returns the image, and words for both sides."""
    image = f"{place.tmp}/shared.raw"
    place.run(f"rm -f {image}; truncate -s 1M {image}", check=True)
    words = [",".join(filter(None, parts)) for parts in (
        ("driver=raw", "node-name=disk", "file.driver=file", f"file.filename={image}", in_file),
        ("virtio-blk-pci", "drive=disk", in_device))]
    return image, ("-blockdev", words[0], "-device", words[1])
