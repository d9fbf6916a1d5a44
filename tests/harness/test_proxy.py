# SPDX-License-Identifier: GPL-2.0-or-later
"""The proxy between source and destination in the lab's tests: tests/lab/proxy.py."""
import contextlib
import io

from tests.lab.proxy import Close, Page, Pages


def test_stream_that_ends_anywhere():
    """A source may be killed in the middle of a page."""
    page = Page(0x5000, b"ram", b"x" * 4096)
    stream = page.pack()
    for size in range(len(stream) + 1):
        read: list[Page | bytes] = []
        with contextlib.suppress(Close):
            read += Pages(io.BufferedReader(io.BytesIO(stream[:size]))).all()
        assert read == ([page] if size == len(stream) else [])
