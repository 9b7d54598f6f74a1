"""When each chunk of a session passed what, and what follows from it. Nothing is kept of a chunk that was committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reelwire.messages import ChunkTiming, StageTiming
from reelwire.spec import StreamSpec

from .stats import IdleGaps, StreamStats


@dataclass(slots=True)
class _Pass:
    """When one chunk passed one stage, in seconds of the broker's clock."""

    ready_at: float
    admitted_at: float = 0.0
    started_at: float = 0.0
    completed_at: float = 0.0
    waited_for: str = ""
    waited_s: float = 0.0

    def since(self, at: float) -> StageTiming:
        """The same, in seconds since then."""
        begun = self.admitted_at - at, self.started_at - at, self.completed_at - at
        return StageTiming(self.ready_at - at, *begun, self.waited_for, self.waited_s)


class Timing:
    """The clock of one session.

    Args:
        spec: names the latency anchor and the stages.
        now: when the session was asked for, in seconds.

    Attributes:
        stats: its numbers.
        gaps: stage name to what it waits for.
        committed_at: when the last chunk was committed.
    """

    def __init__(self, spec: StreamSpec, now: float) -> None:
        """Every stage is idle, because the session has no place yet."""
        self.stats = StreamStats(stage.name for stage in spec.stages)
        self.gaps = {name: IdleGaps(stage.idle) for name, stage in self.stats.stages.items()}
        for gaps in self.gaps.values():
            gaps.turn("placement", now)
        self.committed_at: float | None = None
        self._anchor = spec.latency_anchor
        self._control = spec.control
        self._opened_at = now
        self._ready_at = now
        self._done = 0
        self._anchored: dict[int, float] = {}
        self._controlled: dict[int, float] = {}
        self._passes: dict[str, dict[int, _Pass]] = {name: {} for name in self.gaps}

    def ready(self, now: float) -> None:
        """All stages are initialized: times of chunks are told from here."""
        self._ready_at = now

    def entered(self, artifact: str, index: int, now: float) -> None:
        """An external input of a chunk was accepted; the anchor, or without one the first, starts its clock."""
        if index < self._done:
            return
        if self._anchor is None or self._anchor == artifact:
            self._anchored.setdefault(index, now)
        if artifact == self._control:
            self._controlled[index] = now

    def offered(self, stage: str, index: int, now: float) -> None:
        """A stage could run a chunk."""
        passes = self._passes[stage]
        if index not in passes and index >= self._done:
            passes[index] = _Pass(now)

    def withdrawn(self, stage: str, index: int) -> None:
        """A stage that could run a chunk won't: it isn't passed there."""
        self._passes[stage].pop(index, None)

    def admitted(self, stage: str, index: int, now: float) -> None:
        """A task was sent to its actor: what the stage waited for is known."""
        one = self._passes[stage].get(index)
        if one is not None:
            one.admitted_at = one.started_at = now
            one.waited_for, one.waited_s = self.gaps[stage].waited(now)

    def started(self, stage: str, index: int, now: float) -> None:
        """The actor began it."""
        one = self._passes[stage].get(index)
        if one is not None:
            one.started_at = now

    def completed(self, stage: str, index: int, run_s: float, now: float) -> None:
        """Its result arrived; the stage had computed for `run_s` seconds, or less if that is longer than it had."""
        one = self._passes[stage].get(index)
        if one is None:
            return
        one.completed_at = now
        stats = self.stats.stages[stage]
        stats.ready_to_admitted.add(one.admitted_at - one.ready_at)
        stats.admitted_to_started.add(one.started_at - one.admitted_at)
        stats.started_to_completed.add(now - one.started_at)
        stats.run.add(min(run_s, now - one.admitted_at))  # from the start on, if that was told late

    def of_chunk(self, index: int, now: float) -> ChunkTiming:
        """The times of a chunk that is complete `now`."""
        since, control_at = self._ready_at, self._controlled.get(index)
        return ChunkTiming(
            committed_s=now - since,
            latency_s=now - self._anchored.get(index, since),
            period_s=None if self.committed_at is None else now - self.committed_at,
            stages={name: passes[index].since(since) for name, passes in self._passes.items() if index in passes},
            control_s=None if control_at is None else control_at - since,
        )

    def committed(self, index: int, timing: ChunkTiming, changes_at: Iterable[float], now: float) -> None:
        """A chunk is sent: its times go into the histograms."""
        self._done = index + 1
        self._anchored.pop(index, None)
        self._controlled.pop(index, None)
        for passes in self._passes.values():
            passes.pop(index, None)
        stats = self.stats
        stats.chunks += 1
        stats.control_to_output.add(timing.latency_s)
        if timing.period_s is None:
            stats.first_output.add(now - self._opened_at)
        else:
            stats.period.add(timing.period_s)
        for at in changes_at:
            stats.change_to_frame.add(now - at)
        self.committed_at = now

    def check(self, in_flight_max: int) -> None:
        """Assert that only chunks on their way are remembered."""
        known = {*self._anchored, *self._controlled, *(index for passes in self._passes.values() for index in passes)}
        assert all(index >= self._done for index in known), "a committed chunk is remembered"
        assert len(known) <= in_flight_max, "more chunks are remembered than can be on their way"
