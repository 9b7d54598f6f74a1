"""When each chunk of a session passed what, and what follows from it. Nothing is kept of a chunk that was committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Chunk:
    """What is known of a chunk before it is committed."""

    anchor_at: float | None = None
    control_at: float | None = None
    passes: dict[str, _Pass] = field(default_factory=dict)


class Timing:
    """The clock of one session.

    Args:
        spec: names the latency anchor and the stages.
        now: when the session was asked for, in seconds.
        total: numbers of all sessions of the pipeline, which get everything that this session's get.

    Attributes:
        stats: numbers of this session.
        gaps: stage name to what it waits for.
        committed_at: when the last chunk was committed.
    """

    def __init__(self, spec: StreamSpec, now: float, total: StreamStats) -> None:
        """Every stage is idle, because the session has no place yet."""
        self.stats = StreamStats(stage.name for stage in spec.stages)
        self.gaps = {name: IdleGaps(self.stats.stages[name].idle, total.stages[name].idle) for name in total.stages}
        for gaps in self.gaps.values():
            gaps.turn("placement", now)
        self.committed_at: float | None = None
        self._anchor = spec.latency_anchor
        self._control = spec.control
        self._opened_at = now
        self._ready_at = now
        self._total = total
        self._done = 0
        self._chunks: dict[int, _Chunk] = {}

    def ready(self, now: float) -> None:
        """All stages are initialized: times of chunks are told from here."""
        self._ready_at = now

    def entered(self, artifact: str, index: int, now: float) -> None:
        """An external input of a chunk was accepted; the anchor, or without one the first, starts its clock."""
        chunk = self._chunk(index)
        if chunk is None:
            return
        if chunk.anchor_at is None and self._anchor in (None, artifact):
            chunk.anchor_at = now
        if artifact == self._control:
            chunk.control_at = now

    def offered(self, stage: str, index: int, now: float) -> None:
        """A stage could run a chunk."""
        chunk = self._chunk(index)
        if chunk is not None and stage not in chunk.passes:
            chunk.passes[stage] = _Pass(now)

    def withdrawn(self, stage: str, index: int) -> None:
        """A stage that could run a chunk won't: it isn't passed there."""
        chunk = self._chunks.get(index)
        if chunk is not None:
            chunk.passes.pop(stage, None)

    def admitted(self, stage: str, index: int, now: float) -> None:
        """A task was sent to its actor: what the stage waited for is known."""
        if (one := self._pass(stage, index)) is not None:
            one.admitted_at = one.started_at = now
            one.waited_for, one.waited_s = self.gaps[stage].waited(now)

    def started(self, stage: str, index: int, now: float) -> None:
        """The actor began it."""
        if (one := self._pass(stage, index)) is not None:
            one.started_at = now

    def completed(self, stage: str, index: int, run_s: float, now: float) -> None:
        """Its result arrived; the stage had computed for `run_s` seconds, or less if that is longer than it had."""
        if (one := self._pass(stage, index)) is None:
            return
        one.completed_at = now
        mine, all_ = self.stats.stages[stage], self._total.stages[stage]
        mine.ready_to_admitted.add_with(all_.ready_to_admitted, one.admitted_at - one.ready_at)
        mine.admitted_to_started.add_with(all_.admitted_to_started, one.started_at - one.admitted_at)
        mine.started_to_completed.add_with(all_.started_to_completed, now - one.started_at)
        mine.run.add_with(all_.run, min(run_s, now - one.admitted_at))  # from the start on, if that was told late

    def of_chunk(self, index: int, now: float) -> ChunkTiming:
        """The times of a chunk that is complete `now`."""
        chunk, since = self._chunks.get(index) or _Chunk(), self._ready_at
        return ChunkTiming(
            committed_s=now - since,
            latency_s=now - (since if chunk.anchor_at is None else chunk.anchor_at),
            period_s=None if self.committed_at is None else now - self.committed_at,
            stages={name: self._stage(one) for name, one in chunk.passes.items()},
            control_s=None if chunk.control_at is None else chunk.control_at - since,
        )

    def committed(self, index: int, timing: ChunkTiming, changes_at: Iterable[float], now: float) -> None:
        """A chunk is sent: its times go into the histograms."""
        self._chunks.pop(index, None)
        self._done = index + 1
        mine, all_ = self.stats, self._total
        mine.chunks += 1
        all_.chunks += 1
        mine.control_to_output.add_with(all_.control_to_output, timing.latency_s)
        if timing.period_s is None:
            mine.first_output.add_with(all_.first_output, now - self._opened_at)
        else:
            mine.period.add_with(all_.period, timing.period_s)
        for at in changes_at:
            mine.change_to_frame.add_with(all_.change_to_frame, now - at)
        self.committed_at = now

    def check(self, in_flight_max: int) -> None:
        """Assert that only chunks on their way are remembered."""
        assert all(index >= self._done for index in self._chunks), "a committed chunk is remembered"
        assert len(self._chunks) <= in_flight_max, "more chunks are remembered than can be on their way"

    def _chunk(self, index: int) -> _Chunk | None:
        """What is known of a chunk, which may be new; None of one that was committed."""
        chunk = self._chunks.get(index)
        if chunk is None and index >= self._done:
            chunk = self._chunks[index] = _Chunk()
        return chunk

    def _pass(self, stage: str, index: int) -> _Pass | None:
        chunk = self._chunks.get(index)
        return None if chunk is None else chunk.passes.get(stage)

    def _stage(self, one: _Pass) -> StageTiming:
        since = self._ready_at
        return StageTiming(
            one.ready_at - since,
            one.admitted_at - since,
            one.started_at - since,
            one.completed_at - since,
            one.waited_for,
            one.waited_s,
        )
