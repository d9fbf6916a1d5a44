# SPDX-License-Identifier: GPL-2.0-or-later
"""A pair whose Linux guest has a vhost-user disk."""
import time
from dataclasses import replace
from typing import Any, Self

from tests.lab.host import Place
from tests.lab.lab import Running
from tests.lab.linux_pair import LinuxPair, LinuxSide
from tests.lab.pair import Plan, threads, until

BACKEND = "build/fork/contrib/vhost-user-blk/vhost-user-blk"


def serve(lab: Place, path: str, file: str) -> Running:
    """Start a backend for file that listens at path."""
    lab.run(f"rm -f {path}")
    job = lab.job(f"echo $$; exec {BACKEND} --socket-path={path} --blk-file={file}")
    until(lambda: not job.running or not lab.run(f"test -S {path}").rc, "the backend listens")
    assert job.running, job.output
    return job


class DiskPair(LinuxPair):
    """A pair with a guest whose disk is a process on each side; both have the same file."""

    def __init__(self, lab: Place, backend: str = "memfd", **options: Any) -> None:
        # MiB.  The backend reads each page that it writes to the disk before a processor changes it. Its faults are in
        # this memory, and there must be huge pages without other data.
        self.disk = 8 if backend == "hugetlb" else 2
        super().__init__(lab, backend=backend, disk=self.disk, mem=16, writers=1, computers=1, interval=100, **options)
        self.file = f"{lab.tmp}/disk"
        self.backends: dict[str, Running] = {}

    def __enter__(self) -> Self:
        self.lab.run(f"rm -f {self.file} && truncate -s {self.disk}M {self.file}", check=True)
        return super().__enter__()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        for job in self.backends.values():
            job.kill()

    def launch(self, lab: Place, plan: Plan) -> LinuxSide:
        path = self.start_backend(lab, plan.name)
        again = ",reconnect-ms=100" if plan.name == "source" else ""
        disk = ["-chardev", f"socket,id=disk,path={path}{again}", "-device", "vhost-user-blk-pci,chardev=disk"]
        return super().launch(lab, replace(plan, arguments=[*plan.arguments, *disk]))

    def start_backend(self, lab: Place, name: str) -> str:
        if name in self.backends:
            self.backends[name].kill()
        path = f"{lab.tmp}/{name}.disk"
        self.backends[name] = serve(lab, path, self.file)
        return path

    def more_logs(self) -> dict[str, bytes]:
        return super().more_logs() | {f"{name}.disk": job.output.encode() for name, job in self.backends.items()}

    def start(self, uri: str | None = None, bandwidth: int | None = None) -> None:
        """Start when the guest uses its disk."""
        self.source.wait_ready()
        until(lambda: (lines := self.source.report().lines) and lines[-1]["disk0"], "the guest uses its disk")
        super().start(uri, bandwidth)

    def transfers(self, side: LinuxSide | None = None) -> int:
        lines = (side or self.destination).report().lines
        return lines[-1]["disk0"] if lines else 0

    def backend_pid(self, side: str = "destination") -> int:
        return int(self.backends[side].output.split("\n")[0])

    def signal_backend(self, name: str, side: str = "destination") -> None:
        self.lab.run(f"kill -{name} {self.backend_pid(side)}", check=True)

    def backend_waits(self) -> bool:
        """Whether the backend sleeps for a page."""
        return any("handle_userfault" in thread.where for thread in threads(self.lab, self.backend_pid()))

    def until_backend_waits(self) -> None:
        """Stop the source at a time at which the backend, not the guest, misses a page for the disk."""
        for _ in range(40):
            self.source.signal("STOP")
            self.until_quiet()
            if self.backend_waits():
                return
            self.source.signal("CONT")
            time.sleep(0.3)
        raise AssertionError("the backend never waits for a page")

    def backend_faults(self) -> int:
        """The destination's faults that the backend's userfaultfd reported."""
        return [name for name, _ in self.destination.trace()].count("postcopy_request_shared_page")

    def until_backend_faults(self, n: int) -> None:
        until(lambda: self.backend_faults() >= n, f"{n} faults of the backend")

    def check_disk(self) -> None:
        """Let the guest read and write all blocks, of 4 KiB, once more, and check the memory that it read."""
        end = self.transfers() + self.disk * 256
        until(lambda: self.transfers() >= end, "the guest has used all of its disk", timeout=90)
        self.check_threads()
        self.check_logs()
