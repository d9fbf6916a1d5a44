# SPDX-License-Identifier: GPL-2.0-or-later
"""What the benches have in common: progress, the report, and how they end."""
import json
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / name) for name in ("lab", "guest", "postcopy", "clock")]

from initramfs import BuildError                        # noqa: E402
from lab import CommandFailed, LabError                 # noqa: E402
from qemu.qmp import QMPError                           # noqa: E402

REPORTS = ROOT / "build" / "reports"

started = time.monotonic()


class BenchError(Exception):
    """The bench could not be carried out."""


def say(text):
    print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)


def write(name, figures):
    """To build/reports/NAME.json."""
    report = REPORTS / f"{name}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(figures, indent=2) + "\n")
    say(f"wrote {report.relative_to(ROOT)}")


def main(run, options):
    """Call run(options), and end with one line if it fails or is interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(options)
    except KeyboardInterrupt:
        sys.exit("bench: interrupted")
    except (AssertionError, BenchError, BuildError, LabError, CommandFailed, OSError, QMPError) as e:
        sys.exit("bench: error: " + "\n".join([str(e), *getattr(e, "__notes__", ())]))
