"""What a leader keeps of the ranks: what they are at, which of them has what, and how what went wrong is said. Pure.

The ranks are at one decision, and the next one is taken when all have answered it; with one exception, the step of a job
that follows a step of it, or its beginning. That one may be taken while other ranks are at the one before, so that no rank
waits for a message between two steps. They are never at more than these two, and answer them one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from reelwire.group_messages import Decision, Have, Outcome
from reelwire.messages import Failure, InitializeStage, Phase, ReleaseStage, RunJob, RunTask, StageFailed

from .actions import Job, Log
from .events import Finished
from .group_events import AnyAction, Order, OrderReport, StartJob, StepJob

AGAIN_S = 3.0
"""How long what was said to another rank may lack an answer before it is said again: its connection may have broken."""
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


@dataclass(frozen=True, slots=True)
class Failed:
    """What went wrong on a rank.

    Attributes:
        number: of the decision; 0: the other ranks weren't told of it.
        failure: why.
        is_broken: another rank is to blame for it.
        is_apart: it has left its process group by that.
    """

    number: int
    failure: Failure
    is_broken: bool
    is_apart: bool = True


@dataclass(slots=True)
class Pending:
    """One thing that the ranks are at.

    Attributes:
        order: what this one's thread was told.
        decision: what the others were told; None: nothing.
        since: when, in seconds, or when all had answered what was before it.
        missing: ranks that haven't answered.
        report: what this one's thread answered.
        failures: what went wrong, by rank: of what a rank was at already when it failed, the first.
    """

    order: Order
    decision: Decision | None
    since: float
    missing: set[int]
    report: OrderReport | None = None
    failures: dict[int, Failed] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The decision's; 0: the others weren't told."""
        return 0 if self.decision is None else self.decision.number

    @property
    def failure(self) -> Failure | None:
        """The root cause: of a rank that suffers from no other, if one says so; it is named where it is the only one.

        What was decided earlier failed first, but for what only broke: a rank may be thrown out of the end of a step by
        another one that is at the next already.
        """
        if not self.failures:
            return None
        rank = min(self.failures, key=lambda each: (self.failures[each].is_broken, self.failures[each].number, each))
        cause = self.failures[rank]
        alike = sum(not each.is_broken and each.number == cause.number for each in self.failures.values())
        if alike == 1 and (rank > 0 or len(self.failures) > 1) and not cause.failure.field:
            return replace(cause.failure, message=f"rank {rank}: {cause.failure.message}")
        return cause.failure

    @property
    def is_apart(self) -> bool:
        """Whether some rank has left the process group by it, so that they must meet again; not if all have only refused."""
        return any(each.is_apart for each in self.failures.values())

    @property
    def what(self) -> str:
        """A few words on it."""
        return type(self.order).__name__ if self.decision is None else self.decision.act

    @property
    def is_of_job(self) -> bool:
        """Whether a job goes on by it."""
        return isinstance(self.order, StartJob | StepJob)

    def fail(self, rank: int, failure: Failure, *, is_broken: bool, is_apart: bool) -> None:
        """A rank couldn't do it; what it couldn't do before explains that better."""
        self.failures.setdefault(rank, Failed(self.number, failure, is_broken, is_apart))


class Underway:
    """What the ranks are at: nothing, a decision, or one and the step of the job behind it."""

    def __init__(self) -> None:
        """Nothing."""
        self._all: deque[Pending] = deque()

    @property
    def first(self) -> Pending | None:
        """What all have to answer before anything comes of it."""
        return self._all[0] if self._all else None

    @property
    def has_failed(self) -> bool:
        """Whether something of it went wrong on some rank."""
        return any(pending.failures for pending in self._all)

    @property
    def lets_go_on(self) -> bool:
        """Whether a step of the job may come behind it: this rank stands at a yield, and nobody has failed."""
        if len(self._all) != 1 or self.has_failed:
            return False
        (pending,) = self._all
        return pending.is_of_job and pending.report is not None and pending.report.output is None

    @property
    def unanswered(self) -> list[Decision]:
        """What some other rank hasn't answered, in order."""
        return [each.decision for each in self._all if each.decision is not None and each.missing - {0}]

    def add(self, pending: Pending) -> None:
        """It was decided."""
        assert not self._all or (self.lets_go_on and isinstance(pending.order, StepJob)), "the ranks are at something"
        self._all.append(pending)

    def done(self, report: OrderReport) -> Failure | None:
        """This rank's thread has done what came last; why not, if it couldn't."""
        assert self._all, "an order was done that wasn't given"
        pending = self._all[-1]
        assert 0 in pending.missing, "an order was done twice"
        assert report.order == pending.order, "another order was done"
        pending.report = report
        pending.missing.discard(0)
        failure = failure_of(report)
        if failure is not None:
            pending.fail(0, failure, is_broken=report.broken, is_apart=report.apart)
        return failure

    def answered(self, rank: int, outcome: Outcome) -> bool:
        """Another rank says what came of a decision; False: of none that it is at."""
        pending = next((each for each in self._all if rank in each.missing), None)
        if pending is None or pending.number != outcome.number:
            return False
        pending.missing.discard(rank)
        if outcome.failure is not None:
            pending.fail(rank, outcome.failure, is_broken=outcome.broken, is_apart=outcome.apart)
        return True

    def without(self, rank: int) -> None:
        """A rank won't answer any more."""
        for pending in self._all:
            pending.missing.discard(rank)

    def settled(self, now: float) -> Iterator[Pending]:
        """What all have answered, in order; the time of what is behind it begins then.

        A step that failed somewhere while another was behind it is none of them: no rank can do the next one, and that
        one fails for all, with the cause of both.
        """
        while self._all and not self._all[0].missing:
            pending = self._all.popleft()
            if not self._all:
                yield pending
                continue
            behind = self._all[0]
            behind.since = now
            behind.failures.update(pending.failures)
            if not pending.failures:
                yield pending

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._all) <= 2, "the ranks are at more than a decision and the one behind it"
        assert all(pending.missing for pending in self._all), "all have answered, and nothing came of it"
        if len(self._all) == 2:
            first, second = self._all
            assert isinstance(second.order, StepJob), "something else than a step didn't wait for all ranks"
            assert first.is_of_job, "a step came behind something else than a step"
            assert first.report is not None, "this rank's thread was given two orders"
            assert first.report.output is None, "a step of a job that has ended"
            assert 0 not in first.failures, "a step of a job that has failed"
            assert first.missing <= second.missing, "the second was answered before the first"
            assert first.number + 1 == second.number, "something was decided between the two"


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

    def lacking(self, number: int) -> tuple[int, ...]:
        """The ranks that haven't said that they have a body."""
        return tuple(sorted(self._others - self._haves.get(number, set()))) if number else ()

    def is_shared(self, number: int) -> bool:
        """Whether some rank lacks files of a job."""
        return number in self._lacking

    def oldest(self, waiting: Mapping[str, Job]) -> str | None:
        """The stage of whose first jobs, by stage, the one is that came first, of those that all ranks have."""
        had = [(self._since(stage, job), stage) for stage, job in waiting.items() if self.everywhere(number_of(job))]
        return min(had)[1] if had else None

    def forget(self, wanted: Iterable[int]) -> int:
        """Forget the bodies that nobody will ask for; all below the number that is returned."""
        below = min((number for number in wanted if number), default=self.newest + 1)
        for number in [number for number in self._haves if number < below]:
            del self._haves[number]
        self._lacking = {number for number in self._lacking if number >= below}
        # A release from before all that is wanted comes first in any case.
        self._releases = {session: since for session, since in self._releases.items() if since >= below}
        return below

    def _since(self, stage: str, job: Job) -> int:
        """When a job came, compared with others."""
        work = job.work
        return self._releases.get((stage, work.session), 0) if isinstance(work, ReleaseStage) else number_of(job)


def failure_of(report: OrderReport) -> Failure | None:
    """Why an order couldn't be done, however that is said."""
    if report.failure is None and report.finished is not None and isinstance(report.finished.reply, StageFailed):
        return report.finished.reply.failure
    return report.failure


def order_failed(report: OrderReport, failure: Failure) -> Log:
    """What the log says of an order that couldn't be done."""
    fields = {"order": type(report.order).__name__, "reason": failure.message, "is_broken": report.broken}
    return Log("error", "order_failed", {**fields, "traceback": report.traceback})


def job_failed(run: RunJob, pending: Pending, failure: Failure) -> Log:
    """What the log says of a job that has failed, with what each rank says of it."""
    ranks = {str(rank): each.failure.message for rank, each in sorted(pending.failures.items())}
    return Log(
        "error", "job_failed", {"job": run.job, "attempt": run.attempt, "reason": failure.message, "ranks": ranks}
    )


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
