"""Every message between processes, as frozen values; one closed union per direction.

Words used throughout:

* a *session* is one stream; its id is given by the broker, its token proves ownership;
* *index* is the number of a chunk, from 0;
* *epoch* counts the attempts at a session, *stage_epoch* those at one stage of it: what an older attempt still says
  is dropped;
* an *artifact* is what flows along an edge for one chunk: plain values and tensors, opaque to the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .controls import KeyState
from .parts import Applied as Applied
from .parts import Artifact as Artifact
from .parts import ChunkTiming as ChunkTiming
from .parts import ControlSource as ControlSource
from .parts import EndMode as EndMode
from .parts import Failure as Failure
from .parts import FailureKind as FailureKind
from .parts import Phase as Phase
from .parts import StageTiming as StageTiming
from .spec import Plain, StreamSpec
from .tensors import TensorRef

# --- both ways -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life. `busy_for_s`: the sender may be silent for so long (it imports, loads or compiles)."""

    busy_for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender leaves; what it held is given up."""

    reason: str = ""


# --- client to broker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientHello:
    """First message of a client.

    Attributes:
        version: of reelwire.
        name: the client's own, for logs and the status.
        limits: what it accepts, by the names of `wire.Limits`; one that isn't said is as the broker's.
    """

    version: str
    name: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Ask for a session.

    Attributes:
        key: chosen by the client, unique for it: asking twice with one key gives one session.
        pipeline: the name of a spec.
        chunks: length of the session.
        parameters: values that the spec names.
        tensors: tensors that the spec names.
    """

    key: str
    pipeline: str
    chunks: int
    parameters: Mapping[str, Plain] = field(default_factory=dict)
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SetKeys:
    """The whole key state; the higher revision wins."""

    session: str
    keys: KeyState


@dataclass(frozen=True, slots=True)
class SubmitControl:
    """An explicit control for chunk `index`, or for the next free one (one pending slot, the newest wins)."""

    session: str
    index: int | None
    control: Artifact


@dataclass(frozen=True, slots=True)
class Ack:
    """The application has taken all chunks below `chunks`."""

    session: str
    chunks: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """End a session: deliver what was accepted first, or drop it."""

    session: str
    mode: EndMode


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Ask what is there."""

    request: int


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """Ask for the numbers of one session."""

    request: int
    session: str


# --- broker to client ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to a hello: who the peer now is, and what holds between the two.

    Attributes:
        name: the name under which the broker knows the peer.
        version: the broker's version.
        heartbeat_s: interval of heartbeats in both directions.
        missed: intervals of silence after which a peer counts as dead.
        limits: named limits, units in the names.
        specs: what can be asked for (to clients).
    """

    name: str
    version: str
    heartbeat_s: float
    missed: int
    limits: Mapping[str, int]
    specs: tuple[StreamSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """The broker doesn't take the peer, or dropped it.

    `code`: ``version``, ``malformed``, ``unknown_peer``, ``conflict`` (another spec under that name), ``limit``.
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The session exists; it isn't ready yet."""

    key: str
    session: str
    token: str


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The session doesn't exist."""

    key: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class SessionChanged:
    """The session's state, and how far explicit controls may go: those below `control_limit` will be accepted.

    `failure`: why it will have ended, as soon as that is known; what was made before is still delivered.
    """

    session: str
    state: str
    control_limit: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ControlAccepted:
    """The control for chunk `index` is taken and will be applied to it, or the session ends.

    `by_index`: it was submitted for that index; otherwise it waited in the pending slot, and this is where it went.
    """

    session: str
    index: int
    by_index: bool = True


@dataclass(frozen=True, slots=True)
class ControlRefused:
    """A control was refused and changed nothing; `code` as in `errors.ControlError`."""

    session: str
    index: int | None
    code: str
    message: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A committed chunk: all outputs of one index."""

    session: str
    index: int
    outputs: Mapping[str, Artifact]
    applied: Applied
    facts: Mapping[str, Plain]
    timing: ChunkTiming
    is_last: bool


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session has ended; `state` is completed, cancelled, failed or closed."""

    session: str
    state: str
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """Answer to AskStatus: plain data."""

    request: int
    state: Mapping[str, Plain]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Answer to AskMetrics: plain data; empty if there is no such session."""

    request: int
    session: str
    values: Mapping[str, Plain]


# --- worker to broker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageOffer:
    """One stage actor of a worker.

    Attributes:
        pipeline: name of the spec.
        stage: name of the stage.
        slots: most sessions at once.
        cache_bytes_max: most bytes of all sessions' caches.
        mailbox: tasks that may wait behind the running one.
    """

    pipeline: str
    stage: str
    slots: int
    cache_bytes_max: int
    mailbox: int = 1


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """First message of a worker, when its process is up; its weights needn't be loaded yet.

    Attributes:
        version: of reelwire.
        name: chosen by whoever started it; a new hello under an old name replaces the old worker.
        device: such as ``cpu`` or ``cuda:0``.
        specs: what its stages belong to.
        stages: its actors.
        packages: versions of what its results depend on.
        limits: what it accepts, by name, as in `ClientHello`.
    """

    version: str
    name: str
    device: str
    specs: tuple[StreamSpec, ...]
    stages: tuple[StageOffer, ...]
    packages: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker was asked to stop: it takes no new sessions, and leaves when those it has have ended."""


@dataclass(frozen=True, slots=True)
class StageReady:
    """An actor has its weights. `session_bytes`: what a session with the default request takes there, in bytes."""

    pipeline: str
    stage: str
    session_bytes: int


@dataclass(frozen=True, slots=True)
class StageInitialized:
    """A session has its caches at a stage."""

    session: str
    stage: str
    epoch: int
    stage_epoch: int
    handed: Artifact
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class StageReleased:
    """A session's caches at a stage are gone."""

    session: str
    stage: str
    epoch: int
    stage_epoch: int


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A stage raised; `index` is the chunk when `phase` is ``run``."""

    session: str
    stage: str
    epoch: int
    stage_epoch: int
    phase: Phase
    index: int | None
    failure: Failure


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The actor began a task: its inputs have left their edges."""

    session: str
    stage: str
    epoch: int
    stage_epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A task's outputs. `run_s`: seconds that the stage computed."""

    session: str
    stage: str
    epoch: int
    stage_epoch: int
    index: int
    outputs: Mapping[str, Artifact]
    facts: Mapping[str, Plain]
    run_s: float


# --- broker to worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InitializeStage:
    """Make the caches of a session at a stage."""

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int
    chunks: int
    parameters: Mapping[str, Plain]
    tensors: Mapping[str, TensorRef]
    handed: Artifact


@dataclass(frozen=True, slots=True)
class RunTask:
    """Make the outputs of chunk `index`."""

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int
    index: int
    inputs: Mapping[str, Artifact]
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class ReleaseStage:
    """Drop the caches of a session at a stage, and its tasks that wait there."""

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int


ClientMessage = (
    ClientHello
    | Heartbeat
    | Goodbye
    | OpenSession
    | SetKeys
    | SubmitControl
    | Ack
    | EndSession
    | AskStatus
    | AskMetrics
)
WorkerMessage = (
    WorkerHello
    | Heartbeat
    | Goodbye
    | Draining
    | StageReady
    | StageInitialized
    | StageReleased
    | StageFailed
    | TaskStarted
    | TaskDone
)
ToClient = (
    Welcome
    | Rejected
    | Heartbeat
    | Goodbye
    | SessionOpened
    | SessionRefused
    | SessionChanged
    | ControlAccepted
    | ControlRefused
    | Chunk
    | SessionEnded
    | Status
    | Metrics
)
ToWorker = Welcome | Rejected | Heartbeat | Goodbye | InitializeStage | RunTask | ReleaseStage
ToBroker = ClientMessage | WorkerMessage
FromBroker = ToClient | ToWorker
Message = ToBroker | FromBroker
