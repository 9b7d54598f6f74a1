"""What happens to the worker's core. `now` is monotonic seconds, the same clock in all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from reelwire import wire
from reelwire.messages import SegmentUse, StageFailed, StageInitialized, StageReady, StageReleased, TaskDone, ToWorker

from .actions import Job, Log

Reply = StageReady | StageInitialized | StageReleased | StageFailed | TaskDone


@dataclass(frozen=True, slots=True)
class Finished:
    """A stage's thread has done its job and waits for the next.

    Attributes:
        stage: the stage.
        job: the job it was given.
        reply: the outcome, as the broker is told.
        traceback: where the stage raised; for the log only.
        pieces: the shared memory in which the outcome's tensors stand.
        pack: makes the reply as it is sent, or says why the stage has failed instead; None: nothing is known of either.
    """

    stage: str
    job: Job
    reply: Reply
    traceback: str = ""
    pieces: tuple[SegmentUse, ...] = ()
    pack: Callable[[], wire.Packed | StageFailed] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The process is up; the first event."""

    now: float


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from the broker."""

    now: float
    attachment: int
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Malformed:
    """Something came from the broker that is no message for a worker."""

    now: float
    code: Literal["malformed", "version"]
    reason: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A stage's thread has something to say."""

    now: float
    report: Finished


@dataclass(frozen=True, slots=True)
class OutboxFull:
    """The broker takes nothing, and what waits for it has reached its limit."""

    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The end of a turn of the loop: time has passed.

    `drained` says whether everything that had arrived was read: silence is judged only then.
    """

    now: float
    drained: bool = True


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """Somebody asked the process to stop."""

    now: float


Event = Started | Received | Malformed | Reported | OutboxFull | Tick | ShutdownRequested


def failure_line(report: Finished, reply: StageFailed) -> Log:
    """What the log says of a failure."""
    fields: dict[str, object] = {
        "stage": report.stage,
        "phase": reply.phase,
        "session": reply.session,
        "index": reply.index,
        "reason": reply.failure.message,
    }
    if reply.failure.kind == "request":
        return Log("info", "request_refused", {**fields, "field": reply.failure.field})
    return Log("error", "stage_failed", {**fields, "traceback": report.traceback})
