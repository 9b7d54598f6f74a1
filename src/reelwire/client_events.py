"""What happens to a client and what it does about it: the closed sets that join `client_core` and its loop.

A *call* is a question of the application that waits for one answer: its number is chosen by the shell, and each call
ends in exactly one `Done`, unless it was withdrawn before.

Nobody changes one. Those that stand between a chunk's arrival and the next control aren't frozen, because a frozen one is
made in twice the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import messages
from .client_job_events import AskJob as AskJob
from .client_job_events import FetchResult as FetchResult
from .client_job_events import JobCall as JobCall
from .client_job_events import JobEvent as JobEvent
from .client_job_events import JobQuestion as JobQuestion
from .client_job_events import Part as Part
from .client_job_events import SubmitJob as SubmitJob
from .client_job_events import SupplyPart as SupplyPart
from .client_job_events import TakePart as TakePart
from .client_job_events import UploadFile as UploadFile
from .client_job_events import WatchJob as WatchJob
from .controls import KeyState
from .errors import ReelwireError
from .messages import Artifact, ControlBinding, EndMode, Failure, Pace
from .spec import Plain
from .tensors import TensorRef

# --- events: each carries the time in seconds of a clock that never goes back ------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """The socket is there and was never used."""

    now: float


@dataclass(slots=True)
class Received:
    """A message of the broker."""

    now: float
    attachment: int
    message: messages.ToClient


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message to a client; `version` when they are of another protocol."""

    now: float
    reason: str
    version: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A chunk came whose bytes can't be had."""

    now: float
    attachment: int
    chunk: messages.Chunk
    failure: Failure


@dataclass(frozen=True, slots=True)
class OutboxFull:
    """The broker doesn't read, and no more may wait for it."""

    now: float


@dataclass(frozen=True, slots=True)
class Broken:
    """The loop can't go on: there is no socket any more."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Everything that had arrived was handed in; it is time to look at deadlines."""

    now: float


@dataclass(frozen=True, slots=True)
class Leave:
    """The application closes the client."""

    now: float


@dataclass(frozen=True, slots=True)
class Attach:
    """Call: answered when the client is attached, or can't be."""

    now: float
    call: int


@dataclass(frozen=True, slots=True)
class Open:
    """Call: answered with the session's id when it exists; with `wait_ready`, when it is initialized."""

    now: float
    call: int
    key: str
    pipeline: str
    chunks: int
    parameters: Mapping[str, Plain] = field(default_factory=dict)
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)
    wait_ready: bool = True
    control_binding: ControlBinding = "late"
    pace: Pace = "asap"


@dataclass(slots=True)
class Submit:
    """Call: an explicit control, answered with its index when the broker took it; without an index, at once."""

    now: float
    call: int
    session: str
    index: int | None
    control: Artifact


@dataclass(frozen=True, slots=True)
class ChangeKeys:
    """The whole key state."""

    now: float
    session: str
    keys: KeyState


@dataclass(slots=True)
class Take:
    """The application asks for the next chunk; it is done with the one before."""

    now: float
    session: str


@dataclass(frozen=True, slots=True)
class End:
    """Call: answered with the final state when the session has ended."""

    now: float
    call: int
    session: str
    mode: EndMode


@dataclass(frozen=True, slots=True)
class Forget:
    """The application has dropped the session; if it lives it is cancelled."""

    now: float
    session: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Call: the numbers of a session, or with None the broker's status; answered with plain data."""

    now: float
    call: int
    session: str | None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody waits for the call any more; a control that still waits for its grant is never sent.

    A session whose opening is withdrawn is cancelled, also when the answer was there and nobody took it. A job isn't: it
    was submitted, and lives on without its client.
    """

    now: float
    call: int


Event = (
    Connect
    | Received
    | Malformed
    | Unreadable
    | OutboxFull
    | Broken
    | Tick
    | Leave
    | Attach
    | Open
    | Submit
    | ChangeKeys
    | Take
    | End
    | Forget
    | Ask
    | Withdraw
    | AskJob
    | JobEvent
)

# --- actions -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Send:
    """Send a message in an envelope of that attachment."""

    attachment: int
    message: messages.ClientMessage


@dataclass(frozen=True, slots=True)
class AnswerProbe:
    """Look for what stands in the probe of an owner of shared memory, and tell the broker."""

    attachment: int
    owner: str


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Drop the socket and what waits to be sent, make a new one and report `Connect`."""


@dataclass(slots=True)
class Done:
    """The one answer to a call: a value, or the error to raise."""

    call: int
    value: object = None
    error: ReelwireError | None = None


@dataclass(slots=True)
class Delivery:
    """The next chunk of a session, in answer to `Take`.

    Attributes:
        chunk: as it came.
        received: when it came.
        submitted: when its control was handed in by index; None if it wasn't.
        changes: when the key events were that this chunk is the first to apply.
    """

    chunk: messages.Chunk
    received: float
    submitted: float | None
    changes: tuple[float, ...]


@dataclass(slots=True)
class Changed:
    """Something that is waited for has changed, chunks or a state: of one session, or with an empty text of all.

    What has to do with jobs goes by the names of `news_of_call` and `news_of_job`.
    """

    session: str = ""


def news_of_call(call: int) -> str:
    """What `Changed` names when there is news for whoever made a call: a part is wanted, or has come."""
    return f"call {call}"


def news_of_job(job: str) -> str:
    """What `Changed` names when a job has changed."""
    return f"job {job}"


@dataclass(frozen=True, slots=True)
class Stop:
    """The client is done: send what waits, within reason, and close the socket."""


Action = Send | AnswerProbe | Reconnect | Done | Delivery | Part | Changed | Stop
