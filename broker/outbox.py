"""What waits to be sent, per connection and bounded: a socket that would block must not block the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from reelwire.wire import Buffer

Sent = Literal["sent", "blocked", "unreachable"]
TrySend = Callable[[bytes, Sequence[Buffer]], Sent]


class Outboxes:
    """One FIFO per connection that couldn't be sent to at once.

    Args:
        try_send: hands a message to the socket without blocking.
        nbytes_max: most bytes that may wait for one connection.
        messages_max: most messages that may.
    """

    def __init__(self, try_send: TrySend, nbytes_max: int, messages_max: int) -> None:
        """Nothing waits."""
        self._try_send = try_send
        self._nbytes_max = nbytes_max
        self._messages_max = messages_max
        self._waiting: dict[bytes, deque[tuple[Sequence[Buffer], int]]] = {}
        self._nbytes: dict[bytes, int] = {}

    @property
    def blocked(self) -> tuple[bytes, ...]:
        """Connections that something waits for."""
        return tuple(self._waiting)

    def nbytes(self, route: bytes) -> int:
        """Bytes that wait for a connection."""
        return self._nbytes.get(route, 0)

    def send(
        self, route: bytes, frames: Sequence[Buffer], *, may_wait: bool = True
    ) -> Literal["ok", "unreachable", "full"]:
        """Send a message behind those that wait already; one that may not wait is dropped instead."""
        if route not in self._waiting:
            sent = self._try_send(route, frames)
            if sent != "blocked" or not may_wait:
                return "unreachable" if sent == "unreachable" else "ok"
            self._waiting[route] = deque()
            self._nbytes[route] = 0
        size = sum(memoryview(frame).nbytes for frame in frames)
        # One message may always wait: a chunk larger than the bound would never leave otherwise.
        if self._waiting[route] and self._nbytes[route] + size > self._nbytes_max:
            return "full"
        if len(self._waiting[route]) >= self._messages_max:
            return "full"
        self._waiting[route].append((frames, size))
        self._nbytes[route] += size
        return "ok"

    def retry(self, routes: Iterable[bytes]) -> list[bytes]:
        """Send what can be sent now; the connections that turned out to be gone."""
        gone: list[bytes] = []
        for route in routes:
            waiting = self._waiting.get(route)
            while waiting:
                frames, size = waiting[0]
                sent = self._try_send(route, frames)
                if sent == "unreachable":
                    gone.append(route)
                if sent != "sent":
                    break
                waiting.popleft()
                self._nbytes[route] -= size
            if not waiting:
                self.forget(route)
        return gone

    def forget(self, route: bytes) -> None:
        """Free what waits for a connection."""
        self._waiting.pop(route, None)
        self._nbytes.pop(route, None)
