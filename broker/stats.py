"""Numbers of fixed size: histograms, and where a stage's idle time went."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

STEPS_PER_DOUBLING = 8
DOUBLINGS = 24
LEAST_S = 1e-4
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}

NO_GAP = ("", 0.0)

_BUCKETS = STEPS_PER_DOUBLING * DOUBLINGS + 2
_BOUNDS = [LEAST_S * 2 ** (step / STEPS_PER_DOUBLING) for step in range(_BUCKETS - 1)]
"""The least duration of each bucket but the first, in seconds."""
_BOUNDS_ARRAY = np.array(_BOUNDS)
NEW_MAX = 64
"""Durations that a histogram keeps until it counts them all at once: one by one that takes three times as long."""


class Histogram:
    """Durations in buckets that grow by 2^(1/8), from 0.1 ms to 28 minutes: a percentile is right within 5 %.

    Count, mean and maximum are exact.

    """

    __slots__ = ("_buckets", "_max", "_new", "_sum")

    def __init__(self) -> None:
        """Start empty."""
        self._buckets = np.zeros(_BUCKETS, np.int64)
        self._max = 0.0
        self._sum = 0.0
        self._new = array("d")

    def add(self, seconds: float) -> None:
        """Note one duration; a negative one counts as 0."""
        new = self._new
        new.append(seconds)
        if len(new) == NEW_MAX:
            self._count()

    def take_in(self, other: Histogram) -> None:
        """Add all durations of another one."""
        other._count()
        self._buckets += other._buckets
        self._sum += other._sum
        self._max = max(self._max, other._max)

    def quantile(self, q: float) -> float:
        """The duration that the share `q` of all doesn't exceed, in seconds; 0 when empty."""
        self._count()
        return self._quantile(q, np.cumsum(self._buckets))

    def summary(self) -> dict[str, int | float]:
        """Count, mean, percentiles and maximum, in seconds."""
        self._count()
        upto = np.cumsum(self._buckets)
        count = int(upto[-1])
        quantiles = {name: self._quantile(q, upto) for name, q in QUANTILES.items()}
        return {"count": count, "mean": self._sum / max(count, 1), **quantiles, "max": self._max}

    def _count(self) -> None:
        """Put those that are new into their buckets."""
        if self._new:
            values = np.maximum(np.frombuffer(self._new), 0.0)
            self._buckets += np.bincount(np.searchsorted(_BOUNDS_ARRAY, values, side="right"), minlength=_BUCKETS)
            self._sum += float(values.sum())
            self._max = max(self._max, float(values.max()))
            self._new = array("d")

    def _quantile(self, q: float, upto: NDArray[np.int64]) -> float:
        rank = max(math.ceil(q * int(upto[-1])), 1)
        # 0 when empty, because then nothing is longer
        return min(_middle(int(np.searchsorted(upto, rank))), self._max)


def _middle(bucket: int) -> float:
    """Geometric middle of a bucket's bounds; half of the least duration for the first, no bound for the last."""
    if bucket == 0:
        return LEAST_S / 2
    if bucket == _BUCKETS - 1:
        return math.inf
    return LEAST_S * float(2 ** ((bucket - 0.5) / STEPS_PER_DOUBLING))


class IdleTime:
    """How long a stage didn't run, by cause; the causes are those that its spec allows.

    Attributes:
        causes: cause to the number of gaps and their seconds.
    """

    __slots__ = ("causes",)

    def __init__(self) -> None:
        """Start with no gap."""
        self.causes: dict[str, list[float]] = {}

    def add(self, cause: str, seconds: float) -> None:
        """Note a gap that is over."""
        gaps = self.causes.get(cause)
        if gaps is None:
            self.causes[cause] = [1, seconds]
        else:
            gaps[0] += 1
            gaps[1] += seconds

    def take_in(self, other: IdleTime) -> None:
        """Add all gaps of another one."""
        for cause, (count, seconds) in other.causes.items():
            gaps = self.causes.setdefault(cause, [0, 0.0])
            gaps[0] += count
            gaps[1] += seconds

    def summary(self) -> dict[str, dict[str, int | float]]:
        """Cause to the number of gaps and their seconds; the gap that is still open isn't in it."""
        return {cause: {"count": count, "seconds": seconds} for cause, (count, seconds) in self.causes.items()}


class IdleGaps:
    """Where one stage of a session is between two tasks, and since when.

    Args:
        idle: what is told of each gap when it is over.

    Attributes:
        cause: what the stage waits for; empty when it runs, or has nothing left to do.
    """

    __slots__ = ("_idle", "_last", "_since", "cause")

    def __init__(self, idle: IdleTime) -> None:
        """Start outside of a gap."""
        self._idle = idle
        self._since = 0.0
        self._last = NO_GAP
        self.cause = ""

    def turn(self, cause: str, now: float) -> None:
        """From `now` on the cause is `cause`, which may be empty. What took no time is no gap."""
        before, seconds = self.cause, now - self._since
        if cause == before:
            return
        if before and seconds > 0.0:
            self._last = before, seconds
            self._idle.add(before, seconds)
        if not cause:
            self._last = NO_GAP
        self.cause = cause
        self._since = now

    def waited(self, now: float) -> tuple[str, float]:
        """What the stage waited for last since it ran, until `now`, and for how many seconds."""
        if self.cause and now > self._since:
            return self.cause, now - self._since
        return self._last


class StageStats:
    """The numbers of one stage, of one session or of all sessions of one pipeline.

    Attributes:
        ready_to_admitted: a task could run, to its being sent to the actor: other sessions' turns.
        admitted_to_started: sent, to begun: the way there, and the actor's mailbox.
        started_to_completed: begun, to its result having arrived: the work and the way back.
        run: the work alone, as the worker measured it.
        idle: why it didn't run.
    """

    __slots__ = ("admitted_to_started", "idle", "ready_to_admitted", "run", "started_to_completed")

    def __init__(self) -> None:
        """Start empty."""
        self.ready_to_admitted = Histogram()
        self.admitted_to_started = Histogram()
        self.started_to_completed = Histogram()
        self.run = Histogram()
        self.idle = IdleTime()

    def take_in(self, other: StageStats) -> None:
        """Add all numbers of another one."""
        self.ready_to_admitted.take_in(other.ready_to_admitted)
        self.admitted_to_started.take_in(other.admitted_to_started)
        self.started_to_completed.take_in(other.started_to_completed)
        self.run.take_in(other.run)
        self.idle.take_in(other.idle)

    def summary(self) -> dict[str, dict[str, int | float] | dict[str, dict[str, int | float]]]:
        """Name to numbers, in seconds."""
        return {
            "ready_to_admitted_s": self.ready_to_admitted.summary(),
            "admitted_to_started_s": self.admitted_to_started.summary(),
            "started_to_completed_s": self.started_to_completed.summary(),
            "run_s": self.run.summary(),
            "idle_s": self.idle.summary(),
        }


class StreamStats:
    """The histograms of one session, or of all sessions of one pipeline.

    Attributes:
        control_to_output: acceptance of a chunk's latency anchor to the chunk's commit.
        period: commit to commit.
        first_output: asking for the session to its first commit.
        change_to_frame: a change of the keys to the commit of the first chunk that applied it.
        stages: stage name to its numbers.

    Args:
        stages: the names of the stages.
    """

    __slots__ = ("change_to_frame", "chunks", "control_to_output", "first_output", "period", "stages")

    def __init__(self, stages: Iterable[str]) -> None:
        """Start empty."""
        self.stages = {name: StageStats() for name in stages}
        self.chunks = 0
        self.control_to_output = Histogram()
        self.period = Histogram()
        self.first_output = Histogram()
        self.change_to_frame = Histogram()

    def take_in(self, other: StreamStats) -> None:
        """Add all numbers of another one, which has the same stages."""
        self.chunks += other.chunks
        self.control_to_output.take_in(other.control_to_output)
        self.period.take_in(other.period)
        self.first_output.take_in(other.first_output)
        self.change_to_frame.take_in(other.change_to_frame)
        for name, stage in self.stages.items():
            stage.take_in(other.stages[name])

    def summary(self) -> dict[str, dict[str, int | float]]:
        """Name to numbers, in seconds; those of the stages stand in `stages`."""
        return {
            "control_to_output_s": self.control_to_output.summary(),
            "period_s": self.period.summary(),
            "first_output_s": self.first_output.summary(),
            "change_to_frame_s": self.change_to_frame.summary(),
        }
