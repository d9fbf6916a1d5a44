# SPDX-License-Identifier: GPL-2.0-or-later
"""max-postcopy-bandwidth is for pages that nobody waits for."""
from tests.lab.pair import Pair


def test_page_on_its_way(lab):
    """The background sleeps within a huge page; a vCPU that misses that page wakes it."""
    with Pair(lab, memory_mb=48, pattern="samehuge", backend="hugetlb") as pair:
        pair.postcopy(bandwidth=32 << 10)
        pair.check_memory()
        pair.finish_fast()
        trace = [f"{name} {text}" for name, text in pair.source.trace()
                 if name in ("postcopy_preempt_hit", "migration_rate_limit_post")]
        hits = [i for i, event in enumerate(trace) if event.startswith("postcopy_preempt_hit ramblock ram ")]
        assert hits, "no vCPU has missed a page that was on its way"
        # Requests for a page that has been woken already do not count; and the time may be over at the same time.
        woken = [i for i in hits if any(event.endswith("urgent: 1") for event in trace[i + 1:i + 3])]
        assert len(woken) >= 0.5 * len(hits), trace
