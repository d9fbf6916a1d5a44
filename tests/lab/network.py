# SPDX-License-Identifier: GPL-2.0-or-later
"""A network between the two QEMUs of a lab, or of this machine: the destination has a network name space of its own,
and a link with a delay and a bandwidth (tc netem) connects it to the rest; on this machine, the link only has a
bandwidth (tc tbf)."""
import os
import shutil
from typing import Self

from tests.lab.cli import ProgramError
from tests.lab.host import Host, Place
from tests.lab.lab import Running
from tests.lab.pair import QMP_PORT

SPACE = "destination"
HERE, THERE = "10.9.0.1", "10.9.0.2"


def programs() -> list[str]:
    """Paths on the host, of programs for the lab."""
    found = [path for name in ("ip", "tc") if (path := shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin"))]
    if len(found) != 2:
        raise ProgramError("no ip or no tc: scripts/deps lab")
    return found


class Network:
    """delay_us, loss_percent: of each direction; bandwidth_mbit: of each direction, or 0 for no limit. On this machine,
    it is a context manager, which also cleans up after a killed run."""

    uri = f"tcp:{THERE}:4010"

    def __init__(self, lab: Place, delay_us: int, bandwidth_mbit: int, loss_percent: float = 0) -> None:
        ip, tc = programs()
        self.lab = lab
        self.remove = f"{ip} netns del {SPACE} 2>/dev/null" if isinstance(lab, Host) else ":"
        self.wrapper = (ip, "netns", "exec", SPACE)
        # A queue's limit is more than a TCP window, since a full queue would lose packets.
        if isinstance(lab, Host):
            if delay_us or loss_percent or not bandwidth_mbit:
                raise ProgramError("a link of this machine has a bandwidth, neither delay nor loss")
            if os.geteuid():
                raise ProgramError("a link of this machine is made by root only")
            rule = f"tbf rate {bandwidth_mbit}mbit burst 64kb limit 64mb"
        else:
            rule = f"netem limit 100000 delay {delay_us}us"
            if bandwidth_mbit:
                rule += f" rate {bandwidth_mbit}mbit"
            if loss_percent:
                rule += f" loss {loss_percent}%"
        # Packets as they are on a link, not the 64 KiB that a kernel passes on at once.
        single = " gso_max_segs 1" if loss_percent else ""
        lab.run(f"""{self.remove}
            set -e
            mkdir -p /run
            {ip} netns add {SPACE}
            {ip} link add here type veth peer name there netns {SPACE}
            {ip} addr add {HERE}/24 dev here
            {ip} link set here{single} up
            {ip} -n {SPACE} addr add {THERE}/24 dev there
            {ip} -n {SPACE} link set there{single} up
            {ip} -n {SPACE} link set lo up
            {tc} qdisc add dev here root {rule}
            {tc} -n {SPACE} qdisc add dev there root {rule}""", check=True)
        self.relay = self.relay_to(lab)
        times = lab.run(f"busybox ping -c 5 -i 0.2 -q {THERE}", check=True).output.splitlines()[-1]
        # round-trip min/avg/max = 2.3/2.5/2.9 ms
        self.round_trip_us = float(times.split("=")[1].split("/")[1]) * 1000

    def relay_to(self, lab: Place) -> Running:
        """Relay connections to the monitor of a destination, which may not listen yet, of a place on this machine."""
        port = lab.port(QMP_PORT["destination"])
        there = " ".join(self.wrapper)
        return lab.job(f"exec busybox nc -ll -p {port} -e sh -c "
                       f"'until {there} busybox nc 127.0.0.1 {port} 2>/dev/null; do sleep 0.1; done'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.relay.kill()
        self.lab.run(self.remove)
