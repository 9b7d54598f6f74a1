"""Histograms of fixed size, and idle time by cause."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from reelwire.broker.stats import LEAST_S, NEW_MAX, Histogram, IdleGaps, IdleTime, StreamStats


def test_an_empty_histogram_is_all_zeros() -> None:
    """Without a value every number is 0."""
    assert set(Histogram().summary().values()) == {0}


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 60.0])
def test_streaming_30_percentiles_are_right_within_five_percent(scale: float) -> None:
    """Against the sorted values; count, mean and maximum are exact."""
    generator = random.Random(3)
    values = [scale / 10 + generator.expovariate(1 / scale) for _ in range(2000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    summary = histogram.summary()
    ordered = sorted(values)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        exact = ordered[math.ceil(q * len(ordered)) - 1]
        assert summary[name] == pytest.approx(exact, rel=0.05)
    assert summary["count"] == 2000
    assert summary["mean"] == pytest.approx(sum(values) / 2000)
    assert summary["max"] == ordered[-1]


def test_streaming_30_a_histogram_does_not_grow() -> None:
    """Its size is the same after many values, however small, large or negative."""
    histogram = Histogram()
    histogram.add(0.0)
    before = histogram._buckets.nbytes
    for value in (-1.0, 0.0, LEAST_S / 3, 1.0, 1e9):
        for _ in range(100):
            histogram.add(value)
    assert histogram._buckets.nbytes == before
    assert len(histogram._new) < NEW_MAX
    assert histogram.quantile(0.0) <= LEAST_S
    assert histogram.quantile(1.0) == 1e9


def test_streaming_30_idle_time_is_kept_by_cause() -> None:
    """A gap ends when its cause changes; running isn't idle; the same cause again goes on."""
    mine, everybodys = IdleTime(), IdleTime()
    everybodys.add("credit", 2.0)
    gaps = IdleGaps(mine)
    gaps.turn("placement", 0.0)
    gaps.turn("placement", 1.0)
    gaps.turn("input:control", 2.0)
    gaps.turn("", 5.0)
    gaps.turn("credit", 6.0)
    gaps.turn("input:control", 7.0)
    gaps.turn("", 8.0)
    everybodys.take_in(mine)
    assert everybodys.summary()["credit"] == {"count": 2, "seconds": 3.0}
    assert mine.summary() == {
        "placement": {"count": 1, "seconds": 2.0},
        "input:control": {"count": 2, "seconds": 4.0},
        "credit": {"count": 1, "seconds": 1.0},
    }


def test_streaming_30_numbers_of_several_sessions_add_up() -> None:
    """A total that took two sessions in says what it would say if everything had been noted there."""
    generator = random.Random(4)
    one, other, total, expected = (StreamStats(["encode"]) for _ in range(4))
    for number in range(500):
        value = generator.expovariate(10)
        for stats in (one if number % 3 else other, expected):
            stats.chunks += 1
            stats.period.add(value)
            stats.stages["encode"].run.add(value / 2)
            stats.stages["encode"].idle.add(generator.choice(["credit"]), value)
    total.take_in(one)
    total.take_in(other)
    assert total.chunks == 500
    pairs: list[tuple[Any, Any]] = [(total.summary(), expected.summary())]
    pairs.append((total.stages["encode"].summary(), expected.stages["encode"].summary()))
    for said, right in pairs:
        assert repr(_rounded(said)) == repr(_rounded(right))


def _rounded(numbers: Any) -> Any:
    """Sums of floats depend on their order."""
    if isinstance(numbers, dict):
        return {name: _rounded(value) for name, value in numbers.items()}
    return round(numbers, 9)


def test_a_stream_says_all_its_numbers() -> None:
    """Names carry their unit, those of each stage as well."""
    stats = StreamStats(["encode"])
    assert sorted(stats.summary()) == ["change_to_frame_s", "control_to_output_s", "first_output_s", "period_s"]
    assert sorted(stats.stages["encode"].summary()) == [
        "admitted_to_started_s",
        "idle_s",
        "ready_to_admitted_s",
        "run_s",
        "started_to_completed_s",
    ]
