# SPDX-License-Identifier: GPL-2.0-or-later
"""Patterns that must be found in text."""
import re


def search(pattern: str, text: str) -> re.Match[str]:
    """Like re.search, but the pattern must be found; ^ and $ match at each line."""
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"no {pattern} in:\n{text}"
    return match
