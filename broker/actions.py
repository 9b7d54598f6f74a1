"""What a broker's core wants done: a closed set, performed in order by the loop. As with events, `Send` isn't frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire.job_spec import MediaInput
from reelwire.messages import FromBroker
from reelwire.wire import Limits, Packed

from .job_record import JobRecord

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
    """Leave the loop; `failure`: because the broker can't go on."""

    failure: str = ""


@dataclass(frozen=True, slots=True)
class Persist:
    """Write into the journal what is known of a job, or that it is forgotten; `Stored` says when that is durable.

    Tickets rise by one from 1, over all that is persisted.
    """

    ticket: int
    record: JobRecord | None
    job: str


# --- files: each action has a ticket of its own, which what comes of it carries ----------------------------------------


@dataclass(frozen=True, slots=True)
class ReceiveFile:
    """Begin a file that comes in parts. Nothing is answered until a part was written; an empty file is done at once."""

    ticket: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class AppendPart:
    """Write the next part of a file: `PartStored`; after the last one its hash is checked, and it is kept: `FileDone`."""

    ticket: int
    index: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class DropFile:
    """Give up a file that comes in parts; nothing is answered any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ImportFile:
    """Copy a file that lies below a media root into the store: `FileDone`. `nbytes_max`: most bytes that are accepted."""

    ticket: int
    path: str
    nbytes_max: int


@dataclass(frozen=True, slots=True)
class InspectFile:
    """Look whether a file of the store is what an input takes: `FileDone`, or why it isn't."""

    ticket: int
    file: str
    wanted: MediaInput


@dataclass(frozen=True, slots=True)
class CheckOutput:
    """Look whether a result may be written to a path: below a media root, in a folder that is there, no file yet: `FileDone`."""

    ticket: int
    path: str
    suffix: str


@dataclass(frozen=True, slots=True)
class ExportFile:
    """Copy a file of the store to a path that was checked: `FileDone`. It is complete there or not at all."""

    ticket: int
    file: str
    path: str


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Read a part of a file of the store: `PartRead`."""

    ticket: int
    file: str
    index: int


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove a file from the store; nothing is answered.

    One that comes once more meanwhile, or might be what is imported, isn't removed: the store does one thing after the other,
    and would remove what it has just said to be there.
    """

    file: str


FileAction = (
    ReceiveFile | AppendPart | DropFile | ImportFile | InspectFile | CheckOutput | ExportFile | ReadPart | RemoveFile
)
Action = Send | Forget | Log | Stop | Persist | FileAction
