"""How much is kept, and for how long: the bytes of the store, the time that a job is remembered, and the number of them.

When there is no room for a file, results make it, those that were fetched first, the oldest of them first; then, for what
jobs make, also those that nobody has fetched, who ended first first. A request's files push nobody's unfetched result
out. Such a job stays what it is, without its result. What makes room counts as gone at once; it leaves the disk when the
journal says that it isn't there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Literal

from .job_desk import JobDesk
from .job_states import Evicted, KeepExpired

if TYPE_CHECKING:
    from .job_base import JobBase

FORGOTTEN_AT_ONCE_MAX = 64
"""Jobs that are forgotten in one turn: after a long pause there may be thousands."""


class Quota:
    """What makes room for what.

    Args:
        at: all jobs.
    """

    def __init__(self, at: JobDesk) -> None:
        """Nothing is kept yet."""
        self._at = at

    def make_room(self, nbytes: int, by: Literal["request", "job"]) -> bool:
        """Whether there is room for so many bytes more; results make it, if that helps.

        Args:
            nbytes: what is needed.
            by: whose file it is; what jobs make pushes out results that nobody has fetched, too.
        """
        at = self._at
        over = at.shelf.nbytes - at.leaving_bytes + nbytes - at.config.state_bytes_max
        if over <= 0:
            return True
        given: list[JobBase] = []
        for job in self._candidates(by):
            result = job.record.result
            shelved = None if result is None else at.shelf.find(result.file)
            if shelved is None or shelved.jobs + shelved.uploads > 1:
                continue  # somebody else needs it as well: it wouldn't go
            given.append(job)
            over -= shelved.nbytes
            if over <= 0:
                break
        if over > 0:
            return False
        for job in given:
            job.handle(Evicted())
        return True

    @property
    def wake_at(self) -> float | None:
        """When the next job is to be forgotten, in seconds."""
        at = self._at
        if len(at.ended) > at.config.jobs_kept_max:
            return at.desk.now
        first = next(iter(at.ended.values()), None)
        return None if first is None else first.ended_now + at.config.result_keep_s

    def due(self, now: float) -> None:
        """Forget what has been kept for long enough, and what is too much."""
        at = self._at
        for _ in range(FORGOTTEN_AT_ONCE_MAX):
            wake_at = self.wake_at
            if wake_at is None or wake_at > now:
                break
            next(iter(at.ended.values())).handle(KeepExpired())

    def _candidates(self, by: Literal["request", "job"]) -> Iterator[JobBase]:
        at = self._at
        if by == "request":
            return iter(at.fetched.values())
        return chain(at.fetched.values(), (job for job in at.ended.values() if job.id not in at.fetched))
