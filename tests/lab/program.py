# SPDX-License-Identifier: GPL-2.0-or-later
"""What the programs have in common: progress, figures, and how they end."""
import signal
import sys
import time

from qemu.qmp import QMPError

from tests.lab.initramfs import BuildError
from tests.lab.lab import CommandFailed, LabError

started = time.monotonic()


class ProgramError(Exception):
    """What the program is for could not be done."""


def say(text):
    print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)


def quantile(values, percent):
    """Of sorted values, the one below which so many per cent lie; None if there are none."""
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else None


def aligned(rows):
    """Lines of a table: the first column from the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) if i else cell.ljust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]


def main(name, run, options):
    """End with what run(options) returns as exit status, or with one line if it fails or is interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(run(options))
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted")
    except (AssertionError, ProgramError, BuildError, LabError, CommandFailed, OSError, QMPError) as e:
        sys.exit(f"{name}: error: " + "\n".join([str(e), *getattr(e, "__notes__", ())]))
