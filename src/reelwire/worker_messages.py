"""What a broker and a worker say to each other, and what all three say about shared memory; see `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .controls import KeyState
from .group_messages import LeaderTensor
from .job_parts import HeldJob, Membership
from .job_spec import JobSpec
from .parts import Applied, Artifact, Failure, Phase, Reservation, SegmentUse
from .spec import Plain, StreamSpec
from .tensors import TensorRef

# --- shared memory: workers write it, workers and clients read it ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeMemory:
    """To a worker or a client: can it open what the worker that owns this memory writes?"""

    owner: str


@dataclass(frozen=True, slots=True)
class MemoryProbed:
    """The answer: the bytes that stand in the owner's probe; empty when it can't be opened."""

    owner: str
    probe: bytes


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """What a worker writes shared memory as.

    Attributes:
        owner: name of its folder.
        probe: random bytes that stand in the folder's probe: whoever knows them could open it.
    """

    owner: str
    probe: bytes


@dataclass(frozen=True, slots=True)
class ReturnSegments:
    """To a worker: nobody reads these pieces of its shared memory any more."""

    segments: tuple[SegmentUse, ...]


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
        grouped: all ranks of the worker's group compute it together: each of them is told what is asked of it.
    """

    pipeline: str
    stage: str
    slots: int
    cache_bytes_max: int
    mailbox: int = 1
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """First message of a worker, when its process is up; its weights needn't be loaded yet.

    Attributes:
        version: of reelwire.
        name: chosen by whoever started it; a new hello under an old name replaces the old worker, but no rank that is another
            process, and is heard.
        device: such as ``cpu`` or ``cuda:0``.
        specs: what its stages belong to.
        stages: its actors.
        packages: versions of what its results depend on.
        limits: what it accepts, by name, as in `ClientHello`.
        memory: shared memory that it can write; None when it has none.
        forwards: it gives what one of its stages makes to another one itself, to tasks that await it.
        group: its place in a worker group; None: it is none's. The stages are those of rank 0; other ranks have none.
        jobs: kinds of jobs that it does, with the group that it leads or by itself; of rank 0 too.
        held: jobs that it has already, when it has lost a broker.
    """

    version: str
    name: str
    device: str
    specs: tuple[StreamSpec, ...]
    stages: tuple[StageOffer, ...]
    packages: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    memory: MemoryOffer | None = None
    forwards: bool = False
    group: Membership | None = None
    jobs: tuple[JobSpec, ...] = ()
    held: tuple[HeldJob, ...] = ()


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
    """The actor began a task: its inputs have left their edges. `applied`: what a reservation was bound to.

    It may be left out when the task's `TaskDone` goes in the same turn.
    """

    session: str
    stage: str
    epoch: int
    stage_epoch: int
    index: int
    applied: Applied | None = None


@dataclass(frozen=True, slots=True)
class TaskDone:
    """A task's outputs.

    Attributes:
        session: whose.
        stage: which.
        epoch: as of the task.
        stage_epoch: as of the task.
        index: the chunk.
        outputs: artifact name to artifact.
        facts: small values that go to the client.
        run_s: seconds that the stage computed.
        applied: what a reservation was bound to, as in `TaskStarted`.
        constant: the outputs of all later chunks will be the same, bit for bit; the stage needn't run again (rule 8).
    """

    session: str
    stage: str
    epoch: int
    stage_epoch: int
    index: int
    outputs: Mapping[str, Artifact]
    facts: Mapping[str, Plain]
    run_s: float
    applied: Applied | None = None
    constant: bool = False


# --- broker to worker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InitializeStage:
    """Make the caches of a session at a stage.

    Attributes:
        session: whose.
        pipeline: of which stream.
        stage: which.
        epoch: counts the attempts at the session.
        stage_epoch: counts those at the stage.
        chunks: how many the session will have.
        parameters: of the request, complete.
        tensors: of the request, those that the stage asks for.
        handed: what the stages before this one handed on.
        sequence: where a group computes the stage, the number of the group's body; else 0.
        broadcast: large tensors that the leader has and gives to the other ranks, in this order.
    """

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int
    chunks: int
    parameters: Mapping[str, Plain]
    tensors: Mapping[str, TensorRef]
    handed: Artifact
    sequence: int = 0
    broadcast: tuple[LeaderTensor, ...] = ()

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """All that holds tensors, by the name of its field."""
        return {"tensors": Artifact({}, self.tensors), "handed": self.handed}

    def with_artifacts(self, artifacts: Mapping[str, Artifact]) -> InitializeStage:
        """The same with others of these."""
        return replace(self, tensors=artifacts["tensors"].tensors, handed=artifacts["handed"])


@dataclass(frozen=True, slots=True)
class RunTask:
    """Make the outputs of chunk `index`.

    Attributes:
        session: whose.
        pipeline: of which stream.
        stage: which.
        epoch: counts the attempts at the session.
        stage_epoch: counts those at the stage.
        index: the chunk.
        inputs: artifact name to artifact.
        is_first: whether it is the session's first.
        is_last: whether it is the session's last.
        reservation: a control that is to be bound when the task begins; None when all inputs are there.
        shared: outputs that all their readers can take from the worker's shared memory.
        awaits: inputs that aren't here yet, because another stage of this worker makes them for the same chunk: the task
            begins when they are made.
        sequence: where a group computes the stage, the number of the group's body; else 0.
        broadcast: large tensors that the leader has and gives to the other ranks, in this order.
    """

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int
    index: int
    inputs: Mapping[str, Artifact]
    is_first: bool
    is_last: bool
    reservation: Reservation | None = None
    shared: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()
    sequence: int = 0
    broadcast: tuple[LeaderTensor, ...] = ()

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """All that holds tensors: the inputs, by name."""
        return dict(self.inputs)

    def with_artifacts(self, artifacts: Mapping[str, Artifact]) -> RunTask:
        """The same with other inputs."""
        return replace(self, inputs=artifacts)


@dataclass(frozen=True, slots=True)
class SetStageKeys:
    """The key register of a session, for a reservation that waits at the stage; the higher revision wins."""

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int
    keys: KeyState


@dataclass(frozen=True, slots=True)
class ReleaseStage:
    """Drop the caches of a session at a stage, and its tasks that wait there."""

    session: str
    pipeline: str
    stage: str
    epoch: int
    stage_epoch: int
