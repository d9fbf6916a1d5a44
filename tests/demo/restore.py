# SPDX-License-Identifier: GPL-2.0-or-later
"""Resume a Linux guest of 2 GiB from a file, on this machine, by QEMU 10.0 and by this branch.

Prints what is said to QEMU, and when the guest runs, has checked some 100 MiB of its memory, and all has been read;
writes build/reports/demo-restore.json. docs/restore.md tells how it works.
"""
import json

from tests.bench.restore import TIMEOUT_S, WAYS, LinuxMachine, fill_mib
from tests.lab import cli
from tests.lab.cli import say
from tests.lab.host import Host
from tests.lab.pair import until
from tests.lab.paths import REPORTS, ROOT

MEMORY_MIB = 2048
NAMES = {"stock": "QEMU 10.0", "lazy": "this branch"}


def resume(machine, way):
    _, capabilities, _ = WAYS[way]
    print(f"\n$ qemu-system-x86_64 -m {MEMORY_MIB} -incoming defer ...      # {NAMES[way]}")
    resumed = machine.launch(way)
    print(f"-> migrate-set-capabilities {' '.join(f'{name}=on' for name in capabilities)}")
    resumed.start()
    print(f"-> migrate-incoming file:{machine.file}")
    until(resumed.worked, "the guest has done its work", TIMEOUT_S, pause=0.003)
    file = resumed.side.cmd("query-migrate").get("postcopy-file")
    until(resumed.ended, "all has been read", TIMEOUT_S, pause=0.003)
    figures = resumed.figures()
    told = [(figures["running_ms"], "<- RESUME: the guest runs"),
            (figures["work_ms"], "   it has checked what it had to"),
            (figures["all_ms"], "<- MIGRATION completed: all has been read")]
    if file:
        told[1] = figures["work_ms"], f"{told[1][1]}; query-migrate: {file['remaining'] >> 20} MiB remain in the file"
    for ms, what in sorted(told):
        print(f"{ms:8.0f} ms  {what}")
    machine.end(resumed)
    return figures


def run(options):
    with Host("tcg") as place:
        say(f"boot a Linux guest, and let it fill its memory of {MEMORY_MIB} MiB")
        with LinuxMachine(place, MEMORY_MIB, cpus=2, mem=fill_mib(MEMORY_MIB), capabilities=["mapped-ram"]) as machine:
            machine.save_both()
            say(f"saved: {machine.lab.run(f'du -m {machine.file}', check=True).output.split()[0]} MiB")
            figures = {way: resume(machine, way) for way in NAMES}
    path = REPORTS / "demo-restore.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")
    stock, lazy = figures["stock"], figures["lazy"]
    print(f"\nThe guest runs after {lazy['running_ms']:.0f} ms in place of {stock['running_ms']:.0f}, and has done its "
          f"work after {lazy['work_ms']:.0f} in place of {stock['work_ms']:.0f}.\nwrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    cli.main("demo", run, cli.parser(__doc__).parse_args())
