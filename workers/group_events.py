"""What the cores of a group's ranks hear and say beyond `events` and `actions`: closed sets, like those.

An *order* is what a rank's group thread is to do; it does one after the other, and answers each by an `OrderDone`. On the
leader and on the other ranks the orders are the same, because they follow from the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reelwire.group_messages import ToLeader, ToRank
from reelwire.messages import Failure, FileOffer, FilePart, FileRole, InitializeStage, Member, RunJob, RunTask

from .actions import Action, Job
from .events import Event, Finished

if TYPE_CHECKING:
    from reelwire.pipeline.job import JobOutput

    from .checkpoints import Snapshot

# --- orders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadJobs:
    """Load the weights of the kinds of jobs; `fingerprint` of what is loaded must be the same on all ranks."""


@dataclass(frozen=True, slots=True)
class Form:
    """Leave the process group, if there is one, and meet the others in a new one.

    Attributes:
        epoch: of the group.
        round: number of the process group within the epoch.
        store: ``HOST:PORT`` of the leader's TCPStore; keys of a process group begin with epoch and round.
    """

    epoch: int
    round: int
    store: str


@dataclass(frozen=True, slots=True)
class AtStage:
    """Initialize, run or release a session at a grouped stage, or build the stage: the job as `actor.Actor` gives it."""

    stage: str
    job: Job


@dataclass(frozen=True, slots=True)
class StartJob:
    """Begin a job, up to its first yield.

    Attributes:
        run: what it is.
        files: path of each file, by its name in the store; empty on a rank that lacks them.
        share: the leader's files go to all ranks first, by a broadcast.
    """

    run: RunJob
    files: Mapping[str, str]
    share: bool


@dataclass(frozen=True, slots=True)
class StepJob:
    """Go on with the job, to its next yield or its end."""


@dataclass(frozen=True, slots=True)
class KeepJob:
    """On the leader: take the state of the job where it stands; answered with `snapshot`."""


@dataclass(frozen=True, slots=True)
class CloseJob:
    """Close the job, wherever it is: what it holds is given back when this is answered."""


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Leave the process group."""


Order = LoadJobs | Form | AtStage | StartJob | StepJob | KeepJob | CloseJob | LeaveGroup


@dataclass(frozen=True, slots=True)
class OrderReport:
    """What came of an order.

    Attributes:
        order: which.
        failure: why it couldn't be done.
        broken: another rank is to blame for it: a collective failed, or that one refuses what was about to be begun.
        traceback: for the log.
        finished: of `AtStage`: as a stage's thread reports it.
        stage: of `StartJob` and `StepJob`: the stage that the job stands before.
        step: the same: steps of it that are done.
        steps: the same: steps that it has.
        keeps: the same: its state could be kept here.
        output: the job has ended with this; None: it hasn't ended. The job is closed then.
        snapshot: of `KeepJob`.
        took_s: seconds that it took.
        apart: of a failure: with it this rank has left its process group. If it hasn't, no rank has
            left: what was to be begun was refused by one of them, or by all, before any began it; or a state couldn't be taken.
    """

    order: Order
    failure: Failure | None = None
    broken: bool = False
    traceback: str = ""
    finished: Finished | None = None
    stage: str = ""
    step: int = 0
    steps: int = 0
    keeps: bool = False
    output: JobOutput | None = None
    snapshot: Snapshot | None = None
    took_s: float = 0.0
    apart: bool = True


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The group thread has done an order."""

    now: float
    report: OrderReport


@dataclass(frozen=True, slots=True)
class LinkSaid:
    """Something came over the link: at the leader from `rank` (known by its hello), at the others from rank 0."""

    now: float
    rank: int
    message: ToLeader | ToRank


@dataclass(frozen=True, slots=True)
class Opened:
    """At the leader: the link listens and the TCPStore is there."""

    now: float
    epoch: int
    link: str
    store: str


@dataclass(frozen=True, slots=True)
class RankExited:
    """The process of another rank has ended, as the kernel says; of a rank on another machine nobody hears it here."""

    now: float
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class TakenIn:
    """The body's tensors were copied out of shared memory; `failure`: they couldn't be read."""

    now: float
    body: InitializeStage | RunTask
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class FilesFound:
    """A job's files were looked for here.

    Attributes:
        now: seconds.
        sequence: of the job's body.
        files: path of each that is here, by its name in the store; size and hash are right.
        missing: those that aren't.
    """

    now: float
    sequence: int
    files: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[FileOffer, ...] = ()


@dataclass(frozen=True, slots=True)
class PartWritten:
    """At the leader: a part of a file that is fetched was written; `path`: it was the last, and the file is right.

    `failure`: it can't be kept, or its hash is wrong.
    """

    now: float
    file: str
    parts: int
    path: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class FrameEncoded:
    """At the leader: the encoder has written a frame of some result."""

    now: float


@dataclass(frozen=True, slots=True)
class ResultMade:
    """The result's file is written, or can't be."""

    now: float
    job: str
    attempt: int
    offer: FileOffer | None
    facts: Mapping[str, object] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """The state of a job after `step` steps is in a file, or can't be."""

    now: float
    job: str
    attempt: int
    step: int
    offer: FileOffer | None
    failure: Failure | None = None


GroupEvent = (
    OrderDone
    | LinkSaid
    | Opened
    | RankExited
    | TakenIn
    | FilesFound
    | PartWritten
    | FrameEncoded
    | ResultMade
    | CheckpointWritten
)

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLink:
    """At the leader: listen for the other ranks, make a TCPStore, watch their processes: `Opened`."""

    epoch: int
    secret: bytes
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class JoinLink:
    """At another rank: connect to the leader's link, and watch the others' processes."""

    epoch: int
    members: tuple[Member, ...]
    link: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Say something over the link: the leader to all other ranks, they to the leader."""

    message: ToRank | ToLeader


@dataclass(frozen=True, slots=True)
class Do:
    """Give an order to the group thread, which has none."""

    order: Order


@dataclass(frozen=True, slots=True)
class TakeIn:
    """Copy a body's tensors out of shared memory: `TakenIn`."""

    body: InitializeStage | RunTask


@dataclass(frozen=True, slots=True)
class FindFiles:
    """Look for a job's files where their offers say: `FilesFound`."""

    run: RunJob


@dataclass(frozen=True, slots=True)
class WritePart:
    """Write a part of a file that is fetched: `PartWritten`. The first one makes the file."""

    offer: FileOffer
    part: FilePart


@dataclass(frozen=True, slots=True)
class SendParts:
    """Send parts of a file that was made here, from `first` below `parts`, or `FileGone`."""

    attachment: int
    file: str
    first: int
    parts: int


@dataclass(frozen=True, slots=True)
class MakeResult:
    """Write what a job has made into a file, beside the group thread: `FrameEncoded` for each frame, and `ResultMade`."""

    job: str
    attempt: int
    suffix: str
    output: JobOutput


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write the state of a job after `step` steps into a file, while it goes on: `CheckpointWritten`."""

    job: str
    attempt: int
    step: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class DropFiles:
    """Remove files that were made or fetched here for a job; `role`: only of that role; `besides`: but not this one."""

    job: str
    attempt: int
    role: FileRole | None = None
    besides: str = ""


@dataclass(frozen=True, slots=True)
class KillRanks:
    """SIGKILL the processes of these ranks, as far as they are on this machine: it frees whoever waits for them."""

    ranks: tuple[int, ...]


GroupAction = (
    OpenLink
    | JoinLink
    | Tell
    | Do
    | TakeIn
    | FindFiles
    | WritePart
    | SendParts
    | MakeResult
    | WriteCheckpoint
    | DropFiles
    | KillRanks
)
AnyAction = Action | GroupAction
"""What a core asks of its loop."""
AnyEvent = Event | GroupEvent
"""What happens to a core."""
