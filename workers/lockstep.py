"""What a leader keeps of the ranks: what they are at, which of them has what, and how what went wrong is said. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from reelwire.group_messages import Decision, Have
from reelwire.messages import Failure, InitializeStage, Phase, ReleaseStage, RunJob, RunTask, StageFailed

from .actions import Job, Log
from .events import Finished
from .group_events import AnyAction, Order, OrderReport

LEAVE_S = 5.0
"""How long the others may take to say that they leave, when all leave as asked for."""


class Host(Protocol):
    """The worker's core, as its leader sees it."""

    @property
    def attachment(self) -> int:
        """The number under which the broker is told things; 0: it is away."""
        ...

    def reported(self, report: Finished) -> Iterator[AnyAction]:
        """What comes of a job at a stage."""
        ...

    def end(self, code: int, reason: str) -> list[AnyAction]:
        """End the process: nothing comes after this."""
        ...

    def ask_to_stop(self, now: float) -> list[AnyAction]:
        """Somebody wants the process to stop."""
        ...


@dataclass(slots=True)
class Pending:
    """What the ranks are at.

    Attributes:
        order: what this one's thread was told.
        decision: what the others were told; None: nothing.
        since: when, in seconds.
        missing: ranks that haven't answered.
        report: what this one's thread answered.
        failures: what went wrong, by rank; whether another is to blame for it.
    """

    order: Order
    decision: Decision | None
    since: float
    missing: set[int]
    report: OrderReport | None = None
    failures: dict[int, tuple[Failure, bool]] = field(default_factory=dict)

    @property
    def failure(self) -> Failure | None:
        """The root cause: of a rank that suffers from no other, if one says so; it is named where it is the only one."""
        if not self.failures:
            return None
        rank = min(self.failures, key=lambda rank: (self.failures[rank][1], rank))
        failure, _ = self.failures[rank]
        causes = sum(not is_broken for _, is_broken in self.failures.values())
        if causes == 1 and (rank > 0 or len(self.failures) > 1) and not failure.field:
            return replace(failure, message=f"rank {rank}: {failure.message}")
        return failure

    @property
    def what(self) -> str:
        """A few words on it."""
        return type(self.order).__name__ if self.decision is None else self.decision.act


class Numbers:
    """The numbered bodies of a group: which one came last, and who has which.

    Args:
        others: the ranks beside the leader.

    Attributes:
        newest: the highest number that came.
    """

    def __init__(self, others: frozenset[int]) -> None:
        """Nothing has come."""
        self.newest = 0
        self._others = others
        self._haves: dict[int, set[int]] = {}
        self._lacking: set[int] = set()
        self._releases: dict[tuple[str, str], int] = {}

    def note(self, message: InitializeStage | RunTask | ReleaseStage | RunJob) -> bool:
        """Take the number of a body, which must be higher than all before; a release has none, and is noted by its time."""
        if isinstance(message, ReleaseStage):
            self._releases[message.stage, message.session] = self.newest
            return True
        if message.sequence <= self.newest:
            return False
        self.newest = message.sequence
        return True

    def has(self, rank: int, have: Have) -> None:
        """A rank has a body."""
        self._haves.setdefault(have.sequence, set()).add(rank)
        if have.lacks:
            self._lacking.add(have.sequence)

    def everywhere(self, number: int) -> bool:
        """Whether all other ranks have a body; nobody needs to have number 0."""
        return not number or self._haves.get(number, set()) >= self._others

    def is_shared(self, number: int) -> bool:
        """Whether some rank lacks files of a job."""
        return number in self._lacking

    def since(self, stage: str, job: Job) -> int:
        """When a job came, compared with others."""
        work = job.work
        return self._releases.get((stage, work.session), 0) if isinstance(work, ReleaseStage) else number_of(job)

    def forget(self, wanted: Iterable[int]) -> int:
        """Forget the bodies that nobody will ask for; all below the number that is returned."""
        below = min((number for number in wanted if number), default=self.newest + 1)
        for number in [number for number in self._haves if number < below]:
            del self._haves[number]
        self._lacking = {number for number in self._lacking if number >= below}
        # A release from before all that is wanted comes first in any case.
        self._releases = {session: since for session, since in self._releases.items() if since >= below}
        return below


def failure_of(report: OrderReport) -> Failure | None:
    """Why an order couldn't be done, however that is said."""
    if report.failure is None and report.finished is not None and isinstance(report.finished.reply, StageFailed):
        return report.finished.reply.failure
    return report.failure


def order_failed(report: OrderReport, failure: Failure) -> Log:
    """What the log says of an order that couldn't be done."""
    fields = {"order": type(report.order).__name__, "reason": failure.message, "is_broken": report.broken}
    return Log("error", "order_failed", {**fields, "traceback": report.traceback})


def unloadable(failure: Failure) -> tuple[int, str]:
    """The exit code and the sentence when weights can't be loaded."""
    what = f"{failure.field}: {failure.message}" if failure.field else failure.message
    return (2 if failure.kind == "request" else 1), f"the jobs can't be loaded: {what}"


def number_of(job: Job) -> int:
    """The number of the body that a stage's job is about; 0: it is about none."""
    return job.work.sequence if isinstance(job.work, InitializeStage | RunTask) else 0


def failed_with(work: InitializeStage | RunTask | ReleaseStage, failure: Failure) -> StageFailed:
    """What the broker is told when a rank, any of them, couldn't do what a stage was asked for."""
    phase: Phase = "release"
    index = None
    if isinstance(work, InitializeStage):
        phase = "initialize"
    elif isinstance(work, RunTask):
        phase, index = "run", work.index
    reason = replace(failure, stage=work.stage, index=index)
    return StageFailed(work.session, work.stage, work.epoch, work.stage_epoch, phase, index, reason)
