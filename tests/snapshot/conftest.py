# SPDX-License-Identifier: GPL-2.0-or-later
import pytest

THP = "/sys/kernel/mm/transparent_hugepage/enabled"


@pytest.fixture
def thp(lab):
    """Sets transparent huge pages to always or never; QEMU requests them by madvise()."""
    yield lambda value: lab.run(f"echo {value} >{THP}", check=True)
    lab.run(f"echo madvise >{THP}", check=True)
