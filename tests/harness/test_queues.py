# SPDX-License-Identifier: GPL-2.0-or-later
"""The model, where the answer is known."""
import pytest

from tests.bench.model import in_turn
from tests.bench.queues import Step, simulate

CYCLE = [Step(None, 10, 10), Step("a", 40, 20), Step("b", 30, 30), Step(None, 20, 20)]


def test_one_vcpu_waits_for_nobody():
    result = simulate(CYCLE, vcpus=1, processors=8, wake_us=5)
    assert result.span_us == pytest.approx(10 + 40 + 30 + 20 + 4 * 5, rel=0.02)
    assert result.faults_per_s * result.span_us == pytest.approx(1e6, rel=0.02)


def test_slowest_server_decides():
    result = simulate(CYCLE, vcpus=100, processors=200, wake_us=5)
    assert result.faults_per_s == pytest.approx(1e6 / 30, rel=0.03)
    assert result.busy_share["b"] == pytest.approx(1, abs=0.01)
    # Little's law: all vCPUs are within a fault.
    assert result.span_us == pytest.approx(100 * 30, rel=0.03)


def test_channels_share_the_work():
    cycle = [Step(None, 10, 10), Step("a", 40, 20, threads=4), Step("b", 30, 30, threads=4), Step(None, 1, 1)]
    result = simulate(cycle, vcpus=400, processors=500, wake_us=5, faults=20000)
    # By chance, some of them wait for nothing at times.
    assert 0.9 * 4e6 / 30 < result.faults_per_s < 1.01 * 4e6 / 30
    assert result.busy_share["b"] > 0.9


def test_few_faults_use_one_channel():
    cycle = [Step(None, 1, 1), Step("a", 30, 30, threads=8), Step(None, 1, 1)]
    result = simulate(cycle, vcpus=4, processors=50, wake_us=0)
    assert result.faults_per_s == pytest.approx(1e6 / 30, rel=0.03)


def test_one_processor_does_all_the_work():
    result = simulate(CYCLE, vcpus=4, processors=1, wake_us=5)
    assert result.faults_per_s * 1.03 >= 1e6 / (10 + 40 + 30 + 20)
    assert result.faults_per_s <= 1e6 / (10 + 20 + 30 + 20) * 1.03


def test_what_a_vcpu_reads_is_the_channels():
    without = {"vCPUs": 16.0, "preempt thread": 11.0}
    assert in_turn({"vCPUs": 24.0, "destination's fetch threads": 1.0}, without) == {
        "vCPUs": 14.0, "destination's fetch threads": 11.0}
    # One whose thread reads all of it
    alone = {"vCPUs": 16.0, "destination's fetch threads": 12.0}
    assert in_turn(alone, without) == alone
