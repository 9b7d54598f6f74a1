"""Every message between processes, as frozen values; one closed union per direction.

Words used throughout:

* a *session* is one stream; its id is given by the broker, its token will prove ownership when one
  can be resumed, which this version has not;
* *index* is the number of a chunk, from 0;
* *epoch* counts the attempts at a session, *stage_epoch* those at one stage of it: what an older attempt still says
  is dropped;
* an *artifact* is what flows along an edge for one chunk: plain values and tensors, opaque to the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .controls import KeyState
from .group_messages import EndGroup as EndGroup
from .group_messages import GroupFormed as GroupFormed
from .group_messages import GroupOpened as GroupOpened
from .group_messages import JoinGroup as JoinGroup
from .group_messages import LeadGroup as LeadGroup
from .group_messages import RanksLost as RanksLost
from .job_messages import AskJobs as AskJobs
from .job_messages import BeginUpload as BeginUpload
from .job_messages import CancelJob as CancelJob
from .job_messages import CheckpointKept as CheckpointKept
from .job_messages import DeleteJob as DeleteJob
from .job_messages import FetchResult as FetchResult
from .job_messages import FileGone as FileGone
from .job_messages import FilePart as FilePart
from .job_messages import ForgetJob as ForgetJob
from .job_messages import JobAccepted as JobAccepted
from .job_messages import JobChanged as JobChanged
from .job_messages import JobEnded as JobEnded
from .job_messages import JobFile as JobFile
from .job_messages import JobProgress as JobProgress
from .job_messages import JobRefused as JobRefused
from .job_messages import Jobs as Jobs
from .job_messages import ResultPart as ResultPart
from .job_messages import RunJob as RunJob
from .job_messages import StopJob as StopJob
from .job_messages import SubmitJob as SubmitJob
from .job_messages import UploadGrant as UploadGrant
from .job_messages import UploadPart as UploadPart
from .job_messages import UploadRefused as UploadRefused
from .job_messages import UploadStored as UploadStored
from .job_messages import WantFile as WantFile
from .job_messages import WatchJob as WatchJob
from .job_parts import FileOffer as FileOffer
from .job_parts import FileRole as FileRole
from .job_parts import HeldJob as HeldJob
from .job_parts import JobInfo as JobInfo
from .job_parts import JobPhase as JobPhase
from .job_parts import Media as Media
from .job_parts import Member as Member
from .job_parts import Membership as Membership
from .job_spec import JobSpec
from .parts import Applied as Applied
from .parts import Artifact as Artifact
from .parts import ChunkTiming as ChunkTiming
from .parts import ControlBinding as ControlBinding
from .parts import ControlSource as ControlSource
from .parts import Credit as Credit
from .parts import EndMode as EndMode
from .parts import Failure as Failure
from .parts import FailureKind as FailureKind
from .parts import Pace as Pace
from .parts import Phase as Phase
from .parts import Reservation as Reservation
from .parts import SegmentUse as SegmentUse
from .parts import StageTiming as StageTiming
from .spec import Plain, StreamSpec
from .tensors import TensorRef
from .worker_messages import Draining as Draining
from .worker_messages import InitializeStage as InitializeStage
from .worker_messages import MemoryOffer as MemoryOffer
from .worker_messages import MemoryProbed as MemoryProbed
from .worker_messages import ProbeMemory as ProbeMemory
from .worker_messages import ReleaseStage as ReleaseStage
from .worker_messages import ReturnSegments as ReturnSegments
from .worker_messages import RunTask as RunTask
from .worker_messages import SetStageKeys as SetStageKeys
from .worker_messages import StageFailed as StageFailed
from .worker_messages import StageInitialized as StageInitialized
from .worker_messages import StageOffer as StageOffer
from .worker_messages import StageReady as StageReady
from .worker_messages import StageReleased as StageReleased
from .worker_messages import TaskDone as TaskDone
from .worker_messages import TaskStarted as TaskStarted
from .worker_messages import WorkerHello as WorkerHello

# --- both ways -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack:
    """The application has taken all chunks below `chunks`; `credit`: how far the broker may go."""

    session: str
    chunks: int
    credit: Credit = field(default_factory=Credit)


@dataclass(frozen=True, slots=True)
class ControlGrant:
    """Explicit controls below `control_limit` will be accepted."""

    session: str
    control_limit: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, which repeats what may be lost without harm.

    Attributes:
        busy_for_s: the sender may be silent for so long (it imports, loads or compiles).
        acks: of a client: where each of its sessions stands.
        grants: to a client: how far the controls of each of its sessions may go.
    """

    busy_for_s: float = 0.0
    acks: tuple[Ack, ...] = ()
    grants: tuple[ControlGrant, ...] = ()


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
        name: whose its jobs are, for turns, limits and the status; others may have the same. Empty: the broker makes one.
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
        control_binding: whether the keys are bound when a chunk begins, or when its control is accepted (rule 15).
        pace: as fast as it goes, or no further ahead of the media clock than the output credit (rule 20).
        credit: how much may be sent before the first `Ack`; what the output's edge holds bounds it as well.
    """

    key: str
    pipeline: str
    chunks: int
    parameters: Mapping[str, Plain] = field(default_factory=dict)
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)
    control_binding: ControlBinding = "late"
    pace: Pace = "asap"
    credit: Credit = field(default_factory=Credit)


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
        jobs: kinds of jobs that can be asked for (to clients).
        incarnation: how many brokers there were with this one's state, this one included: whoever comes again knows whether
            it comes to the same one.
    """

    name: str
    version: str
    heartbeat_s: float
    missed: int
    limits: Mapping[str, int]
    specs: tuple[StreamSpec, ...] = ()
    jobs: tuple[JobSpec, ...] = ()
    incarnation: int = 1


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

    The limit never goes back; where it grew by a commit, the `Chunk` has said so.

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
    """A committed chunk: all outputs of one index.

    `control_limit`: explicit controls below it will be accepted now that the chunk is committed; it never goes back. It is
    said here because most grants grow by a commit; `SessionChanged` tells those that grow by anything else.
    """

    session: str
    index: int
    outputs: Mapping[str, Artifact]
    applied: Applied
    facts: Mapping[str, Plain]
    timing: ChunkTiming
    is_last: bool
    control_limit: int = 0


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


# --- the directions: of workers see `worker_messages` ---------------------------------------------------------------------

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
    | MemoryProbed
    | BeginUpload
    | UploadPart
    | SubmitJob
    | AskJobs
    | WatchJob
    | CancelJob
    | DeleteJob
    | FetchResult
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
    | MemoryProbed
    | GroupOpened
    | GroupFormed
    | RanksLost
    | JobProgress
    | JobFile
    | JobEnded
    | WantFile
    | FilePart
    | FileGone
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
    | ProbeMemory
    | UploadGrant
    | UploadStored
    | UploadRefused
    | JobAccepted
    | JobRefused
    | Jobs
    | JobChanged
    | ResultPart
)
ToWorker = (
    Welcome
    | Rejected
    | Heartbeat
    | Goodbye
    | InitializeStage
    | RunTask
    | SetStageKeys
    | ReleaseStage
    | ProbeMemory
    | ReturnSegments
    | LeadGroup
    | JoinGroup
    | EndGroup
    | RunJob
    | StopJob
    | ForgetJob
    | CheckpointKept
    | WantFile
    | FilePart
    | FileGone
)
ToBroker = ClientMessage | WorkerMessage
FromBroker = ToClient | ToWorker
Message = ToBroker | FromBroker
