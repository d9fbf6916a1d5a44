# SPDX-License-Identifier: GPL-2.0-or-later
"""Common code of all tests: selection, number of processes, limits, the lab, and the report of time."""
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.lab import kvm_interface, limits, sanitizer
from tests.lab.arches import FIRST, SECOND
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.paths import ROOT, below

MEMORY_MB = 3072    # memory of a first-level machine
# Interfaces that the lab's kernel can hide, see docs/devel/testing.md.
SWITCHES = {"pagemap": "proc/parameters/pagemap_scan",
            "unpopulated": "userfaultfd/parameters/wp_unpopulated",
            "populate": "madvise/parameters/populate"}
FEW = 60            # so many of arm64's tests justify booting one more machine
# Paths, or an expression for -k
TESTS = os.environ.get("TESTS", "")
PATHS = [word.rstrip("/") for word in TESTS.split()]
if not all((ROOT / word.partition("::")[0]).exists() for word in PATHS):
    PATHS = []


def pytest_xdist_auto_num_workers(config):
    """The number of workers: each has one first-level machine at a time."""
    available_kib = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])
    return max(1, min(os.cpu_count() or 1, available_kib // 1024 // MEMORY_MB))


def pytest_configure(config):
    if TESTS and not PATHS:
        config.option.keyword = TESTS


def needless(items):
    """The second interface's cases without exits, and slow cases of functions that also have quick ones."""
    both = [item for item in items if "by" in getattr(getattr(item, "callspec", None), "params", ())]
    first = [item for item in both if item.callspec.params["by"] == FIRST
             and item.callspec.params.get("exits") != "off"]
    quick = {item.function for item in first if not item.get_closest_marker("slow")}
    twice = {(item.function, item.name.replace(FIRST, SECOND)) for item in first
             if item.function not in quick or not item.get_closest_marker("slow")}
    return {item for item in both if item.callspec.params["by"] == SECOND and (item.function, item.name) not in twice}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    dropped = needless(items)
    if PATHS:
        wanted = re.compile(rf"(?:{'|'.join(map(re.escape, PATHS))})(?!\w)")
        dropped |= {item for item in items if not wanted.match(item.nodeid)}
    config.hook.pytest_deselected(items=list(dropped))
    # Tests of arm64 first, as with pytest-xdist, which begins with the largest groups.
    items[:] = sorted((item for item in items if item not in dropped),
                      key=lambda item: not item.get_closest_marker("aarch64"))


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_divide(items):
    """Divides arm64's tests into groups, each for one worker, which boots that machine once. There are as many groups
    as workers, but none with few tests."""
    those = [item for item in items if item.get_closest_marker("aarch64")]
    groups = min(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)), 1 + len(those) // FEW)
    for number, item in enumerate(those):
        item.add_marker(pytest.mark.xdist_group(f"aarch64-{number % groups}"))


# Limits

@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    limits.begin(item, settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item):
    limits.end()
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Starts the limit again: after a failure there is none."""
    limits.begin(item)
    return (yield)


# The lab

@pytest.fixture(scope="session")
def _machine():
    """The first-level machine of this process, if a test has used one."""
    machines: list[Lab] = []
    yield machines
    for machine in machines:
        machine.kill()


@pytest.fixture
def lab(request, _machine):
    """The first-level machine that all tests share, booted again if it has died; x86-64's, unless the test has a mark
    of arches.py."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    arch = params.get("lab") or params.get("place") or "x86_64"
    if not _machine or _machine[0].arch != arch:
        for other in _machine:
            other.kill()
        name = os.environ.get("PYTEST_XDIST_WORKER", "pytest")
        _machine[:] = [Lab(name=below(name, arch), arch=arch, memory_mb=MEMORY_MB, hugepages=256)]
    [machine] = _machine
    try:
        if not machine.alive:
            machine.start()
        if sanitizer.ENVIRONMENT:
            # Some sanitizers do not cope with random addresses.
            machine.run("echo 0 >/proc/sys/kernel/randomize_va_space", check=True)
    except BaseException:
        machine.kill()
        raise
    yield machine
    if request.node.stash.get(limits.PASSED, False):
        machine.kill()
    machine.check_kernel()
    if machine.alive:
        sanitizer.check(machine, request.node.name)


@pytest.fixture(scope="session")
def _host(request):
    """This machine, with TCG; None if its kernel denies something that tests need."""
    with Host("tcg", name=os.environ.get("PYTEST_XDIST_WORKER", "pytest") + "-host") as host:
        why_not = host.why_not()
        if why_not:
            request.config.get_terminal_writer().line(f"in the lab, not on this machine: {why_not}")
        yield None if why_not else host


@pytest.fixture
def place(request):
    """A place for tests that need no exit of KVM: this machine, which is faster, or else the lab. Cases with exits=on,
    with huge pages and of arm64 always use the lab."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    here = (params.get("exits") != "on" and "huge" not in str(params.get("backend"))
            and params.get("place") != "aarch64")
    host = here and request.getfixturevalue("_host")
    if not host:
        yield request.getfixturevalue("lab")
        return
    yield host
    left = host.leftovers()
    sanitizer.check(host, request.node.name)
    assert not left, f"processes that the test has left: {left}"


@pytest.fixture
def by(request, monkeypatch):
    """Offers only one interface in L1, also if the test boots it again: @both_interfaces of arches.py."""
    if request.node.callspec.params.get("exits") == "off":
        yield request.param
        return
    with kvm_interface.offered(request.getfixturevalue("lab"), request.param):
        monkeypatch.setenv("INTERFACE", request.param)
        yield request.param


# The lab's kernel

@pytest.fixture
def swap(lab):
    lab.run("mkswap /dev/ram0 && swapon /dev/ram0", check=True)
    yield
    lab.run("swapoff /dev/ram0", check=True)


@pytest.fixture
def ksm(lab):
    """KSM's directory in sysfs; it is set up to merge pages fast."""
    ksm = "/sys/kernel/mm/ksm"
    lab.run(f"echo 10000 >{ksm}/pages_to_scan; echo 0 >{ksm}/sleep_millisecs", check=True)
    yield ksm
    lab.run(f"echo 2 >{ksm}/run", check=True)


@pytest.fixture
def hide(lab):
    """Hides interfaces of the kernel, as older ones lack them."""
    def hide(*names):
        for name in names:
            lab.run(f"echo N >/sys/module/{SWITCHES[name]}", check=True)
    yield hide
    for path in SWITCHES.values():
        lab.run(f"echo Y >/sys/module/{path}", check=True)


# Time

def pytest_terminal_summary(terminalreporter):
    """Prints cases and seconds by directory; writes them as JSON, too, beside the file of --junitxml."""
    cases: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                directory = str(Path(report.location[0]).parent)
                cases[directory] += report.when == "setup"
                seconds[directory] += report.duration
    table = [{"directory": directory, "cases_count": cases[directory], "took_s": round(seconds[directory], 1)}
             for directory in sorted(seconds)]
    if not table:
        return
    terminalreporter.section("where time went")
    for row in [*table, {"directory": "all", "cases_count": cases.total(), "took_s": round(seconds.total(), 1)}]:
        terminalreporter.write_line(f"{row['directory']:<20}{row['cases_count']:>6} cases {row['took_s']:>9} s")
    if xml := terminalreporter.config.option.xmlpath:
        Path(xml).with_suffix(".json").write_text(json.dumps(table, indent=2) + "\n")
