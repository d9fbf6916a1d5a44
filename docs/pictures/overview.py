#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Draw docs/pictures/overview.svg: how a fault of post-copy is served.

usage: docs/pictures/overview.py [FILE]
"""
import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 372
GREY, RED, BLUE, GREEN = "#5f6b76", "#b8431a", "#0b5f9e", "#2b7f48"
VCPUS = [112 + 48 * n for n in range(4)]     # the middle of each one's box

drawn = []


def text(x, y, words, size=13, colour="#1b1f23", anchor="middle", weight="normal"):
    drawn.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" '
                 f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>')


def box(x, middle, width, height, lines, colour):
    drawn.append(f'<rect x="{x}" y="{middle - height / 2:g}" width="{width}" height="{height}" '
                 f'rx="6" fill="{colour}" fill-opacity="0.1" stroke="{colour}" '
                 'stroke-width="1.5"/>')
    for n, line in enumerate(lines):
        text(x + width / 2, middle + 4.5 + 16 * (n - (len(lines) - 1) / 2), line)


def arrow(x1, y1, x2, y2, colour, words=""):
    drawn.append(f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{colour}" stroke-width="1.6" '
                 f'marker-end="url(#{colour[1:]})"/>')
    if words:
        text((x1 + x2) / 2, (y1 + y2) / 2 - 6, words, 12, colour)


def panel(x, title, subtitle):
    drawn.append(f'<rect x="{x}" y="8" width="466" height="{HEIGHT - 16}" rx="8" fill="none" '
                 'stroke="#d0d7de"/>')
    text(x + 18, 36, title, 16, anchor="start", weight="bold")
    text(x + 18, 56, subtitle, 12.5, GREY, anchor="start")


def note(x, *lines):
    for n, line in enumerate(lines):
        text(x + 18, 334 + 18 * n, line, 12.5, GREY, anchor="start")


def stock(x):
    panel(x, "QEMU 10.0", "All faults pass one queue of the kernel and one thread.")
    for n, y in enumerate(VCPUS):
        box(x + 18, y, 74, 36, [f"vCPU {n}"], RED)
        arrow(x + 92, y, x + 148, 184 + 6 * (n - 1.5), RED)
    box(x + 154, 184, 92, 76, ["userfaultfd:", "one queue"], RED)
    arrow(x + 246, 184, x + 276, 184, RED)
    box(x + 282, 184, 70, 76, ["fault", "thread"], RED)
    arrow(x + 352, 184, x + 384, 184, RED)
    box(x + 390, 184, 60, 190, ["source"], GREY)
    arrow(x + 390, 304, x + 100, 304, GREEN, "page placed; the kernel scans all waiters")
    note(x, "A small request can wait 40 ms for TCP's delayed", "acknowledgement of the one before.")


def fork(x):
    panel(x, "This branch", "Each vCPU leaves KVM and requests its page itself.")
    for n, y in enumerate(VCPUS):
        box(x + 18, y, 74, 36, [f"vCPU {n}"], BLUE)
        arrow(x + 92, y, x + 184, y, BLUE, "exit")
    box(x + 190, 184, 142, 190, ["request table:", "one entry per page,", "sent at once"], BLUE)
    arrow(x + 332, 184, x + 384, 184, BLUE)
    box(x + 390, 184, 60, 190, ["source"], GREY)
    arrow(x + 390, 304, x + 100, 304, GREEN, "page placed; its own waiters are woken")
    note(x, "Meanwhile a Linux guest runs another task, or serves interrupts.",
         "userfaultfd stays for devices, the kernel and QEMU's own threads.")


def main():
    stock(8)
    fork(486)
    heads = "".join(
        f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for colour in (RED, BLUE, GREEN))
    svg = "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" role="img">',
        "<title>How a fault of post-copy is served by QEMU 10.0 and by this branch</title>",
        f"<defs>{heads}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *drawn, "</svg>", ""])
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    out.write_text(svg)


if __name__ == "__main__":
    main()
