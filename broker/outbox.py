"""What waits to be sent, per connection and bounded: a socket that would block must not block the others.

The socket's own queue counts messages, not bytes, so large ones are followed until their bytes have left the process: a
connection that has too many of them on the way counts as blocked. What is on the way when a connection is given up stays
in the socket until that connection is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from reelwire.wire import Buffer, sizes_of

Sent = Literal["sent", "blocked", "unreachable"]


class Tracker(Protocol):
    """Follows a message that was handed to the socket."""

    @property
    def done(self) -> bool:
        """Whether its bytes have left the process, or were dropped."""
        ...


TrySend = Callable[[bytes, Sequence[Buffer], int], tuple[Sent, Tracker | None]]


class Outboxes:
    """One FIFO per connection that couldn't be sent to at once.

    Args:
        try_send: hands a message of so many bytes to the socket without blocking; what follows it if it was sent and is
            large.
        nbytes_max: most bytes that may wait for one connection, and most that may be on the way to it.
        messages_max: most messages that may.
    """

    def __init__(self, try_send: TrySend, nbytes_max: int, messages_max: int) -> None:
        """Nothing waits."""
        self._try_send = try_send
        self._nbytes_max = nbytes_max
        self._messages_max = messages_max
        self._waiting: dict[bytes, deque[tuple[Sequence[Buffer], int]]] = {}
        self._nbytes: dict[bytes, int] = {}
        self._leaving: dict[bytes, deque[tuple[Tracker, int]]] = {}

    @property
    def blocked(self) -> tuple[bytes, ...]:
        """Connections that something waits for."""
        return tuple(self._waiting)

    def nbytes(self, route: bytes) -> int:
        """Bytes that wait for a connection."""
        return self._nbytes.get(route, 0)

    def leaving(self, route: bytes) -> int:
        """Bytes of large messages that the socket has and that are still on the way to a connection."""
        leaving = self._leaving.get(route)
        while leaving and leaving[0][0].done:
            leaving.popleft()
        if not leaving:
            self._leaving.pop(route, None)
            return 0
        return sum(size for _, size in leaving)

    def send(
        self, route: bytes, frames: Sequence[Buffer], *, may_wait: bool = True
    ) -> Literal["ok", "unreachable", "full"]:
        """Send a message behind those that wait already; one that may not wait is dropped instead."""
        size = sum(sizes_of(frames))
        if route not in self._waiting:
            sent = self._hand_over(route, frames, size)
            if sent != "blocked" or not may_wait:
                return "unreachable" if sent == "unreachable" else "ok"
            self._waiting[route] = deque()
            self._nbytes[route] = 0
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
                sent = self._hand_over(route, frames, size)
                if sent == "unreachable":
                    gone.append(route)
                if sent != "sent":
                    break
                waiting.popleft()
                self._nbytes[route] -= size
            if not waiting:
                self._waiting.pop(route, None)
                self._nbytes.pop(route, None)
        return gone

    def forget(self, route: bytes) -> None:
        """Free what waits for a connection."""
        self._waiting.pop(route, None)
        self._nbytes.pop(route, None)
        self._leaving.pop(route, None)

    def _hand_over(self, route: bytes, frames: Sequence[Buffer], size: int) -> Sent:
        leaving = self.leaving(route)
        # One message may always leave, however large it is.
        if leaving and leaving + size > self._nbytes_max:
            return "blocked"
        sent, tracker = self._try_send(route, frames, size)
        if tracker is not None:
            self._leaving.setdefault(route, deque()).append((tracker, size))
        return sent
