# SPDX-License-Identifier: GPL-2.0-or-later
"""Boot the lab's first-level machine, and run a command or a shell in it."""
import argparse
import sys
import termios

from tests.lab import lab
from tests.lab.initramfs import BuildError
from tests.lab.paths import below


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/lab/lab", description=__doc__)
    parser.add_argument("--arch", choices=lab.MACHINES, default="x86_64")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB")
    parser.add_argument("--hugepages", type=int, default=0, metavar="N", help="pages of 2 MiB")
    parser.add_argument("--append", default="", metavar="WORDS", help="for Linux's command line")
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("shell", help="a shell in /lab; 'exit' or Ctrl-D ends the lab")
    run = what.add_parser("run", help="run a command in /lab, and exit with its status")
    run.add_argument("command", help="for /bin/sh")
    args = parser.parse_args()

    if args.what == "shell" and not sys.stdin.isatty():
        sys.exit("lab: error: no terminal; for scripts there is: lab run COMMAND")
    machine = lab.Lab(name=below(args.what, args.arch), cpus=args.cpus, memory_mb=args.memory, hugepages=args.hugepages,
                      append=args.append, shell=args.what == "shell", arch=args.arch)
    rc: int | None = 0
    saved = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        with machine:
            if args.what == "shell":
                assert machine.process
                machine.process.wait()
            else:
                def show(data: bytes) -> None:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                rc = machine.job(args.command, on_output=show).wait(float("inf")).rc
    except (lab.LabError, BuildError) as e:
        print(f"lab: error: {e}", file=sys.stderr)
        rc = 125
    except KeyboardInterrupt:
        rc = 130
    finally:
        if saved:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, saved)
    sys.exit(rc)


if __name__ == "__main__":
    main()
