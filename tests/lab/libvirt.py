# SPDX-License-Identifier: GPL-2.0-or-later
"""Hosts with an unmodified libvirt of a Debian release, in the lab: each has file systems, a name and a
network of its own, and they reach each other. The fork is the emulator of their domains.
The lab must have network.programs().
"""
import json
import shlex
import subprocess
from typing import Any, Self

from tests.lab import initramfs, linux_guest
from tests.lab.lab import Job, Lab, Result
from tests.lab.network import programs
from tests.lab.pair import FORK, until
from tests.lab.paths import ROOT, qemu
from tests.lab.text import search

# Directories in the lab. A release's root has the lab's root below it, too.
LIBVIRT = "/libvirt"
LAB = "/l1"
EMULATOR = "/usr/local/bin/qemu"
# The lab's programs are linked with another release's libraries.
SCRIPT = f"""#!{LAB}/bin/busybox sh
exec {LAB}/lib64/ld-linux-x86-64.so.2 --library-path {LAB}/lib/x86_64-linux-gnu:{LAB}/usr/lib/x86_64-linux-gnu \\
    {LAB}/lab/{qemu("x86_64", FORK)} -L /usr/share/qemu -L /usr/share/seabios "$@"
"""
ADDRESS = {"source": "10.8.0.1", "destination": "10.8.0.2"}
PORT = 49200
CONSOLE = "/run/guest.console"
LOG = "/run/guest.log"


# By libvirt's <cpu>: further lines with which the domain's guest can be notified of missing pages (docs/usage.md)
TOLD = search(r"(?s)```xml\n(<qemu:commandline>.*?)```", (ROOT / "docs" / "usage.md").read_text())[1]
CPUS = {
    "host-passthrough": ("<cpu mode='host-passthrough' migratable='on'/>", ""),
    "host-model": ("<cpu mode='host-model'/>", TOLD),
    "custom": ("<cpu mode='custom' match='exact'><model fallback='forbid'>qemu64</model></cpu>", TOLD),
}


def domain(cpu: str = "host-passthrough", **parameters: int) -> str:
    """The Linux guest, which has no support for migration. cpu: of CPUS."""
    kernel, initrd = linux_guest.files()
    words = " ".join(linux_guest.WORDS["x86_64"] + [f"guest_{k}={v}" for k, v in parameters.items()])
    model, more = CPUS[cpu]
    return f"""<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>guest</name>
  <memory unit='MiB'>160</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc-i440fx-10.0'>hvm</type>
    <kernel>{LAB}/lab/{kernel}</kernel>
    <initrd>{LAB}/lab/{initrd}</initrd>
    <cmdline>{words}</cmdline>
  </os>
  <features><acpi/><apic/></features>
  {model}
  <devices>
    <emulator>{EMULATOR}</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <serial type='file'><source path='{LOG}'/></serial>
    <console type='file'><source path='{CONSOLE}'/><target type='virtio' port='0'/></console>
  </devices>{more}
</domain>
"""


# A host has its own file systems, below the release's root; the lab's root is in it, so that the sockets of both
# hosts can be reached from either.
START = f"""set -e
hostname $1
for d in run tmp var/lib/libvirt var/cache var/log etc/libvirt; do
    mkdir -p {LIBVIRT}/$d
    mount -t tmpfs tmpfs {LIBVIRT}/$d
done
for d in proc sys dev; do
    mkdir -p {LIBVIRT}/$d
    mount --rbind /$d {LIBVIRT}/$d
done
mkdir -p {LIBVIRT}{LAB}
mount --rbind / {LIBVIRT}{LAB}
cp $2/*.conf {LIBVIRT}/etc/libvirt/
echo $$ >$2/pid
exec chroot {LIBVIRT} /usr/sbin/libvirtd
"""


class Host:
    """A libvirtd. user: of its QEMUs; settings: more lines of its qemu.conf."""

    def __init__(self, lab: Lab, name: str, user: str, settings: str) -> None:
        self.lab = lab
        self.name = name
        self.directory = f"/tmp/libvirt-{name}"
        self.uri = f"qemu+unix:///system?socket={LAB}{self.directory}/libvirt-sock"
        lab.run(f"rm -rf {self.directory}; mkdir {self.directory}", check=True)
        lab.write_file(f"{self.directory}/libvirtd.conf", f"""
unix_sock_dir = "{LAB}{self.directory}"
auth_unix_rw = "none"
auth_unix_ro = "none"
host_uuid = "00000000-0000-4000-8000-00000000000{list(ADDRESS).index(name) + 1}"
""".encode())
        lab.write_file(f"{self.directory}/qemu.conf", f"""
security_driver = "none"
user = "{user}"
group = "{user}"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
{settings}
""".encode())
        lab.write_file(f"{self.directory}/start", START.encode())
        self.job = lab.job(f"exec {programs()[0]} netns exec {name} "
                           f"unshare -m -u sh {self.directory}/start {name} {self.directory}")

    def wait(self) -> None:
        until(lambda: not self.job.running or not self.virsh_job("uri").wait().rc, f"libvirtd of the {self.name}")
        if not self.job.running:
            result = self.job.wait()
            raise AssertionError(f"libvirtd of the {self.name} has ended, status {result.rc}:\n{result.output}")

    def command(self, command: str) -> str:
        """A command line that runs a command on the host."""
        return f"nsenter -t $(cat {self.directory}/pid) -m -u -n chroot {LIBVIRT} {command}"

    def file(self, path: str) -> str:
        return self.lab.run(self.command(f"{LAB}/bin/cat {path}")).output

    def virsh_job(self, command: str) -> Job:
        return self.lab.job(self.command(f"/usr/bin/virsh -c '{self.uri}' {command}"))

    def virsh(self, command: str, *, check: bool = True) -> Result:
        return self.virsh_job(command).wait(check=check)

    def qmp(self, command: str, **arguments: Any) -> Any:
        line = json.dumps({"execute": command, "arguments": arguments})
        return json.loads(self.virsh(f"qemu-monitor-command guest {shlex.quote(line)}").output)["return"]

    def define(self, xml: str) -> None:
        self.lab.write_file(f"{self.directory}/guest.xml", xml.encode())
        self.virsh(f"define {LAB}{self.directory}/guest.xml")

    def report(self) -> linux_guest.Report:
        return linux_guest.Report(self.file(CONSOLE))

    def end(self) -> None:
        self.lab.run(f"""ours=$(readlink /proc/$(cat {self.directory}/pid)/ns/mnt) && for p in /proc/[0-9]*; do
                [ "$(readlink $p/ns/mnt)" != "$ours" ] || kill -9 ${{p#/proc/}}
            done""")
        self.job.kill()


class Hosts:
    """Both hosts, with a network between them. user: of the destination's QEMUs; settings: of both."""

    def __init__(self, lab: Lab, release: str, user: str = "root", settings: str = "") -> None:
        self.lab = lab
        self.release = release
        self.user = user
        self.settings = settings

    def __enter__(self) -> Self:
        lab = self.lab
        put(lab, self.release)
        ip = programs()[0]
        lab.run(f"""set -e
            mkdir -p /run
            {ip} netns add source
            {ip} netns add destination
            {ip} link add source type veth peer name destination""", check=True)
        for name, address in ADDRESS.items():
            lab.run(f"""set -e
                {ip} link set {name} netns {name}
                {ip} -n {name} addr add {address}/24 dev {name}
                {ip} -n {name} link set {name} up
                {ip} -n {name} link set lo up""", check=True)
        self.hosts: list[Host] = []
        try:
            for name, user in zip(ADDRESS, ("root", self.user), strict=True):
                self.hosts.append(Host(lab, name, user, self.settings))
            for host in self.hosts:
                host.wait()
        except BaseException as e:
            self.__exit__(type(e), e, None)
            raise
        self.source, self.destination = self.hosts
        return self

    def relay(self) -> Job:
        """A process on the source's host that passes connections to PORT on to the destination; they break
        when it is killed."""
        ip = programs()[0]
        job = self.lab.job(f"exec {ip} netns exec source nc -ll -p {PORT} -e nc {ADDRESS['destination']} {PORT}")
        until(lambda: str(PORT) in self.lab.run(f"{ip} netns exec source netstat -tln").output, "the relay")
        return job

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error:
            for host in self.hosts:
                log = host.file("/var/log/libvirt/qemu/guest.log")
                error.add_note(f"libvirt's log of the {host.name}'s QEMU:\n{log}")
                error.add_note(f"libvirtd of the {host.name}:\n{host.job.output}")
        for host in self.hosts:
            host.end()
        self.lab.run("; ".join(f"{programs()[0]} netns del {name}" for name in ADDRESS))


def put(lab: Lab, release: str) -> None:
    """Copy a release's libvirt to the lab."""
    if lab.run(f"test -e {LIBVIRT}/{release}").rc:
        tar = subprocess.run(["tar", "-C", initramfs.fetched(f"libvirt-{release}"), "-cz", "."],
                             stdout=subprocess.PIPE, check=True)
        lab.run(f"rm -rf {LIBVIRT}; mkdir -p {LIBVIRT}/usr/local/bin && tar -xz -C {LIBVIRT} && "
                f"touch {LIBVIRT}/{release}",
                timeout=300, stdin=tar.stdout, check=True)
        lab.write_file(LIBVIRT + EMULATOR, SCRIPT.encode(), 0o755)
        lab.write_file(f"{LIBVIRT}/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"
                       b"libvirt-qemu:x:64055:64055::/var/lib/libvirt:/bin/false\n")
        lab.write_file(f"{LIBVIRT}/etc/group", b"root:x:0:\nlibvirt-qemu:x:64055:\n")
