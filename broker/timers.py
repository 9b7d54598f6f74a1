"""Deadlines by key: setting, dropping and finding the next are independent of how many there are (but for a heap)."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SPARE = 64


class Timers(Generic[K]):
    """At most one deadline per key; replaced and dropped ones leave the heap when they are met, or in bulk."""

    def __init__(self) -> None:
        """Start with none."""
        self._heap: list[tuple[float, int, K]] = []
        self._live: dict[K, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> tuple[K, ...]:
        """All that have a deadline."""
        return tuple(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def set(self, key: K, at: float) -> None:
        """Let `key` be due at `at`, in seconds, instead of whenever it was."""
        self._count += 1
        self._live[key] = self._count
        heapq.heappush(self._heap, (at, self._count, key))
        self._compact()

    def drop(self, key: K) -> None:
        """Let `key` never be due; it needn't be there."""
        if self._live.pop(key, None) is not None:
            self._compact()

    @property
    def next_at(self) -> float | None:
        """When the next one is due, in seconds."""
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> K | None:
        """Take out the earliest key that is due; None when none is."""
        at = self.next_at
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._live[key]
        self._compact()
        return key

    def check(self) -> None:
        """Assert that every key has exactly one entry, and that the heap holds no more dead ones than it may."""
        assert sum(self._live.get(key) == count for _, count, key in self._heap) == len(self._live), (
            "a key without entry"
        )
        assert len(self._heap) <= 2 * len(self._live) + SPARE, "the heap grows with what was dropped"

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + SPARE:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
