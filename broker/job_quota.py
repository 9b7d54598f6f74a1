"""How much is kept, and for how long: the bytes of the store, the time that a job is remembered, and the number of them.

When there is no room for a file, results make it, those that were fetched first, the oldest of them first. For what jobs
make there are more: uploads that are part of no job yet, then results that nobody has fetched, who ended first first. A
request's files push nobody's unfetched result out, and leave a part of the store to what jobs make, states to go on from one
to results: a result waits for others of its kind only, which end. A job that gives its
result up stays what it is, without it. What makes room counts as gone at once; it leaves the disk when the journal says that
it isn't there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from .job_desk import JobDesk
from .job_states import Evicted, KeepExpired

if TYPE_CHECKING:
    from .job_base import JobBase

For = Literal["request", "checkpoint", "result"]
RESERVED: dict[For, int] = {"request": 4, "checkpoint": 8}
"""One part of so many of the store isn't for such files: however many there are, a result that is made has room."""
FORGOTTEN_AT_ONCE_MAX = 64
"""Jobs that are forgotten in one turn: after a long pause there may be thousands."""


Giving = tuple[int, Callable[[], None]]
"""What can make room: how many bytes, and how it is given up."""


class Quota:
    """What makes room for what.

    Args:
        at: all jobs.

    Attributes:
        uploads: those that can give way, in the order in which they do.
    """

    def __init__(self, at: JobDesk) -> None:
        """Nothing is kept yet."""
        self._at = at
        self.uploads: Callable[[], Iterator[Giving]] = lambda: iter(())

    def make_room(self, nbytes: int, by: For) -> bool:
        """Whether there is room for so many bytes more; what may give way makes it, if that helps.

        Args:
            nbytes: what is needed.
            by: whose file it is; what jobs make pushes out uploads and results that nobody has fetched, too.
        """
        at, most = self._at, self._at.config.state_bytes_max
        if by in RESERVED:
            most -= most // RESERVED[by]
        over = at.store.nbytes - at.leaving_bytes + nbytes - most
        if over <= 0:
            return True
        given: list[Callable[[], None]] = []
        for freed, give in self._candidates(by):
            given.append(give)
            over -= freed
            if over <= 0:
                break
        if over > 0:
            return False
        for give in given:
            give()
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

    def _candidates(self, by: For) -> Iterator[Giving]:
        at = self._at
        yield from self._results(at.fetched.values())
        if by != "request":
            yield from self.uploads()
            yield from self._results(job for job in at.ended.values() if job.id not in at.fetched)

    def _results(self, jobs: Iterable[JobBase]) -> Iterator[Giving]:
        for job in jobs:
            result = job.record.result
            indexed = None if result is None else self._at.store.find(result.file)
            if indexed is not None and indexed.jobs + indexed.uploads == 1:  # else somebody needs it as well: it stays
                yield indexed.nbytes, partial(job.handle, Evicted())
