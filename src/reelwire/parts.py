"""What messages are made of: the values that several of them carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .spec import Plain
from .tensors import TensorRef

EndMode = Literal["drain", "cancel"]
Phase = Literal["build", "initialize", "run", "release"]
FailureKind = Literal["request", "stage", "worker_lost", "overload", "timeout", "stalled", "shutdown", "unreachable"]
ControlSource = Literal["explicit", "tap", "held"]


@dataclass(frozen=True, slots=True)
class Artifact:
    """Named plain values and named tensors."""

    values: Mapping[str, Plain] = field(default_factory=dict)
    tensors: Mapping[str, TensorRef] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


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
        source: where it came from.
        control: its content.
        revision: the revision of the key state it was taken from; 0 for an explicit control.
    """

    source: ControlSource
    control: Artifact
    revision: int = 0


@dataclass(frozen=True, slots=True)
class StageTiming:
    """When a chunk passed a stage, in seconds since the session became ready, by the broker's clock.

    Attributes:
        ready_s: all inputs were there and the outputs had room.
        admitted_s: the task was sent to the actor.
        started_s: the actor began.
        completed_s: its result arrived.
    """

    ready_s: float
    admitted_s: float
    started_s: float
    completed_s: float


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """Times of one chunk, in seconds, by the broker's clock.

    Attributes:
        committed_s: since the session became ready.
        latency_s: from the acceptance of its latency anchor to its commit.
        period_s: since the commit of the chunk before; None for the first.
        stages: stage name to its times.
    """

    committed_s: float
    latency_s: float
    period_s: float | None
    stages: Mapping[str, StageTiming]
