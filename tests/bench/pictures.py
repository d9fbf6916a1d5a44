# SPDX-License-Identifier: GPL-2.0-or-later
"""Pictures of the benches and of the demo, as PNG and SVG, in build/reports."""
import heapq
import itertools
import statistics
import textwrap

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from tests.lab.cli import quantile
from tests.lab.paths import REPORTS

COLOURS = ("#c8501e", "#7a7a7a", "#0b62a4", "#2f8f4e")
# The same figures give the same file; text stays text.
matplotlib.rcParams |= {"svg.hashsalt": "bench", "svg.fonttype": "none", "font.size": 9}


def _panels(name, title, panels, legend="upper left", **axes):
    """(axis, [(colour, (label, curve)), ...]) of each panel, to plot the curves; then saves the picture."""
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels) + 0.5, 3.8), layout="constrained",
                                    squeeze=False)
    for axis, (panel, curves) in zip(all_axes[0], panels.items(), strict=True):
        yield axis, zip(itertools.cycle(COLOURS), curves.items())
        axis.set(title=panel, **axes)
        axis.grid(alpha=0.3)
        axis.legend(loc=legend, fontsize=7.5)
    _save(figure, name, title)


def _save(figure, name, title):
    # A figure of one panel is narrower than most titles.
    figure.suptitle(textwrap.fill(title, int(12 * figure.get_figwidth())))
    REPORTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(REPORTS / f"{name}.png", dpi=100, metadata={"Software": None})
    figure.savefig(REPORTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def _share(axis, values, **options):
    """For each value, the share of values that are at most as large."""
    values = sorted(values)
    axis.plot([quantile(values, i) for i in range(101)], [i / 100 for i in range(101)], **options)


def distributions(name, title, panels):
    """panels: {title: {curve: microseconds of touches, any number in any order}}"""
    for axis, curves in _panels(name, title, panels, xscale="log", ylim=(0, 1),
                                xlabel="latency of a touch, timed by the guest (µs)",
                                ylabel="share of touches that took at most this long"):
        for colour, (label, values) in curves:
            _share(axis, values, color=colour, linewidth=1.6,
                   label=f"{label}: median {statistics.median(values):.0f} µs")


def rates(name, title, panels, y):
    """panels: {title: {curve: {vCPUs: [values of the rounds]}}}: medians, and bars from least to most."""
    for axis, curves in _panels(name, title, panels, "best", xlabel="vCPUs", ylabel=y, ylim=(0, None)):
        axis.set_xscale("log")
        ticks: set[int] = set()
        for colour, (label, points) in curves:
            middle = [statistics.median(values) for values in points.values()]
            below = [m - min(values) for m, values in zip(middle, points.values(), strict=True)]
            above = [max(values) - m for m, values in zip(middle, points.values(), strict=True)]
            axis.errorbar(list(points), middle, yerr=(below, above), color=colour, linewidth=1.6, capsize=3,
                          marker="o", markersize=3, label=label)
            ticks |= points.keys()
        axis.set_xticks(sorted(ticks), [str(n) for n in sorted(ticks)])
        axis.minorticks_off()


def over_time(name, title, panels, x):
    """panels: {title: {curve: [[(x, y), ...] of each round]}}: all rounds, thin, in the colour of their
    curve; the legend has the medians of their ends."""
    for axis, curves in _panels(name, title, panels, xlabel=x, ylim=(0, None)):
        for colour, (label, rounds) in curves:
            end = statistics.median(points[-1][1] for points in rounds)
            for n, points in enumerate(rounds):
                axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.9, alpha=0.8,
                          label=None if n else f"{label}: {end:.0f}")


def demo(name, results, passes):
    """The guest's progress, and the latency of its touches of memory. results: the runs' figures; passes: their
    latencies in microseconds."""
    figure, (progress, latency) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for colour, result, (pass1, pass2) in zip(itertools.cycle(COLOURS), results, passes):
        # Each vCPU touches page after page, from the moment on at which the guest resumes.
        ends = list(heapq.merge(*map(itertools.accumulate, pass1)))
        some = range(0, len(ends), len(ends) // 400 or 1)
        progress.plot([ends[i] / 1e6 for i in some], [(i + 1) / 256 for i in some],
                      color=colour, linewidth=2, label=result["mode"])
        _share(latency, [t / 1000 for cpu in pass1 for t in cpu if t > result["waited_threshold_us"]],
               color=colour, linewidth=2,
               label=f"{result['mode']}: missing memory,\nmedian {result['waited_us']['p50'] / 1000:.1f} ms")
        _share(latency, [t / 1000 for cpu in pass2 for t in cpu], color=colour, linewidth=1, linestyle=":",
               label=f"{result['mode']}: present memory")
    progress.set(title="memory that the guest has written since it goes on", xlabel="seconds on the destination",
                 ylabel="MiB", ylim=(0, None), xlim=(0, None))
    latency.set(title="touches by their time", xscale="log", ylim=(0, 1),
                xlabel="one write, measured by the guest (ms, log scale)",
                ylabel="share of touches that took at most this long")
    for axis in progress, latency:
        axis.grid(alpha=0.3)
    progress.legend()
    figure.legend(*latency.get_legend_handles_labels(), loc="outside lower right", ncols=len(results), fontsize="small")
    _save(figure, name, f"Post-copy of a guest that writes all the time, {results[0]['vcpus']} vCPUs")
