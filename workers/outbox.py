"""What is on its way to the broker, counted in bytes: what waits here, and what ZeroMQ has taken and not yet written.

A socket's own limit counts messages, whatever their size, so it bounds no memory. But ZeroMQ says when it is done with
the memory of a large frame, and until then its bytes count here. Frames below its threshold (64 KiB) are copied at once
and not counted; the socket's limit bounds those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from reelwire import wire

Frames = Sequence[wire.Buffer]


class Tracker(Protocol):
    """Says whether a message that was handed over is out of our memory."""

    @property
    def done(self) -> bool:
        """Whether it is."""
        ...


class Outbox:
    """Messages to the broker, in order; small ones that wait together are sent together.

    Args:
        send: hands frames over; None when they aren't taken now.

    Attributes:
        limits: what the broker accepts.
    """

    def __init__(self, send: Callable[[Frames], Tracker | None]) -> None:
        """Start empty."""
        self._send = send
        self.limits = wire.Limits()
        self._waiting: deque[wire.Batch] = deque()
        self._taken: deque[tuple[Tracker, int]] = deque()
        self._nbytes = 0

    @property
    def blocked(self) -> bool:
        """Whether something waits here."""
        return bool(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes that wait here or with ZeroMQ."""
        while self._taken and self._taken[0][0].done:
            self._nbytes -= self._taken.popleft()[1]
        return self._nbytes

    def put(self, attachment: int, packed: wire.Packed) -> None:
        """Let a message wait for the next `flush`, after those that wait already."""
        last = self._waiting[-1] if self._waiting else None
        before = 0 if last is None else last.nbytes
        if last is None or not last.add(attachment, packed):
            last, before = wire.Batch(attachment, packed, self.limits), 0
            self._waiting.append(last)
        self._nbytes += last.nbytes - before

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        while self._waiting:
            batch = self._waiting[0]
            tracker = self._send(batch.frames())
            if tracker is None:
                return
            self._waiting.popleft()
            self._taken.append((tracker, batch.nbytes))

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        self._waiting.clear()
        self._taken.clear()
        self._nbytes = 0
