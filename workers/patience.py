"""How long a leader waits for what it needs to go on, and how it says that it waits no longer. Pure.

Whatever is said over the link may be lost with a connection. So a decision is said again, now and then, until all have
answered it: a rank that had it does nothing, or answers again.
"""

from __future__ import annotations

from collections.abc import Sequence

from reelwire.group_messages import Decision

from .actions import BuildStage
from .group_events import AtStage, LeaveGroup, LoadJobs
from .leader_jobs import LeaderJobs
from .lockstep import AGAIN_S, LEAVE_S, Numbers, Underway


class Patience:
    """What the ranks of a group have to answer, and the files that all need for a job.

    Args:
        group: its name, for the sentences.
        limit_s: how long the ranks may take for one decision, and for the files of a job.
        underway: what the ranks are at.
        bodies: which of them has what.
        jobs: the attempts at jobs.
    """

    def __init__(self, group: str, limit_s: float, underway: Underway, bodies: Numbers, jobs: LeaderJobs) -> None:
        """Nothing is waited for."""
        self._group, self._limit_s = group, limit_s
        self._underway, self._bodies, self._jobs = underway, bodies, jobs
        self._said_at = 0.0

    @property
    def due_at(self) -> float | None:
        """When something is late, or to be said again."""
        times = [due_at for due_at, _, _ in self._awaited()]
        if self._underway.unanswered:
            times.append(self._said_at + AGAIN_S)
        return min(times, default=None)

    def said(self, now: float) -> None:
        """Something was decided, and said to the other ranks."""
        self._said_at = now

    def again(self, now: float) -> list[Decision]:
        """What is said again now, in order."""
        if now < self._said_at + AGAIN_S:
            return []
        self._said_at = now
        return self._underway.unanswered

    def late(self, now: float) -> tuple[tuple[int, ...], str] | None:
        """Ranks that have kept the others waiting for too long, and a sentence; no rank has where all leave anyway."""
        return next(((ranks, reason) for due_at, ranks, reason in self._awaited() if due_at <= now), None)

    def _awaited(self) -> list[tuple[float, tuple[int, ...], str]]:
        """Until when what is waited for, of which ranks, and what is said then."""
        found, within = [], f"within {self._limit_s:g} s"
        pending = self._underway.first
        if pending is not None and not _is_loading(pending.order):
            limit_s = LEAVE_S if isinstance(pending.order, LeaveGroup) else self._limit_s
            ranks = tuple(sorted(pending.missing))
            reason = f"{self._name(ranks)} didn't answer {within} ({pending.what})"
            found.append((pending.since + limit_s, ranks, reason))
        for attempt in self._jobs.ready:
            if ranks := self._bodies.lacking(attempt.run.sequence):
                reason = f"{self._name(ranks)} didn't say {within} that what job {attempt.run.job} needs is there"
                found.append((attempt.moved_at + self._limit_s, ranks, reason))
        return found

    def _name(self, ranks: Sequence[int]) -> str:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of group {self._group}"


def _is_loading(order: object) -> bool:
    """Weights take as long as they take."""
    return isinstance(order, LoadJobs) or (isinstance(order, AtStage) and isinstance(order.job.work, BuildStage))
