"""Numbers of fixed size: histograms, and where a stage's idle time went."""

from __future__ import annotations

import math
from array import array

STEPS_PER_DOUBLING = 8
DOUBLINGS = 24
LEAST_S = 1e-4
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}

_BUCKETS = STEPS_PER_DOUBLING * DOUBLINGS + 2


class Histogram:
    """Durations in buckets that grow by 2^(1/8), from 0.1 ms to 28 minutes: a percentile is right within 5 %.

    Count, mean and maximum are exact.
    """

    __slots__ = ("_buckets", "_sum", "count", "max")

    def __init__(self) -> None:
        """Start empty."""
        self._buckets = array("Q", bytes(8 * _BUCKETS))
        self.count = 0
        self.max = 0.0
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Note one duration; a negative one counts as 0."""
        value = max(seconds, 0.0)
        self._buckets[_bucket(value)] += 1
        self.count += 1
        self._sum += value
        self.max = max(self.max, value)

    @property
    def mean(self) -> float:
        """The mean, in seconds; 0 when empty."""
        return self._sum / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The duration that the share `q` of all doesn't exceed, in seconds; 0 when empty."""
        rank = max(math.ceil(q * self.count), 1)
        seen = 0
        for bucket, count in enumerate(self._buckets):
            seen += count
            if seen >= rank:
                return min(_middle(bucket), self.max)
        return 0.0

    def summary(self) -> dict[str, int | float]:
        """Count, mean, percentiles and maximum, in seconds."""
        quantiles = {name: self.quantile(q) for name, q in QUANTILES.items()}
        return {"count": self.count, "mean": self.mean, **quantiles, "max": self.max}


def _bucket(seconds: float) -> int:
    if seconds < LEAST_S:
        return 0
    return min(1 + int(math.log2(seconds / LEAST_S) * STEPS_PER_DOUBLING), _BUCKETS - 1)


def _middle(bucket: int) -> float:
    """Geometric middle of a bucket's bounds; half of the least duration for the first, no bound for the last."""
    if bucket == 0:
        return LEAST_S / 2
    if bucket == _BUCKETS - 1:
        return math.inf
    return LEAST_S * float(2 ** ((bucket - 0.5) / STEPS_PER_DOUBLING))


class IdleGaps:
    """How long one stage of a session didn't run, by cause; the causes are those that its spec allows."""

    __slots__ = ("_cause", "_since", "causes")

    def __init__(self) -> None:
        """Start outside of a gap."""
        self.causes: dict[str, tuple[int, float]] = {}
        self._cause = ""
        self._since = 0.0

    def turn(self, cause: str, now: float) -> None:
        """From `now` on the cause is `cause`; an empty one means that the stage runs, or that it has nothing left to do."""
        if cause == self._cause:
            return
        if self._cause:
            count, seconds = self.causes.get(self._cause, (0, 0.0))
            self.causes[self._cause] = (count + 1, seconds + max(now - self._since, 0.0))
        self._cause = cause
        self._since = now

    def summary(self) -> dict[str, dict[str, int | float]]:
        """Cause to the number of gaps and their seconds; the gap that is still open isn't in it."""
        return {cause: {"count": count, "seconds": seconds} for cause, (count, seconds) in self.causes.items()}


class StreamStats:
    """The histograms of one session, or of all sessions of one pipeline.

    Attributes:
        control_to_output: acceptance of a chunk's latency anchor to the chunk's commit.
        period: commit to commit.
        first_output: asking for the session to its first commit.
        change_to_frame: a change of the keys to the commit of the first chunk that applied it.
    """

    __slots__ = ("change_to_frame", "chunks", "control_to_output", "first_output", "period")

    def __init__(self) -> None:
        """Start empty."""
        self.chunks = 0
        self.control_to_output = Histogram()
        self.period = Histogram()
        self.first_output = Histogram()
        self.change_to_frame = Histogram()

    def summary(self) -> dict[str, int | dict[str, int | float]]:
        """Name to numbers, in seconds."""
        return {
            "chunks": self.chunks,
            "control_to_output_s": self.control_to_output.summary(),
            "period_s": self.period.summary(),
            "first_output_s": self.first_output.summary(),
            "change_to_frame_s": self.change_to_frame.summary(),
        }
