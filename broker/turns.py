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
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

SPARE = 64


@dataclass(slots=True, eq=False)
class _Turn(Generic[T]):
    """Somebody whose turn comes: its name, who it is, what it is about to be given, and whether it still waits."""

    name: str
    who: T
    media_s: float
    waits: bool = True


class Turns(Generic[T]):
    """At most one turn per name that waits; adding and taking one costs the logarithm of how many wait."""

    __slots__ = ("_count", "_given", "_heap", "_served", "_waiting")

    def __init__(self) -> None:
        """Nobody waits, and nobody was given anything."""
        self._heap: list[tuple[float, int, _Turn[T]]] = []
        self._waiting: dict[str, _Turn[T]] = {}
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
        turn = self._waiting[name] = _Turn(name, who, media_s)
        tag = self._given.get(name, 0.0)
        heapq.heappush(self._heap, (max(self._served, tag), self._count, turn))

    def take(self) -> T:
        """Whose turn it is: of the smallest tag, who has waited longest; somebody waits."""
        tag, _, turn = heapq.heappop(self._heap)
        while not turn.waits:
            tag, _, turn = heapq.heappop(self._heap)
        del self._waiting[turn.name]
        self._served = max(self._served, tag)  # a charge may have passed those who waited
        self._given[turn.name] = tag + turn.media_s
        self._compact()
        return turn.who

    def charge(self, name: str, media_s: float) -> None:
        """Somebody was served without waiting for a turn; it counts as one."""
        assert name not in self._waiting, f"{name} waits, and is served all the same"
        self._served = max(self._served, self._given.get(name, 0.0))
        self._given[name] = self._served + media_s

    def discard(self, name: str) -> None:
        """Let somebody wait no longer; it needn't be there, and what it was given stays."""
        turn = self._waiting.pop(name, None)
        if turn is not None:
            turn.waits = False
            self._compact()

    def forget(self, name: str) -> None:
        """Somebody is gone."""
        self.discard(name)
        self._given.pop(name, None)

    def check(self, names: Collection[str]) -> None:
        """Assert that only these names are known, that each has its entry, and that dead entries are few."""
        assert all(name in names for name in self._waiting), "a stranger waits"
        assert all(name in names for name in self._given), "a stranger was given something"
        live = {id(turn) for _, _, turn in self._heap if turn.waits}
        assert live == {id(turn) for turn in self._waiting.values()}, "a turn without its entry"
        assert len(self._heap) <= 2 * len(self._waiting) + SPARE, "the heap grows with what was discarded"

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._waiting) + SPARE:
            self._heap = [entry for entry in self._heap if entry[2].waits]
            heapq.heapify(self._heap)
