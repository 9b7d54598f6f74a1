"""The media clock of a session that is played while it is made: how far ahead of the picture its chunks may be."""

from __future__ import annotations

import math

from reelwire.spec import StreamSpec


class MediaClock:
    """When the chunks of one session are played, and when each may be begun at the earliest.

    It starts with the first chunk that is sent. A chunk that comes too late is played when it comes, and all later ones
    are so much later: nothing is made faster to catch up.

    Args:
        spec: says how many frames a chunk has, how many of them are played in a second, and how many chunks may wait for
            the client.
        credit: how many the client lets wait at first.

    Attributes:
        ahead: how many chunks may wait for the client.
    """

    __slots__ = ("_capacity", "_origin", "_spec", "ahead")

    def __init__(self, spec: StreamSpec, credit: int) -> None:
        """Nothing is played yet."""
        self._spec = spec
        self._origin = -math.inf
        self._capacity = min(spec.capacity(artifact) for artifact in spec.outputs)
        self.ahead = min(self._capacity, credit)

    def allow(self, credit: int) -> bool:
        """So many chunks may wait for the client, as far as the outputs' edges hold them; whether that is news."""
        before, self.ahead = self.ahead, min(self._capacity, credit)
        return self.ahead != before

    def committed(self, index: int, now: float) -> None:
        """A chunk is sent, at `now` in seconds."""
        if self.played_at(index) < now:
            self._origin = now - self._media_s(index)

    def played_at(self, index: int) -> float:
        """When a chunk's first frame is due, in seconds; minus infinity before the first chunk."""
        return self._origin + self._media_s(index)

    def begins_at(self, index: int) -> float:
        """When a chunk may be begun at the earliest, in seconds: as much before it is played as may wait for the client."""
        return self.played_at(index) - self.ahead * self._spec.frames_next / self._spec.fps

    def _media_s(self, index: int) -> float:
        return self._spec.frames_in(index) / self._spec.fps
