# SPDX-License-Identifier: GPL-2.0-or-later
"""libvirt, unmodified, drives the fork, by the commands of docs/usage.md. KVM and exits are the lab's."""
import functools
import os

import pytest

from tests.lab import tls
from tests.lab.lab import HIGHRES, Lab
from tests.lab.libvirt import ADDRESS, LAB, PORT, Hosts, domain
from tests.lab.network import programs
from tests.lab.pair import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("libvirt")]
# LIBVIRT=sid: only that release
ONLY = os.environ.get("LIBVIRT")
HERE = f"tcp://{ADDRESS['destination']}:{PORT}"
# So slow that memory is left for post-copy, and there is time to break it.
POSTCOPY = "--postcopy --postcopy-after-precopy --bandwidth 32 --postcopy-bandwidth 4"


@pytest.fixture(scope="module")
def machine():
    with Lab(name="libvirt", memory_mb=4096, append=HIGHRES, extra=programs()) as lab:
        yield lab


@pytest.fixture
def hosts_of(request, machine):
    """The class Hosts for a release, with more of its arguments."""
    return functools.partial(Hosts, machine, request.param)


def releases(*cases, names="hosts_of"):
    """Cases whose first value is a Debian release, in whose place the one of LIBVIRT is used."""
    values = [((ONLY or case[0]), *case[1:]) for case in cases]
    return pytest.mark.parametrize(names.split(", "), values, indirect=["hosts_of"])


OLD, NEW = "bookworm", "trixie"
old, new = releases((OLD,)), releases((NEW,))


def started(hosts, cpu="host-passthrough"):
    hosts.source.define(domain(cpu, writers=2, computers=1, mem=24, interval=100))
    hosts.source.virsh("start guest")
    until(lambda: len(hosts.source.report().lines) > 5, "the guest has booted")


def migration(hosts, words, uri=HERE):
    return f"migrate guest {hosts.destination.uri} {uri} --live {words}"


def whole(host):
    """The guest resumes on the host, and its memory is intact."""
    first = until(lambda: host.report().lines, f"the guest resumes on the {host.name}")[-1]
    until(lambda: host.report().lines[-1]["sweeps"] >= first["sweeps"] + 2, "the guest has checked its memory")
    report = host.report()
    assert not report.bad and not report.lines[-1]["bad"], report.bad
    assert "running" in host.virsh("domstate guest").output


@new
def test_precopy(hosts_of):
    with hosts_of() as hosts:
        started(hosts)
        hosts.source.virsh(migration(hosts, ""))
        whole(hosts.destination)


@releases((OLD, True, "custom"), (NEW, False, "host-model"), names="hosts_of, encrypted, cpu")
def test_postcopy(machine, hosts_of, encrypted, cpu):
    """Guests of named models are notified of missing pages, too. Fetch channels, which libvirt does not support, are
    used where libvirt lets QEMU connect: 9.0 connects by itself."""
    settings = ""
    if encrypted:
        settings = f'migrate_tls_x509_cert_dir = "{LAB}{tls.certificates(machine, ADDRESS["destination"])}"'
    with hosts_of(settings=settings) as hosts:
        started(hosts, cpu)
        hosts.source.virsh(migration(hosts, POSTCOPY + " --tls" * encrypted))
        whole(hosts.destination)
        info = hosts.destination.qmp("query-migrate")
        assert info["postcopy-faults"]["exits"] > 20 and info["postcopy-async"]["announced"] > 0, info
        fetched = any(c["pages"] + c["zero-pages"] for c in info.get("postcopy-fetch", {"channels": ()})["channels"])
        assert fetched == (hosts.release != "bookworm"), info
        told = hosts.source.virsh("domjobinfo guest --completed").output
        assert "Completed" in told and "Postcopy requests" in told, told


@old
def test_resume(hosts_of):
    """Post-copy's connection breaks, and the administrator recovers it. trixie's libvirtd 11.3 crashes on the
    destination: a NULL pointer in qemuProcessIncomingDefNew()."""
    by_relay = f"tcp://127.0.0.1:{PORT}"
    with hosts_of() as hosts:
        started(hosts)
        relay = hosts.relay()
        moving = hosts.source.virsh_job(migration(hosts, POSTCOPY, by_relay))
        until(lambda: hosts.destination.report().lines or not moving.running, "the guest runs on the destination")
        relay.kill()
        result = moving.wait()
        assert result.rc and "failed in post-copy phase" in result.output, result
        assert "paused (post-copy failed)" in hosts.source.virsh("domstate guest --reason").output
        assert "running (post-copy failed)" in hosts.destination.virsh("domstate guest --reason").output
        hosts.relay()
        hosts.source.virsh(migration(hosts, "--postcopy --postcopy-resume", by_relay))
        whole(hosts.destination)
        assert "shut off (migrated)" in hosts.source.virsh("domstate guest --reason").output


@new
def test_memory_in_files(hosts_of):
    """A snapshot with memory while the guest runs, then saved and restored."""
    with hosts_of() as hosts:
        started(hosts)
        source = hosts.source
        source.virsh("snapshot-create-as guest one --memspec file=/tmp/one.mem --live")
        assert "one" in source.virsh("snapshot-list guest --name").output
        whole(source)
        source.virsh("save guest /tmp/guest.save")
        assert "shut off (saved)" in source.virsh("domstate guest --reason").output
        source.virsh("restore /tmp/guest.save")
        whole(source)
        # The guest returns to the snapshot's time. libvirt empties the console's file, which may still be empty.
        now = source.report().lines[-1]["ms"]
        source.virsh("destroy guest")
        source.virsh("restore /tmp/one.mem")
        until(lambda: any(line["ms"] < now for line in source.report().lines[-1:]), "the snapshot's guest")
        whole(source)


REMEDIES = {
    "sysctl": ("echo 1 >/proc/sys/vm/unprivileged_userfaultfd", "echo 0 >/proc/sys/vm/unprivileged_userfaultfd"),
    "device": ("chmod 666 /dev/userfaultfd", "chmod 600 /dev/userfaultfd"),
}


@releases((OLD, "sysctl"), (NEW, "device"), names="hosts_of, remedy")
def test_permission(machine, hosts_of, remedy):
    """Only if an administrator permits it can QEMUs of another user than root use userfaultfd."""
    let, let_not = REMEDIES[remedy]
    with hosts_of(user="libvirt-qemu") as hosts:
        machine.run("chmod 666 /dev/kvm; chmod -R a+rX /lab", check=True)
        started(hosts)
        refused = hosts.source.virsh(migration(hosts, POSTCOPY), check=False)
        assert refused.rc and "Userfaultfd not available: Operation not permitted" in refused.output, refused
        assert "vm.unprivileged_userfaultfd=1" in refused.output, refused
        whole(hosts.source)
        machine.run(let, check=True)
        try:
            hosts.source.virsh(migration(hosts, POSTCOPY))
            whole(hosts.destination)
        finally:
            machine.run(let_not, check=True)
