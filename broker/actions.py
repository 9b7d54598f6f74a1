"""What a broker's core wants done: a closed set, performed in order by the loop. As with events, `Send` isn't frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire.messages import FromBroker
from reelwire.wire import Limits, Packed

Level = Literal["debug", "info", "warning", "error"]


@dataclass(slots=True)
class Send:
    """Send a message to a connection that takes `limits`, in an envelope with the attachment number.

    Attributes:
        route: of the connection.
        attachment: the peer's number.
        message: what to say.
        limits: what the peer accepts.
        packed: the message as it is sent, where that was made to find out whether it fits.
        is_work: it is said to a worker: that leaves before what others are told in the same turn.
    """

    route: bytes
    attachment: int
    message: FromBroker
    limits: Limits = field(default_factory=Limits)
    packed: Packed | None = None
    is_work: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop what waits to be sent to the connection."""

    route: bytes


@dataclass(frozen=True, slots=True)
class Log:
    """A structured line; `fields` holds ``event_id``, the running number of the event that led to it."""

    level: Level
    event: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""


Action = Send | Forget | Log | Stop
