"""What is on its way to the broker, counted in bytes: what waits here, and what ZeroMQ has taken and not yet written.

A socket's own limit counts messages, whatever their size, so it bounds no memory. But ZeroMQ says when it is done with
the memory of a large frame, and until then its bytes count here. Smaller frames (below 64 KiB) are copied at once and
not counted, once it has taken them; the socket's limit bounds those. To follow a message costs more than to copy a small
one, so a message that can hold no such frame is sent without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from reelwire import wire

FOLLOWED_BYTES_MIN = 64 << 10
"""Messages of this size and more are followed until their bytes have left: from here on ZeroMQ copies no frame."""

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
        send: hands frames over, and says whether they were taken; a tracker if it was asked, by its second argument, to
            follow them.

    Attributes:
        limits: what the broker accepts.
    """

    def __init__(self, send: Callable[[Frames, bool], Tracker | bool]) -> None:
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
            taken = self._send(batch.frames(), batch.nbytes >= FOLLOWED_BYTES_MIN)
            if taken is False:
                return
            self._waiting.popleft()
            if taken is True:
                self._nbytes -= batch.nbytes
            else:
                self._taken.append((taken, batch.nbytes))

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        self._waiting.clear()
        self._taken.clear()
        self._nbytes = 0
