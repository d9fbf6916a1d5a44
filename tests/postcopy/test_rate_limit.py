# SPDX-License-Identifier: GPL-2.0-or-later
"""max-postcopy-bandwidth is for pages that nobody waits for."""
import time

from pair import MIB, Pair

PAGE = 2 * MIB
BANDWIDTH = 32 << 10
BLOCK_MB = 24


def test_page_on_its_way(lab):
    """The background takes a minute for a huge page: vCPUs that miss it do not wait for that, nor those
    that miss the page with the same number in another RAMBlock."""
    words = []
    for name in "ab":
        words += ["-object", f"memory-backend-memfd,hugetlb=on,hugetlbsize=2M,id={name},size={BLOCK_MB}M",
                  "-numa", f"node,memdev={name}"]
    with Pair(lab, memory_mb=2 * BLOCK_MB, pattern="samehuge", destination_options=words,
              source_options=words) as pair:
        pair.precopy_bandwidth = 4 * MIB
        pair.postcopy(bandwidth=BANDWIDTH)
        begin = time.monotonic()
        pair.check_memory()
        took = time.monotonic() - begin
        pair.source.cmd("migrate-set-parameters", max_postcopy_bandwidth=0)
        pair.finish()
        assert "postcopy_preempt_hit" in dict(pair.source.trace())
        assert took < PAGE / BANDWIDTH / 2
