"""How long a leader waits for what it needs to go on, and how it says that it waits no longer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import BuildStage
from .group_events import AtStage, LeaveGroup, LoadJobs
from .leader_jobs import LeaderJobs
from .lockstep import LEAVE_S, Numbers, Underway


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

    @property
    def due_at(self) -> float | None:
        """When something is late."""
        return min((due_at for due_at, _, _ in self._awaited()), default=None)

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
