"""What can happen to a broker: a closed set. Time and randomness come in with the event.

`now` is monotonic, in seconds; it never goes back from one event to the next. Nobody changes an event; those that come with
every message aren't frozen, because it takes twice as long to make them then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reelwire.messages import Failure, ToBroker


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


@dataclass(frozen=True, slots=True)
class Stored:
    """What `Persist` said up to `ticket` is durable."""

    now: float
    ticket: int


@dataclass(frozen=True, slots=True)
class StoreStalled:
    """Nothing can be made durable for the moment, and it is tried again; no reason: it can be again."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Nothing can be made durable any more: what was persisted and not yet said to be stored may be lost."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class PartStored:
    """So many parts of a file that comes in parts are written, in all."""

    now: float
    ticket: int
    parts: int


@dataclass(frozen=True, slots=True)
class FileDone:
    """What was asked for about a file is done, or can't be.

    Attributes:
        now: seconds.
        ticket: of the action.
        failure: why not; its `field` is empty.
        sha256: the file's name in the store, where one came into it.
        nbytes: its size.
    """

    now: float
    ticket: int
    failure: Failure | None = None
    sha256: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class PartRead:
    """A part of a file of the store; no bytes: it can't be read."""

    now: float
    ticket: int
    data: bytes
    reason: str = ""


Event = (
    Received
    | Malformed
    | Unreachable
    | OutboxFull
    | TurnEnded
    | ShutdownRequested
    | Stored
    | PartStored
    | FileDone
    | PartRead
    | StoreStalled
    | StoreFailed
)
