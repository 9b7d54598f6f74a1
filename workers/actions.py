"""What the worker's core asks of its loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire import wire
from reelwire.messages import Applied, InitializeStage, ReleaseStage, RunTask, SegmentUse, WorkerMessage

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class BuildStage:
    """Load the weights of a stage."""

    pipeline: str
    stage: str


Work = BuildStage | InitializeStage | RunTask | ReleaseStage


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for a stage's thread to do.

    Attributes:
        attachment: the attachment to which its outcome is told; 0: nobody is told.
        work: what to do.
        applied: the control that a reservation was bound to when the stage's thread got the job, which stands among the
            inputs then.
    """

    attachment: int
    work: Work
    applied: Applied | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """Close the connection with all that waits on it, and open a new one."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the broker. `packed`: it as it is sent, where that was made already."""

    attachment: int
    message: WorkerMessage
    packed: wire.Packed | None = None


@dataclass(frozen=True, slots=True)
class SetLimits:
    """From here on the broker accepts so much: what a stage makes is checked against it before it is sent."""

    limits: wire.Limits


@dataclass(frozen=True, slots=True)
class Run:
    """Give a job to the thread of a stage, which has none."""

    stage: str
    job: Job


@dataclass(frozen=True, slots=True)
class AnswerProbe:
    """Look for what stands in the probe of an owner of shared memory, and tell the broker."""

    attachment: int
    owner: str


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Nobody reads these pieces of our shared memory any more, or nobody ever heard of them."""

    segments: tuple[SegmentUse, ...]


@dataclass(frozen=True, slots=True)
class AbandonMemory:
    """The attachment is lost: never write again what was sent over it, and let go of what came over it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The broker knows the worker and all weights are loaded; said once."""

    name: str


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the log."""

    level: Level
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process; the last action of a core."""

    exit_code: int
    reason: str


Action = Connect | Send | SetLimits | Run | AnswerProbe | TakeBack | AbandonMemory | Ready | Log | Stop
