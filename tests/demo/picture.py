# SPDX-License-Identifier: GPL-2.0-or-later
"""The demo's picture: how far the guest got, and how long its touches of memory took."""
import heapq
from itertools import accumulate

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = "#c8501e", "#0b62a4"
MIB = 1 << 20
PAGE = 4096


def draw(results, passes, path):
    """results: the runs' figures; passes: their latencies in microseconds; path: without suffix."""
    figure, (progress, latency) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for result, (pass1, pass2), colour in zip(results, passes, COLOURS, strict=True):
        # vCPUs touch page after page, each beginning when the guest goes on.
        ends = list(heapq.merge(*map(accumulate, pass1)))
        progress.plot([t / 1e6 for t in ends], [(i + 1) * PAGE / MIB for i in range(len(ends))],
                      color=colour, linewidth=2, label=result["mode"])
        waited = sorted(t for cpu in pass1 for t in cpu if t > result["waited_threshold_us"])
        present = sorted(t for cpu in pass2 for t in cpu)
        latency.ecdf([t / 1000 for t in waited], color=colour, linewidth=2,
                     label=f"{result['mode']}: missing memory, median {result['waited_us']['p50'] / 1000:.1f} ms")
        latency.ecdf([t / 1000 for t in present], color=colour, linewidth=1, linestyle=":",
                     label=f"{result['mode']}: present memory")
    progress.set_title("memory that the guest has written since it goes on")
    progress.set_xlabel("seconds on the destination")
    progress.set_ylabel("MiB")
    progress.set_ylim(0)
    progress.set_xlim(0)
    latency.set_title("touches by their time")
    latency.set_xscale("log")
    latency.set_xlabel("one write, measured by the guest (ms, log scale)")
    latency.set_ylabel("share of touches that took at most this long")
    latency.set_ylim(0, 1)
    latency.set_yticks([0, 0.25, 0.5, 0.75, 0.95, 1])
    for axes in progress, latency:
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"Post-copy of a guest that writes all the time, {results[0]['vcpus']} vCPUs")
    for suffix in "png", "svg":
        figure.savefig(path.with_suffix("." + suffix), dpi=120)
    plt.close(figure)
