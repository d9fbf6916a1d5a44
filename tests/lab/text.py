# SPDX-License-Identifier: GPL-2.0-or-later
"""What is looked for in text, and is there."""
import re


def search(pattern: str, text: str) -> re.Match[str]:
    """As re.search, of which something must be found; ^ and $ are those of a line."""
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"no {pattern} in:\n{text}"
    return match
