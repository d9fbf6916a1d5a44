# SPDX-License-Identifier: GPL-2.0-or-later
"""The kernel interfaces by which KVM exits for missing memory (docs/devel/kernel.md): L1's Linux has both, and offers
one of them. INTERFACE=userfault in the environment chooses the other one."""
import contextlib
import os
from collections.abc import Iterator
from typing import Any

# Parameters of the module kvm
EXIT_ON_MISSING = "exit_on_missing"
USERFAULT = "userfault"
ALL = (EXIT_ON_MISSING, USERFAULT)


def chosen() -> str:
    name = os.environ.get("INTERFACE") or EXIT_ON_MISSING
    if name not in ALL:
        raise ValueError(f"INTERFACE={name}: there are {' and '.join(ALL)}")
    return name


def offer(lab: Any, *names: str) -> None:
    """Offer only these interfaces to new virtual machines in L1."""
    lab.run("cd /sys/module/kvm/parameters && " +
            " && ".join(f"echo {'Y' if name in names else 'N'} >{name}" for name in ALL), check=True)


@contextlib.contextmanager
def offered(lab: Any, *names: str) -> Iterator[None]:
    """Like offer(), until the end of the block; then offer the chosen interface again."""
    before = chosen()
    offer(lab, *names)
    try:
        yield
    finally:
        offer(lab, before)
