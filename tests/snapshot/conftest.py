# SPDX-License-Identifier: GPL-2.0-or-later
import pytest

THP = "/sys/kernel/mm/transparent_hugepage/enabled"
# Interfaces that the lab's kernel can hide, see docs/devel/testing.md.
SWITCHES = {"pagemap": "proc/parameters/pagemap_scan",
            "unpopulated": "userfaultfd/parameters/wp_unpopulated",
            "populate": "madvise/parameters/populate"}


@pytest.fixture
def thp(lab):
    """Sets transparent huge pages to always or never; QEMU requests them by madvise()."""
    yield lambda value: lab.run(f"echo {value} >{THP}", check=True)
    lab.run(f"echo madvise >{THP}", check=True)


@pytest.fixture
def hide(lab):
    """Hides interfaces of the kernel, as older ones lack them."""
    def hide(*names):
        for name in names:
            lab.run(f"echo N >/sys/module/{SWITCHES[name]}", check=True)
    yield hide
    for path in SWITCHES.values():
        lab.run(f"echo Y >/sys/module/{path}", check=True)
