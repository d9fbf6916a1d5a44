# SPDX-License-Identifier: GPL-2.0-or-later
"""The report has a section for each bench."""
import re

from tests.bench.report import NAMES
from tests.lab.paths import ROOT
from tests.lab.text import search


def test_each_bench_has_a_section():
    listed = search(r"(?s)benches = \{(.*?)\n\}", (ROOT / "tests/meson.build").read_text())[1]
    benches = re.findall(r"^  '(.*?)':", listed, re.M)
    assert len(benches) == len(NAMES)
    for bench in benches:
        assert bench in NAMES or f"bench-{bench}" in NAMES
