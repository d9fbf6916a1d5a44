# SPDX-License-Identifier: GPL-2.0-or-later
"""Common code of programs: progress, figures, and exit."""
import signal
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence

from qemu.qmp import QMPError

from tests.lab.initramfs import BuildError
from tests.lab.lab import CommandFailed, LabError

started = time.monotonic()


class ProgramError(Exception):
    """The program could not do its work."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr, flush=True)


def quantile(values: Sequence[float], percent: int) -> float | None:
    """The value below which so many per cent of the sorted values lie; None if there are none."""
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else None


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column is left-aligned, all others right-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) if i else cell.ljust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]


def parser(doc: str | None) -> ArgumentParser:
    """A parser whose help begins with doc."""
    return ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)


def main(name: str, run: Callable[[Namespace], int | None], options: Namespace) -> None:
    """Exit with the status that run(options) returns, or with one line if it fails or is interrupted."""
    # SIGINT, too: a shell's background jobs ignore it, and what they start
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(run(options))
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted")
    except (AssertionError, ProgramError, BuildError, LabError, CommandFailed, OSError, QMPError) as e:
        sys.exit(f"{name}: error: " + "\n".join([str(e), *getattr(e, "__notes__", ())]))
