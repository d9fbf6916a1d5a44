# SPDX-License-Identifier: GPL-2.0-or-later
"""A network between the two QEMUs of a lab: the destination has a network name space of its own,
and between it and the rest lies a link with a delay and a bandwidth (tc netem)."""
import shutil

from tests.lab.cli import ProgramError
from tests.lab.lab import Place
from tests.lab.pair import QMP_PORT

SPACE = "destination"
HERE, THERE = "10.9.0.1", "10.9.0.2"
# Packets in a queue: more than a TCP window has, as a queue that is full would lose some.
QUEUE_PACKETS = 100000


def programs() -> list[str]:
    """Of the host, to have in the lab."""
    found = [path for name in ("ip", "tc") if (path := shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin"))]
    if len(found) != 2:
        raise ProgramError("no ip or no tc: scripts/deps lab")
    return found


class Network:
    """delay_us, loss_percent: of each direction; bandwidth_mbit: of each direction, or 0 for no limit."""

    uri = f"tcp:{THERE}:4010"

    def __init__(self, lab: Place, delay_us: int, bandwidth_mbit: int, loss_percent: float = 0) -> None:
        ip, tc = programs()
        self.wrapper = (ip, "netns", "exec", SPACE)
        netem = f"root netem limit {QUEUE_PACKETS} delay {delay_us}us"
        if bandwidth_mbit:
            netem += f" rate {bandwidth_mbit}mbit"
        if loss_percent:
            netem += f" loss {loss_percent}%"
        lab.run(f"""set -e
            mkdir -p /run
            {ip} netns add {SPACE}
            {ip} link add here type veth peer name there netns {SPACE}
            {ip} addr add {HERE}/24 dev here
            {ip} link set here up
            {ip} -n {SPACE} addr add {THERE}/24 dev there
            {ip} -n {SPACE} link set there up
            {ip} -n {SPACE} link set lo up
            {tc} qdisc add dev here {netem}
            {tc} -n {SPACE} qdisc add dev there {netem}""", check=True)
        # The host reaches QMP of the destination through the link. QEMU may not listen yet.
        port = QMP_PORT["destination"]
        self.relay = lab.job(f"exec nc -ll -p {port} -e sh -c "
                             f"'until nc {THERE} {port} 2>/dev/null; do sleep 0.1; done'")
        times = lab.run(f"ping -c 5 -i 0.2 -q {THERE}", check=True).output.splitlines()[-1]
        # round-trip min/avg/max = 2.3/2.5/2.9 ms
        self.round_trip_us = float(times.split("=")[1].split("/")[1]) * 1000
