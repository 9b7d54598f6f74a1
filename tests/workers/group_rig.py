"""A core of one rank whose surroundings the test plays: broker, link, group thread and the stages' own threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reelwire import messages as m
from reelwire.group_messages import Decision, Have, Outcome, RankHello
from reelwire.job_parts import FILE_PART_BYTES, FileOffer
from reelwire.job_spec import JobSpec
from reelwire.messages import Member, Membership
from reelwire.tensors import Inline, Shared, TensorRef
from reelwire.workers import actions, events, group_events
from reelwire.workers.actions import BuildStage, Send, Stop
from reelwire.workers.checkpoints import Snapshot
from reelwire.workers.config import WorkerConfig
from reelwire.workers.core import WorkerCore
from reelwire.workers.group_events import (
    AtStage,
    CheckpointWritten,
    Do,
    OrderDone,
    OrderReport,
    Tell,
    WriteCheckpoint,
)
from reelwire.workers.rank import RankCore

from .group_orders import well_done

EPOCH = 7
KINDS = (JobSpec("edit", "A clip.", stages=("high", "low")),)
HELLO = RankHello(EPOCH, b"secret", 1)
NO = m.Failure("stage", "no")
BROKE = m.Failure("stage", "a collective broke")
SNAPSHOT = Snapshot(b"", ())


def offer(name: str, parts: int = 1) -> FileOffer:
    """A file of so many parts."""
    return FileOffer(name, f"/there/{name}", parts * FILE_PART_BYTES)


def part(file: str, index: int) -> m.FilePart:
    """A part of it."""
    return m.FilePart(file, index, TensorRef("uint8", (1,), Inline(b"x")))


def initialize(sequence: int, session: str = "s", stage: str = "draw", epoch: int = 1) -> m.InitializeStage:
    return m.InitializeStage(session, "toy", stage, epoch, 1, 9, {}, {}, m.Artifact(), sequence)


def task(sequence: int, index: int = 0, session: str = "s", *, shared: bool = False, **more: Any) -> m.RunTask:
    """One of the grouped stage; `shared`: its input stands in shared memory."""
    place = Shared("o", "s", 1) if shared else Inline(b"x")
    inputs = {} if "reservation" in more else {"control": m.Artifact({}, {"x": TensorRef("uint8", (1,), place)})}
    return m.RunTask(session, "toy", "draw", 1, 1, index, inputs, index == 0, False, sequence=sequence, **more)


def release(session: str = "s", stage: str = "draw") -> m.ReleaseStage:
    return m.ReleaseStage(session, "toy", stage, 1, 1)


def run_job(sequence: int, job: str = "j", attempt: int = 1, *files: FileOffer, **more: Any) -> m.RunJob:
    given: dict[str, Any] = {"kind": "edit", "checkpoint": None, "checkpoint_step": -1, "checkpoint_steps": 0, **more}
    return m.RunJob(job, attempt, parameters={}, media={"video": files}, sequence=sequence, **given)


class GroupRig:
    """Any rank."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.now = 100.0
        self.sent: list[Any] = []
        self.told: list[Any] = []
        self.logged: list[str] = []
        self.order: Any = None
        self.jobs: dict[str, actions.Job] = {}
        self.asked: list[Any] = []
        self.stopped: Stop | None = None
        self.attachment = 1

    def do(self, event: Any) -> list[Any]:
        """One event; whatever comes of it is kept."""
        done: list[Any] = self.core.handle(event)
        self.core.check()
        for action in done:
            match action:
                case Do():
                    assert self.order is None, "the group thread was given two orders"
                    self.order = action.order
                case Tell():
                    self.told.append(action.message)
                case Send():
                    self.sent.append(action.message)
                case actions.Run():
                    self.jobs[action.stage] = action.job
                case Stop():
                    self.stopped = action
                case actions.Log():
                    self.logged.append(action.event)
                case _:
                    self.asked.append(action)
        return done

    def start(self) -> None:
        """The process is up, and a broker welcomes it."""
        self.do(events.Started(self.now))
        self.welcome()

    def welcome(self) -> None:
        """A broker does."""
        self.do(events.Received(self.now, self.attachment, m.Welcome("w", "1.2.9", 1.0, 3, {})))

    def hear(self, *messages: Any) -> None:
        """The broker says something."""
        for message in messages:
            self.do(events.Received(self.now, self.attachment, message))

    def tick(self, after_s: float) -> None:
        """Time passes, while the broker is heard."""
        until = self.now + after_s
        while self.now < until and self.stopped is None:
            self.now = min(until, self.now + 1.0)
            self.hear(m.Heartbeat())
            self.do(events.Tick(self.now))

    def cut(self) -> None:
        """The broker is lost."""
        self.do(events.OutboxFull(self.now))
        self.attachment += 1

    def done(self, failure: m.Failure | None = None, *, is_broken: bool = False, **report: Any) -> None:
        """The group thread has done its order."""
        order, self.order = self.order, None
        if isinstance(order, AtStage):
            reply = well_done(order.job) if failure is None else self.failed(order.job, failure)
            finished = events.Finished(order.stage, order.job, reply, pieces=report.pop("pieces", ()))
            report["finished"] = finished
        self.do(OrderDone(self.now, OrderReport(order, failure, is_broken, **report)))

    @staticmethod
    def failed(job: actions.Job, failure: m.Failure) -> m.StageFailed:
        """As the group thread says it."""
        match job.work:
            case m.InitializeStage() as work:
                return m.StageFailed(work.session, work.stage, work.epoch, 1, "initialize", None, failure)
            case m.RunTask() as work:
                return m.StageFailed(work.session, work.stage, work.epoch, 1, "run", work.index, failure)
            case m.ReleaseStage() as work:
                return m.StageFailed(work.session, work.stage, work.epoch, 1, "release", None, failure)
            case BuildStage() as build:
                return m.StageFailed("", build.stage, 0, 0, "build", None, failure)

    def take(self, *kinds: type) -> list[Any]:
        """What the broker was told of these kinds since the last time."""
        found = [message for message in self.sent if isinstance(message, kinds or object)]
        self.sent.clear()
        return found

    def wanted(self, kind: type) -> list[Any]:
        """Actions of a kind since the last time."""
        found = [action for action in self.asked if isinstance(action, kind)]
        self.asked = [action for action in self.asked if not isinstance(action, kind)]
        return found


class LeadRig(GroupRig):
    """Rank 0 of so many."""

    def __init__(
        self,
        spec: Any,
        world: int = 2,
        kinds: Sequence[JobSpec] = KINDS,
        grouped: Sequence[str] = ("draw",),
        **more: Any,
    ) -> None:
        config = WorkerConfig(name="w", slots=2, group="g", world=world, jobs="toy", step_timeout_s=30.0, **more)
        place = Membership("g", 0, world)
        super().__init__(WorkerCore(config, spec, "1.2.3", place=place, kinds=kinds, grouped=grouped))
        self.world = world
        self.members = tuple(Member(rank, "here", rank + 1) for rank in range(world))
        self.answered = dict.fromkeys(range(1, world), 0)

    def load(self) -> None:
        """All weights are there."""
        while self.order is not None or self.jobs:
            if self.order is not None:
                self.done()
            for stage in list(self.jobs):
                self.stage_done(stage)

    def lead(self, epoch: int = EPOCH) -> None:
        """The broker has all ranks."""
        self.hear(m.LeadGroup(epoch, b"secret", self.members))

    def greet(self, *ranks: int) -> None:
        """Ranks have found the link, and have their weights."""
        for rank in ranks or range(1, self.world):
            self.link(rank, RankHello(EPOCH, b"secret", rank))

    def link(self, rank: int, message: Any) -> None:
        """A rank says something."""
        self.do(group_events.LinkSaid(self.now, rank, message))

    def formed(self) -> LeadRig:
        """With all ranks met, and nothing of that left to look at."""
        self.start()
        self.load()
        self.lead()
        if self.world > 1:
            self.do(group_events.Opened(self.now, EPOCH, "tcp://link", "host:1"))
            self.greet()
            self.done()
            self.answer()
        self.sent.clear()
        self.told.clear()
        self.asked.clear()
        return self

    def decided(self) -> Decision:
        """The newest."""
        return next(message for message in reversed(self.told) if isinstance(message, Decision))

    def answer(
        self, *ranks: int, failure: m.Failure | None = None, is_broken: bool = False, is_apart: bool = True
    ) -> None:
        """Other ranks have done what was decided, of two decisions the one that is due; or say again that they have."""
        for rank in ranks or range(1, self.world):
            self.answered[rank] = min(self.answered[rank] + 1, self.decided().number)
            self.link(rank, Outcome(self.answered[rank], failure, is_broken, is_apart))

    def have(self, sequence: int, *ranks: int, lacks: bool = False) -> None:
        """Other ranks have a body."""
        for rank in ranks or range(1, self.world):
            self.link(rank, Have(sequence, lacks))

    def settle(self, **report: Any) -> None:
        """All ranks have done what was decided."""
        self.done(**report)
        if self.world > 1:
            self.answer()

    def body(self, body: Any) -> None:
        """The broker sends it to all, and all have it."""
        self.hear(body)
        if self.world > 1:
            self.have(body.sequence)

    def body_of_job(self, sequence: int = 1, job: str = "j", **more: Any) -> None:
        """A job without files is everywhere."""
        self.hear(run_job(sequence, job, **more))
        self.do(group_events.FilesFound(self.now, sequence))
        if self.world > 1:
            self.have(sequence)

    def live(self, sequence: int = 1, session: str = "s") -> None:
        """A session is at the grouped stage."""
        self.body(initialize(sequence, session))
        self.settle()
        self.sent.clear()

    def running(self, sequence: int = 1, *, kept_every: int = 0, steps: int = 9, keeps: bool = True) -> None:
        """A job stands before its first step; the next one is under way."""
        self.body_of_job(sequence, checkpoint_steps=kept_every)
        self.settle(stage="high", step=0, steps=steps, keeps=keeps)

    def step(self, step: int, steps: int = 9, *, stage: str = "high", keeps: bool = True, took_s: float = 2.0) -> None:
        """A step is done by all."""
        self.settle(stage=stage, step=step, steps=steps, keeps=keeps, took_s=took_s)

    def keep(self, kept: FileOffer) -> None:
        """The state of the job is taken, and written at once."""
        self.done(snapshot=SNAPSHOT)
        self.written(kept)

    def written(self, kept: FileOffer | None) -> None:
        """What was taken is in a file; None: there was no room."""
        (write,) = self.wanted(WriteCheckpoint)
        failure = None if kept is not None else NO
        self.do(CheckpointWritten(self.now, write.job, write.attempt, write.step, kept, failure))

    def stage_done(self, stage: str) -> None:
        """A stage's own thread has done its job."""
        job = self.jobs.pop(stage)
        self.do(events.Reported(self.now, events.Finished(stage, job, well_done(job))))


class FollowRig(GroupRig):
    """Rank 1 of so many."""

    def __init__(self, spec: Any, world: int = 3, **more: Any) -> None:
        config = WorkerConfig(name="w", group="g", rank=1, world=world, jobs="toy", step_timeout_s=30.0, **more)
        place = Membership("g", 1, world)
        super().__init__(RankCore(config, spec, "1.2.3", place=place, kinds=KINDS, grouped=("draw",)))
        self.members = tuple(Member(rank, "here", rank + 1) for rank in range(world))
        self.number = 0

    def load(self) -> None:
        """All weights are there."""
        while self.order is not None:
            self.done()

    def join(self, epoch: int = EPOCH) -> None:
        """The broker says where the leader is."""
        self.hear(m.JoinGroup(epoch, b"secret", self.members, "tcp://link", "host:1"))

    def greeted(self) -> FollowRig:
        """With weights, and known to its leader."""
        self.start()
        self.load()
        self.join()
        self.told.clear()
        self.sent.clear()
        self.asked.clear()
        return self

    def decide(self, act: Any, **more: Any) -> None:
        """The leader decides."""
        self.number += 1
        self.link(Decision(self.number, act, **more))

    def link(self, message: Any) -> None:
        """The leader says something."""
        self.do(group_events.LinkSaid(self.now, 0, message))
