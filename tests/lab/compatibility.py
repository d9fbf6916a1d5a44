# SPDX-License-Identifier: GPL-2.0-or-later
"""The table of QEMUs that migrate to each other, by the results of tests: build/reports/compatibility.json and .md."""
import contextlib
import fcntl
import json
from collections.abc import Iterator

from tests.lab.lab import Lab
from tests.lab.paths import REPORTS, qemu
from tests.lab.text import search

FILE = REPORTS / "compatibility.json"


def version(lab: Lab, name: str) -> str:
    """The version of a QEMU in the lab: 11.1.3."""
    return search(r"version (\S+)", lab.run(f"{qemu(lab.arch, name)} --version", check=True).output)[1]


def _write(row: dict[str, str]) -> None:
    REPORTS.mkdir(parents=True, exist_ok=True)
    with open(REPORTS / ".compatibility.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
        key = [k for k in row if k != "result"]
        rows = [r for r in rows if any(r[k] != row[k] for k in key)] + [row]
        rows.sort(key=lambda r: [r[k] for k in key])
        FILE.write_text(json.dumps({"runs": rows}, indent=2) + "\n")
        ways = sorted({(r["source"], r["destination"]) for r in rows})
        lines = ["| | " + " | ".join(f"{a} to {b}" for a, b in ways) + " |", "| --- " * (len(ways) + 1) + "|"]
        for machine, what in sorted({(r["machine"], r["what"]) for r in rows}):
            cells = {(r["source"], r["destination"]): r["result"] for r in rows
                     if (r["machine"], r["what"]) == (machine, what)}
            lines.append(f"| {machine}: {what} | " + " | ".join(cells.get(way, "") for way in ways) + " |")
        FILE.with_suffix(".md").write_text("\n".join(lines) + "\n")


@contextlib.contextmanager
def told(lab: Lab, source: str, destination: str, machine: str, what: str) -> Iterator[None]:
    """Add the result of the body to the table."""
    row = {"source": f"{source} {version(lab, source)}", "destination": f"{destination} {version(lab, destination)}",
           "machine": machine, "what": what}
    try:
        yield
    except BaseException:
        _write(row | {"result": "FAILED"})
        raise
    _write(row | {"result": "passed"})
