# SPDX-License-Identifier: GPL-2.0-or-later
"""The demo's picture: how far the guest got, and how long its touches of memory took."""
import heapq
from itertools import accumulate

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = "#c8501e", "#0b62a4", "#3d8b37"
MIB = 1 << 20
PAGE = 4096
POINTS = 400        # of a line


def few(values):
    """As many of the sorted values as a line needs, by the number of values up to each."""
    at = sorted({len(values) * i // POINTS - 1 for i in range(1, POINTS + 1)} & set(range(len(values))))
    return [values[i] for i in at], [i + 1 for i in at]


def share(axes, values, **options):
    """Draw which share of the values is at most so large."""
    some, numbers = few(sorted(values))
    axes.plot(some, [n / len(values) for n in numbers], **options)


def draw(results, passes, path):
    """results: the runs' figures; passes: their latencies in microseconds; path: without suffix."""
    figure, (progress, latency) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for result, (pass1, pass2), colour in zip(results, passes, COLOURS, strict=True):
        # vCPUs touch page after page, each beginning when the guest goes on.
        ends, numbers = few(list(heapq.merge(*map(accumulate, pass1))))
        progress.plot([t / 1e6 for t in ends], [n * PAGE / MIB for n in numbers],
                      color=colour, linewidth=2, label=result["mode"])
        waited = [t / 1000 for cpu in pass1 for t in cpu if t > result["waited_threshold_us"]]
        present = [t / 1000 for cpu in pass2 for t in cpu]
        share(latency, waited, color=colour, linewidth=2,
              label=f"{result['mode']}: missing memory,\nmedian {result['waited_us']['p50'] / 1000:.1f} ms")
        share(latency, present, color=colour, linewidth=1, linestyle=":", label=f"{result['mode']}: present memory")
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
    progress.legend()
    figure.legend(*latency.get_legend_handles_labels(), loc="outside lower right", ncols=len(results), fontsize="small")
    figure.suptitle(f"Post-copy of a guest that writes all the time, {results[0]['vcpus']} vCPUs")
    for suffix in "png", "svg":
        figure.savefig(path.with_suffix("." + suffix), dpi=120)
    plt.close(figure)
