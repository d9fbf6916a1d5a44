# SPDX-License-Identifier: GPL-2.0-or-later
"""Where the threads of a process sleep: functions of the kernel, by /proc/PID/task/*/wchan."""
from typing import NamedTuple

from tests.lab.lab import Place


class Thread(NamedTuple):
    name: str
    where: str      # "0" while it runs


def threads(place: Place, pid: int | str) -> list[Thread]:
    """The main thread is the first; none if the process has ended. pid: may be words of a shell, $(cat FILE)."""
    # Without a process for each file, which takes long in L1.
    output = place.run(f"p={pid}; cd /proc/$p/task && for t in $p *; do n= w=; read -r n <$t/comm; "
                       'read -r w <$t/wchan; echo "$t $w $n"; done 2>/dev/null').output
    by_id = dict(line.split(" ", 1) for line in output.splitlines() if line[:1].isdigit())
    return [Thread(name, where) for where, _, name in (text.partition(" ") for text in by_id.values())]
