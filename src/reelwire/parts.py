"""What messages are made of: the values that several of them carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .controls import KeyState
from .spec import Plain
from .tensors import Inline, TensorRef

EndMode = Literal["drain", "cancel"]
Phase = Literal["build", "initialize", "run", "release"]
FailureKind = Literal["request", "stage", "worker_lost", "overload", "timeout", "stalled", "shutdown", "unreachable"]
ControlSource = Literal["explicit", "tap", "held", "still"]
ControlBinding = Literal["late", "early"]
Pace = Literal["asap", "realtime"]
NAME_CHARACTERS_MAX = 256
"""Most of what a peer, a group, a package or a kind of job is called."""
KEY_CHARACTERS_MAX = 256
"""Most of the key under which a client asks for a session or a job."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """Named plain values and named tensors."""

    values: Mapping[str, Plain] = field(default_factory=dict)
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_inline(self) -> bool:
        """Whether the bytes of all its tensors are in the message itself, not in shared memory."""
        return all(isinstance(tensor.place, Inline) for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed.

    Attributes:
        kind: ``request`` (the caller's fault, `field` names what), ``stage`` (a stage raised, or made what can't be
            used), ``worker_lost``, ``overload`` (no room now), ``timeout``, ``stalled`` (nobody takes the chunks),
            ``shutdown`` (a broker or a worker stops) or ``unreachable`` (made by the client itself: nobody answers).
        message: one sentence.
        stage: the stage, if it was one.
        index: the chunk, if it was one.
        field: the field of the request that is at fault.
        retry_after_s: with ``overload``: when to try again, in seconds.
    """

    kind: FailureKind
    message: str
    stage: str = ""
    index: int | None = None
    field: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """The control that a chunk was denoised with.

    Attributes:
        source: where it came from; ``still``: the keys had been given up again by the time the chunk began, so nothing
            moves.
        control: its content.
        revision: the revision of the key state it was taken from; 0 for an explicit control.
        tap_revision: the newest one-shot that has been consumed when this chunk is through.
        pose_revision: the newest request for the first pose that has been followed when this chunk is through.
    """

    source: ControlSource
    control: Artifact
    revision: int = 0
    tap_revision: int = 0
    pose_revision: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A control that is bound when its chunk begins, from whatever the keys are then (rule 15).

    Attributes:
        artifact: the input that is to be filled.
        keys: the register as the broker knew it when it sent the task; a newer one may arrive before the chunk begins.
        tap_revision: the newest one-shot that was consumed by the chunks before.
        pose_revision: the newest request for the first pose that they followed.
    """

    artifact: str
    keys: KeyState
    tap_revision: int = 0
    pose_revision: int = 0


@dataclass(frozen=True, slots=True)
class Credit:
    """How much a client takes of a session: absolute, cumulative grants, of which the larger always holds (rule 11).

    Attributes:
        chunks: chunks with an index below it may be sent.
        nbytes: bytes of tensors that may be sent over the attachment, all chunks together; one chunk may go over it.
    """

    chunks: int = 2
    nbytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """The readers of a piece of shared memory are done with it.

    Attributes:
        segment: its name.
        generation: which use of it.
        broken: a reader was lost without a word, and may still read: it must never be written again.
    """

    segment: str
    generation: int
    broken: bool = False


@dataclass(frozen=True, slots=True)
class StageTiming:
    """When a chunk passed a stage, in seconds since the session became ready, by the broker's clock.

    Attributes:
        ready_s: all inputs were there and the outputs had room.
        admitted_s: the task was sent to the actor.
        started_s: the actor began.
        completed_s: its result arrived.
        waited_for: what the stage lacked last before it could run this chunk, as in the causes of its idle gaps
            (``input:control``, ``edge:latent``, ``credit``, ``actor_busy``, ``pace`` ...); empty when it didn't wait.
        waited_s: for how long, in seconds.
    """

    ready_s: float
    admitted_s: float
    started_s: float
    completed_s: float
    waited_for: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """Times of one chunk, in seconds, by the broker's clock.

    Attributes:
        committed_s: since the session became ready.
        latency_s: from the acceptance of its latency anchor to its commit.
        period_s: since the commit of the chunk before; None for the first.
        stages: stage name to its times.
        control_s: when its control was accepted, since the session became ready; for a reservation, when it was bound.
    """

    committed_s: float
    latency_s: float
    period_s: float | None
    stages: Mapping[str, StageTiming]
    control_s: float | None = None
