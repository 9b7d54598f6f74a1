"""Rank 0 of a worker group, a group of one too: it decides what all ranks do next, and when. Pure.

A decision is a message to the other ranks and an order for the thread of this one, and the next one comes when all have
answered. So all ranks do the same in the same order, and the collectives of two tasks can't cross. Where everybody has
answered, which is between two steps of a job as well, the first of these that there is comes next:

1. leave, when the process was asked to stop and has nothing left;
2. end the job: it was cancelled, or has failed somewhere;
3. meet again in a new process group, after a failure anywhere: a rank that raises leaves the old one, which frees the others;
   where all have refused what was to be begun, none has raised;
4. take the job's state, to be written into a file, which is this rank's business alone;
5. streaming: the oldest of what waits at the stages that the group computes, if all ranks have what it is about;
6. the next step of the job, or the beginning of one that all have.

Where there is nothing of all that but the next step of the job, it doesn't wait for the answers of the others: it is decided
when this rank's own thread has come to the yield. No decision is taken behind that before all have answered the one before,
so that the ranks are never at more than two; see `lockstep`.

A rank that is gone, or doesn't answer, ends the epoch: all leave, and whoever started them starts them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reelwire.group_messages import Act, Decision, Farewell, Have, Outcome, RankHello
from reelwire.job_spec import JobSpec
from reelwire.messages import (
    CheckpointKept,
    EndGroup,
    Failure,
    FileGone,
    FilePart,
    ForgetJob,
    GroupFormed,
    GroupOpened,
    InitializeStage,
    LeadGroup,
    Membership,
    RanksLost,
    ReleaseStage,
    RunJob,
    RunTask,
    StopJob,
    WantFile,
    WorkerMessage,
)

from .actions import BuildStage, Send
from .actor import Actor
from .group_events import (
    AnyAction,
    AtStage,
    CheckpointWritten,
    CloseJob,
    Do,
    FilesFound,
    Form,
    FrameEncoded,
    GroupEvent,
    KeepJob,
    KillRanks,
    LeaveGroup,
    LinkSaid,
    LoadJobs,
    Opened,
    OpenLink,
    Order,
    OrderDone,
    OrderReport,
    PartWritten,
    RankExited,
    ResultMade,
    StartJob,
    StepJob,
    TakenIn,
    Tell,
)
from .leader_jobs import LeaderJobs
from .lockstep import (
    Host,
    Numbers,
    Pending,
    Underway,
    failed_with,
    job_failed,
    number_of,
    order_failed,
    unloadable,
)
from .patience import Patience

ToLeaderOfJobs = RunJob | StopJob | ForgetJob | CheckpointKept | FilePart | FileGone | WantFile


class Leader:
    """What leads a group.

    Args:
        place: of this process in its group.
        step_timeout_s: how long the ranks may take for one decision.
        kinds: the kinds of jobs that are done here.
        actors: the stages that the group computes, by name.
        host: the worker's core.

    Attributes:
        jobs: the attempts at jobs.
        loaded: all weights of the group's work are there.
        formed: all ranks have met.
        counters: what was dropped, by reason.
    """

    def __init__(
        self,
        place: Membership,
        step_timeout_s: float,
        kinds: Sequence[JobSpec],
        actors: Mapping[str, Actor],
        host: Host,
    ) -> None:
        """No epoch yet, and no weights."""
        self.jobs = LeaderJobs(kinds, self._say, step_timeout_s)
        self.loaded = self.formed = False
        self.counters = self.jobs.counters
        self._place, self._actors, self._host = place, actors, host
        self._others = frozenset(range(1, place.world))
        self._bodies = Numbers(self._others)
        self._epoch = self._number = self._round = 0
        self._now = self._given_s = 0.0
        self._store = ""
        self._underway = Underway()
        self._patience = Patience(place.group, step_timeout_s, self._underway, self._bodies, self.jobs)
        self._met: set[int] = set()
        self._has_begun = self._is_broken = self._is_winding_up = self._is_clear = False
        self._unloaded = bool(kinds)

    # --- what the core asks --------------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Its place, as a hello says it."""
        return replace(self._place, epoch=self._epoch, sequence=self._bodies.newest)

    @property
    def is_alone(self) -> bool:
        """Whether the group has no other ranks."""
        return not self._others

    @property
    def due_at(self) -> float | None:
        """When `due` has something to do."""
        times = self._patience.due_at, self.jobs.due_at
        return min((time for time in times if time is not None), default=None)

    def begin(self) -> None:
        """Load what is to be loaded."""
        self._has_begun = True

    def wind_up(self, *, clear: bool) -> None:
        """No session lives here any more: hand back the job and leave; `clear`: nobody reads shared memory of this process."""
        self._is_winding_up, self._is_clear = True, clear

    def farewell(self, reason: str, *, in_order: bool) -> list[AnyAction]:
        """What the other ranks are told when this process ends."""
        return [Tell(Farewell(reason, in_order))] if self._met else []

    # --- what the broker says ------------------------------------------------------------------------------------------

    def hear(self, message: LeadGroup | EndGroup | ToLeaderOfJobs, now: float) -> list[AnyAction]:
        """The broker says something about the group or its jobs."""
        self._now = self.jobs.now = now
        match message:
            case LeadGroup():
                return self._lead(message)
            case EndGroup():
                return self._end_group(message)
            case RunJob() if not self.number(message):
                return []
            case _:
                return self.jobs.hear(message, self._host.attachment)

    def number(self, message: InitializeStage | RunTask | ReleaseStage | RunJob) -> bool:
        """Note the number of what the broker sent to all ranks, and when a release came; False: it can't be taken."""
        if self._bodies.note(message):
            return True
        self.counters["unnumbered"] += 1
        return False

    def _lead(self, message: LeadGroup) -> list[AnyAction]:
        if message.epoch <= self._epoch:
            self.counters["stale_epoch"] += 1
            return []
        if self._epoch and self._others:
            return self._host.end(1, f"group {self._place.group} is in a later epoch; it is to be started anew")
        self._epoch, self._bodies.newest, self.formed = message.epoch, 0, False
        return [OpenLink(message.epoch, message.secret, message.members)] if self._others else []

    def _end_group(self, message: EndGroup) -> list[AnyAction]:
        if self._epoch and message.epoch != self._epoch:
            self.counters["stale_epoch"] += 1
            return []
        if self._is_leaving():
            return self._host.end(0, "stopped as asked for")
        return self._over(message.lost, f"group {self._place.group} is over: {message.reason}", tell=False)

    # --- what the others and the thread say ------------------------------------------------------------------------------

    def handle(self, event: GroupEvent) -> list[AnyAction]:
        """Apply one event; what is decided after it, `decide` says."""
        self._now = self.jobs.now = event.now
        match event:
            case OrderDone():
                return self._done(event.report)
            case LinkSaid():
                return self._linked(event)
            case Opened():
                if event.epoch != self._epoch:
                    return []
                self._store = event.store
                return self._say(GroupOpened(event.epoch, event.link, event.store))
            case RankExited():
                return self._rank_exited(event)
            case FilesFound():
                return self.jobs.found(event)
            case PartWritten():
                return self.jobs.written(event)
            case FrameEncoded():
                self.jobs.encoder_moved()
                return []
            case ResultMade():
                return self.jobs.made(event)
            case CheckpointWritten():
                return self.jobs.kept(event)
            case TakenIn():
                return []  # its thread reads shared memory itself

    def _done(self, report: OrderReport) -> list[AnyAction]:
        failure = self._underway.done(report)
        actions: list[AnyAction] = []
        if failure is not None and report.finished is None:
            actions.append(order_failed(report, failure))
        if isinstance(report.order, StartJob | StepJob) and report.output is None and not self._underway.has_failed:
            given_s, self._given_s = self._given_s, 0.0
            actions += self.jobs.stepped(report, given_s)
        return [*actions, *self._settle()]

    def _linked(self, said: LinkSaid) -> list[AnyAction]:
        rank, message = said.rank, said.message
        if rank not in self._others:
            self.counters["unknown_rank"] += 1
            return []
        match message:
            case RankHello():
                self._met.add(rank)
            case Have():
                self._bodies.has(rank, message)
            case Outcome():
                if self._underway.answered(rank, message):
                    return self._settle()
                self.counters["unexpected"] += message.number > self._number  # others are said again, in case of a loss
            case Farewell():
                return self._host.ask_to_stop(said.now)
            case Decision():
                self.counters["unexpected"] += 1
        return []

    def _rank_exited(self, event: RankExited) -> list[AnyAction]:
        if self._is_leaving():
            self._underway.without(event.rank)
            return self._settle()
        return self._over((event.rank,), f"rank {event.rank} of group {self._place.group} is gone: {event.reason}")

    # --- when all have answered --------------------------------------------------------------------------------------------

    def _settle(self) -> list[AnyAction]:
        return [action for pending in self._underway.settled(self._now) for action in self._answered(pending)]

    def _answered(self, pending: Pending) -> list[AnyAction]:
        failure, report = pending.failure, pending.report
        assert report is not None, "this rank hasn't answered"
        if pending.is_apart and self._others:
            self._is_broken = True
        match pending.order:
            case AtStage():
                return self._at_stage(pending, report, failure)
            case Form():
                return self._has_met(failure)
            case LoadJobs():
                return self._jobs_loaded(failure)
            case StartJob() | StepJob():
                if failure is not None:
                    return self._job_failed(pending, failure)
                return [] if report.output is None else self.jobs.succeeded(report.output)
            case KeepJob():
                if failure is None and report.snapshot is not None:
                    return self.jobs.keep(report.snapshot)
                self.jobs.not_kept()
                return []
            case CloseJob():
                return self.jobs.closed()
            case LeaveGroup():
                return self._host.end(0, "stopped as asked for")

    def _at_stage(self, pending: Pending, report: OrderReport, failure: Failure | None) -> list[AnyAction]:
        finished = report.finished
        assert finished is not None, "a stage's thread says nothing"
        work = finished.job.work
        if self.jobs.current is not None:
            self._given_s += self._now - pending.since
        if failure is None or isinstance(work, BuildStage):
            return list(self._host.reported(finished))
        if isinstance(work, InitializeStage) and len(pending.failures) <= len(self._others):
            self._actors[work.stage].clean_up(work)
        failed = replace(finished, reply=failed_with(work, failure), pack=None)
        return list(self._host.reported(failed))

    def _has_met(self, failure: Failure | None) -> list[AnyAction]:
        if failure is not None:
            return self._over((), f"group {self._place.group} can't meet: {failure.message}")
        self._is_broken = False
        return [] if self.formed else self._form_up()

    def _form_up(self) -> list[AnyAction]:
        """All ranks have met for the first time, with their weights."""
        self.formed = True
        said = self._say(GroupFormed(self._epoch))
        for actor in self._actors.values():
            actor.formed = True
            said += actor.announce(self._host.attachment)
        return said

    def _jobs_loaded(self, failure: Failure | None) -> list[AnyAction]:
        self._unloaded = False
        return [] if failure is None else self._host.end(*unloadable(failure))

    def _job_failed(self, pending: Pending, failure: Failure) -> list[AnyAction]:
        attempt = self.jobs.current
        assert attempt is not None, "a step of no job"
        attempt.failure = failure
        return [job_failed(attempt.run, pending, failure)]

    # --- what comes next ---------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[AnyAction]:
        """What the ranks do next, if there is something, and they are at nothing or it needn't wait for that."""
        self._now = self.jobs.now = now
        if self._underway.first is not None:
            return self._go_ahead()
        if not self._has_begun:
            return []
        choices: tuple[Callable[[], list[AnyAction]], ...]
        choices = self._leave, self._end_job, self._meet, self._keep_job, self._stream, self._go_on
        for choose in (self._load,) if not self.loaded else choices:
            if actions := choose():
                return actions
        return []

    def _load(self) -> list[AnyAction]:
        for stage, actor in self._actors.items():
            if actor.session_bytes is None:
                return self._order(AtStage(stage, actor.take()[0]))
        if self._unloaded:
            return self._order(LoadJobs())
        self.loaded = True
        return self.decide(self._now)

    def _leave(self) -> list[AnyAction]:
        if not self._is_winding_up or not self._is_clear or self.jobs.unsettled:
            return []
        if not self._others or not self.formed:
            return self._host.end(0, "stopped as asked for")
        return self._decide(LeaveGroup(), "leave")

    def _end_job(self) -> list[AnyAction]:
        attempt = self.jobs.current
        if attempt is None or not (attempt.ends or self._is_winding_up):
            return []
        if not attempt.ends and attempt.keeps and attempt.unkept:
            return [] if attempt.is_writing else self._order(KeepJob())
        return self._decide(CloseJob(), "end", sequence=attempt.run.sequence)

    def _meet(self) -> list[AnyAction]:
        if self.formed and not self._is_broken:
            return []
        if not self._others:
            return [*self._form_up(), *self.decide(self._now)] if self._epoch else []
        if not self._store or self._met != self._others:
            return []
        self._round += 1
        return self._decide(Form(self._epoch, self._round, self._store), "form", round=self._round)

    def _keep_job(self) -> list[AnyAction]:
        return self._order(KeepJob()) if self.jobs.is_checkpoint_due else []

    def _stream(self) -> list[AnyAction]:
        """The oldest of what waits, in the order of each actor."""
        stage = self._next_stage() if self.formed else None
        if stage is None:
            return []
        job, said = self._actors[stage].take()
        order = AtStage(stage, job)
        match job.work:
            case RunTask() as work:
                return [*self._decide(order, "run", sequence=work.sequence, applied=job.applied), *said]
            case InitializeStage() as work:
                return self._decide(order, "initialize", sequence=work.sequence)
            case ReleaseStage() as work:
                return self._decide(order, "release", session=work.session, stage=stage)
            case BuildStage():
                raise AssertionError("a stage is built once")

    def _next_stage(self) -> str | None:
        waiting = {stage: job for stage, actor in self._actors.items() if (job := actor.first) is not None}
        return self._bodies.oldest(waiting)

    def _go_ahead(self) -> list[AnyAction]:
        """The next step of the job, while other ranks are at the one before: if it would come next in any case."""
        attempt = self.jobs.current
        if attempt is None or attempt.ends or self._is_winding_up or self._is_broken:
            return []
        if not self._underway.lets_go_on or self.jobs.is_checkpoint_due or self._next_stage() is not None:
            return []
        return self._decide(StepJob(), "step", sequence=attempt.run.sequence)

    def _go_on(self) -> list[AnyAction]:
        attempt = self.jobs.current
        if not self.formed or self._is_winding_up:
            return []
        if attempt is not None:
            return self._decide(StepJob(), "step", sequence=attempt.run.sequence)
        attempt = next((each for each in self.jobs.ready if self._bodies.everywhere(each.run.sequence)), None)
        if attempt is None:
            return []
        share = self._bodies.is_shared(attempt.run.sequence)
        self.jobs.begin(attempt)
        self._given_s = 0.0
        order = StartJob(attempt.run, attempt.files, share)
        return self._decide(order, "start", sequence=attempt.run.sequence, share=share)

    def _decide(self, order: Order, act: Act, **more: Any) -> list[AnyAction]:
        """The same for all ranks."""
        wanted = [number_of(job) for actor in self._actors.values() for job in actor.waiting] + self.jobs.unbegun
        if act in ("initialize", "run", "start"):
            wanted.append(more["sequence"])
        below = self._bodies.forget(wanted)
        if not self._others:
            return self._order(order)
        self._number += 1
        decision = Decision(self._number, act, below=below, **more)
        self._patience.said(self._now)
        return [Tell(decision), *self._order(order, decision)]

    def _order(self, order: Order, decision: Decision | None = None) -> list[AnyAction]:
        self._underway.add(Pending(order, decision, self._now, {0} if decision is None else {0, *self._others}))
        return [Do(order)]

    # --- the end -------------------------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[AnyAction]:
        """Time has come: the ranks take too long, or something is to be said again."""
        self._now = self.jobs.now = now
        late = self._patience.late(now)
        if late is None:
            return [*map(Tell, self._patience.again(now)), *self.jobs.due()]
        return self._host.end(0, "stopped as asked for") if self._is_leaving() else self._over(*late)

    def _over(self, lost: Sequence[int], reason: str, *, tell: bool = True) -> list[AnyAction]:
        """The epoch is over."""
        reason = f"{reason}; the group is to be started anew"
        others = tuple(rank for rank in lost if rank in self._others)
        said = self._say(RanksLost(self._epoch, tuple(lost), reason)) if tell and self._epoch else []
        return [*said, *([KillRanks(others)] if others else []), *self._host.end(1, reason)]

    def _is_leaving(self) -> bool:
        return (pending := self._underway.first) is not None and isinstance(pending.order, LeaveGroup)

    def _say(self, message: WorkerMessage) -> list[AnyAction]:
        return [Send(self._host.attachment, message)] if self._host.attachment else []

    def check(self) -> None:
        """Assert what always holds."""
        self.jobs.check()
        self._underway.check()
        pending = self._underway.first
        at = pending.order if pending is not None else None
        for stage, actor in self._actors.items():
            expected = at.job if isinstance(at, AtStage) and at.stage == stage else None
            assert actor.running is expected, f"{stage}: the thread is at something else"
        assert not self.formed or self.loaded, "met without weights"
        assert not self._is_broken or self._others, "one can't be apart"
        assert pending is None or not pending.is_of_job or self.jobs.current is not None, "a step of no job"
