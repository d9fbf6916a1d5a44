# SPDX-License-Identifier: GPL-2.0-or-later
"""The demo's picture: how long touches of guest memory took, exits on and off."""
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"on": "#0b62a4", "off": "#c8501e"}


def draw(results, passes, path):
    """results: the runs' figures; passes: their latencies in microseconds; path: without suffix."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for result, (pass1, pass2) in zip(results, passes, strict=True):
        mode = result["exits_mode"]
        waited = sorted(t for cpu in pass1 for t in cpu if t > result["waited_threshold_us"])
        present = sorted(t for cpu in pass2 for t in cpu)
        median = result["waited_us"]["p50"]
        axes.ecdf(waited, color=COLOURS[mode], linewidth=2,
                  label=f"exits {mode}: {len(waited)} touches that waited, median {median:.0f} µs")
        axes.ecdf(present, color=COLOURS[mode], linewidth=1, linestyle=":",
                  label=f"exits {mode}: {len(present)} touches of present memory")
    axes.set_xscale("log")
    axes.set_xlabel("latency of one write, measured by the guest (µs, log scale)")
    axes.set_ylabel("share of touches that took at most this long")
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95, 1])
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(0.02, 0.6))
    axes.set_title(f"Post-copy: touches of missing guest memory, {results[0]['vcpus']} vCPUs")
    for suffix in "png", "svg":
        figure.savefig(path.with_suffix("." + suffix), dpi=120)
    plt.close(figure)
