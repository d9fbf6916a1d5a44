# SPDX-License-Identifier: GPL-2.0-or-later
import sys
from pathlib import Path

import pytest

for name in ("guest", "postcopy"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / name))

THP = "/sys/kernel/mm/transparent_hugepage/enabled"
# What the lab's kernel can hide, see docs/lab.md.
SWITCHES = {"pagemap": "proc/parameters/pagemap_scan",
            "unpopulated": "userfaultfd/parameters/wp_unpopulated",
            "populate": "madvise/parameters/populate"}


@pytest.fixture
def thp(lab):
    """Sets transparent huge pages to always or never; QEMU asks for them."""
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
