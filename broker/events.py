"""What can happen to a broker: a closed set. Time and randomness come in with the event.

`now` is monotonic, in seconds; it never goes back from one event to the next. Nobody changes an event; those that come with
every message aren't frozen, because it takes twice as long to make them then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reelwire.messages import ToBroker


@dataclass(slots=True)
class Received:
    """A message arrived.

    Attributes:
        now: seconds.
        route: the socket's name of the connection; it says where an answer goes, never who asks.
        attachment: the number that the sender claims; 0 for a hello.
        message: what was said.
        nbytes: size of all its frames, in bytes.
        entropy: 16 random bytes, for ids and tokens; empty beside a message that needs none.
    """

    now: float
    route: bytes
    attachment: int
    message: ToBroker
    nbytes: int
    entropy: bytes = b""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes arrived that are no message of ours."""

    now: float
    route: bytes
    code: Literal["malformed", "version"]
    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message couldn't be sent: the connection is gone, or goes; what came along it may still be unread."""

    now: float
    route: bytes


@dataclass(frozen=True, slots=True)
class OutboxFull:
    """A message couldn't be sent: more waits for the connection than may."""

    now: float
    route: bytes


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """What was there to read has been handled.

    `drained` says that nothing was left unread, of what had come by the last `Unreachable` and `OutboxFull` at least.
    """

    now: float
    drained: bool


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Somebody wants the broker to stop; asked twice, at once."""

    now: float


Event = Received | Malformed | Unreachable | OutboxFull | TurnEnded | ShutdownRequested
