"""Whose turn is next at an actor: start-time fair queueing, with the media time of a chunk as its cost.

Each session has a tag: how much media time it was given there. Who waits gets the tag ``max(its own, the tag that was
served last)``, the smallest tag is served first, and serving a chunk moves the session's own tag to the served one plus
the chunk's media time. So sessions that always have work get equal shares, whatever the others do, and one that paused
comes back with the tag that is being served: it is owed nothing for its pause, and owes nothing.

After P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queueing", IEEE/ACM Transactions on Networking 5 (5), 1997.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SPARE = 64


class _Waiting(NamedTuple, Generic[T]):
    """Somebody whose turn comes: the entry's number, who it is, its tag and what it is about to be given."""

    number: int
    who: T
    tag: float
    media_s: float


class Turns(Generic[T]):
    """At most one turn per name that waits; adding and taking one costs the logarithm of how many wait."""

    __slots__ = ("_count", "_given", "_heap", "_served", "_waiting")

    def __init__(self) -> None:
        """Nobody waits, and nobody was given anything."""
        self._heap: list[tuple[float, int, str]] = []
        self._waiting: dict[str, _Waiting[T]] = {}
        self._given: dict[str, float] = {}
        self._served = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def add(self, name: str, who: T, media_s: float) -> None:
        """Somebody waits for a turn that will give it so much media time, in seconds; it doesn't wait yet."""
        assert name not in self._waiting, f"{name} waits already"
        self._count += 1
        tag = max(self._given.get(name, 0.0), self._served)
        self._waiting[name] = _Waiting(self._count, who, tag, media_s)
        heapq.heappush(self._heap, (tag, self._count, name))

    def take(self) -> T:
        """Whose turn it is: of the smallest tag, who has waited longest; somebody waits."""
        while not self._is_live(entry := heapq.heappop(self._heap)):
            pass
        name = entry[2]
        turn = self._waiting.pop(name)
        self._served = turn.tag
        self._given[name] = turn.tag + turn.media_s
        self._compact()
        return turn.who

    def discard(self, name: str) -> None:
        """Let somebody wait no longer; it needn't be there, and what it was given stays."""
        if self._waiting.pop(name, None) is not None:
            self._compact()

    def forget(self, name: str) -> None:
        """Somebody is gone."""
        self.discard(name)
        self._given.pop(name, None)

    def check(self, names: Collection[str]) -> None:
        """Assert that only these names are known, that each has its entry, and that dead entries are few."""
        assert all(name in names for name in self._waiting), "a stranger waits"
        assert all(name in names for name in self._given), "a stranger was given something"
        assert sum(self._is_live(entry) for entry in self._heap) == len(self._waiting), "a turn without its entry"
        assert len(self._heap) <= 2 * len(self._waiting) + SPARE, "the heap grows with what was discarded"

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        turn = self._waiting.get(entry[2])
        return turn is not None and turn.number == entry[1]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._waiting) + SPARE:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
