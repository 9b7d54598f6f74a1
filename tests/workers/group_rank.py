"""One rank of a worker group, for `group_world`: its core, its loop, and a group thread that is a model.

What runs there has collectives: an order that has one ends on all ranks together, or fails on one and breaks on those that
wait for it. A rank that leaves may break what the others have yet to come out of. The steps of some jobs have none: such
ranks run apart, as far as their cores let them.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from reelwire import messages as m
from reelwire.group_messages import Decision, RankHello
from reelwire.job_parts import FILE_PART_BYTES, FileOffer
from reelwire.job_spec import JobSpec
from reelwire.messages import Membership
from reelwire.pipeline.job import JobOutput
from reelwire.workers import actions, events, group_events
from reelwire.workers.config import WorkerConfig
from reelwire.workers.core import WorkerCore
from reelwire.workers.group_events import AtStage, CloseJob, Form, KeepJob, LeaveGroup, LoadJobs, StartJob, StepJob
from reelwire.workers.rank import RankCore

from .group_orders import entry_of, well_done

if TYPE_CHECKING:
    from .group_world import GroupWorld

VERSION = "1.2.3"
KIND = JobSpec("edit", "A clip.", stages=("high", "low"))
STEP_TIMEOUT_S = 60.0
NO_JOB = m.Failure("stage", "there is no job to go on with")
BROKE = m.Failure("stage", "a collective broke")


def trail_of(job: str, done: int, trail: int) -> int:
    """What one step makes of the state of a job."""
    return zlib.crc32(f"{job} {done} {trail}".encode())


def expected(job: str, steps: int) -> int:
    """The result of a job that nothing disturbed."""
    trail = 0
    for done in range(steps):
        trail = trail_of(job, done, trail)
    return trail


@dataclass
class Doing:
    """A job on one rank."""

    run: m.RunJob
    done: int
    trail: int


@dataclass
class Meet:
    """One collective."""

    entered: set[int] = field(default_factory=set)
    is_broken: bool = False
    fails_everywhere: bool = False


class Thread:
    """The group thread of a rank."""

    def __init__(self) -> None:
        self.order: Any = None
        self.is_stuck = False
        self.met = ""  # the collective that it waits in
        self.sessions: set[str] = set()
        self.job: Doing | None = None
        self.round = 0  # of its process group; 0: none
        self.count = 0  # collectives of that
        self.log: list[tuple[Any, ...]] = []  # what it was given that all ranks do
        self.done = 0  # of that, how much it has done
        self.unkept = 0  # steps since the job's state was kept
        self.keeps = False  # whether it can be


class Rank:
    """A process, and what is on its way to it."""

    def __init__(self, world: GroupWorld, number: int) -> None:
        self.world, self.number = world, number
        self.pid = world.next_pid()
        world.processes[self.pid] = self
        self.others: dict[int, Rank] = {}
        self.inbox: deque[tuple[int, Any]] = deque()
        self.link: deque[tuple[int, Any]] = deque()
        self.happened: deque[Any] = deque()
        self.to_write: deque[group_events.WriteCheckpoint] = deque()
        self.gone: deque[int] = deque()
        self.thread = Thread()
        self.stages: dict[str, actions.Job] = {}
        self.made: dict[str, tuple[str, int, str]] = {}
        self.is_cut = self.is_over = self.was_ready = False
        self.code: int | None = None
        self.greeted = number == 0
        size = world.size
        config = WorkerConfig(
            name=f"w{number}", slots=2, connect_timeout_s=1e6, group="g", rank=number, world=size, jobs="toy",
            step_timeout_s=STEP_TIMEOUT_S,
        )  # fmt: skip
        place = Membership("g", number, size, pid=self.pid)
        self.core: Any
        if number == 0:
            self.core = WorkerCore(config, world.spec, VERSION, place=place, kinds=(KIND,), grouped=("draw",))
        else:
            self.core = RankCore(config, world.spec, VERSION, place=place, kinds=(KIND,), grouped=("draw",))

    def handle(self, event: Any) -> None:
        """Its loop."""
        if self.is_over:
            return
        done = self.core.handle(event)
        self.core.check()
        for at, action in enumerate(done):
            assert not isinstance(action, actions.Stop) or at == len(done) - 1, "something comes after the end"
            self.perform(action)

    def perform(self, action: Any) -> None:
        """What its core asks."""
        world = self.world
        match action:
            case actions.Connect():
                world.to_broker[self.number] = deque()
                self.inbox.clear()
                self.is_cut = False
            case actions.Send():
                world.note_word(action.message)
                if not self.is_cut:
                    world.to_broker[self.number].append((action.attachment, action.message))
            case actions.Run():
                assert action.stage not in self.stages, "a thread was given two jobs"
                assert action.stage != "draw" or isinstance(action.job.work, actions.BuildStage), "not the leader's"
                self.stages[action.stage] = action.job
            case actions.Log(event="job_failed"):
                world.note_failed(action.fields)
            case actions.Ready():
                self.was_ready = True
            case actions.Stop():
                world.exits(self, action.exit_code)
            case group_events.Do():
                self.begin(action.order)
            case group_events.Tell():
                self.tell(action.message)
            case group_events.OpenLink():
                self.meet(action.members)
                self.happened.append(group_events.Opened(world.now, action.epoch, "link", "store"))
            case group_events.JoinLink():
                self.meet(action.members)
            case group_events.KillRanks():
                for number in action.ranks:
                    if number in self.others:
                        world.kill(self.others[number])
            case group_events.TakeIn():
                lost = m.Failure("worker_lost", "gone") if world.faulty(0.02) else None
                self.happened.append(group_events.TakenIn(world.now, action.body, lost))
            case group_events.FindFiles():
                self.find(action.run)
            case group_events.WritePart():
                parts = action.part.index + 1
                path = f"/got/{action.offer.file}" if parts == action.offer.parts else ""
                bad = m.Failure("overload", "the disk is full") if world.faulty(0.02) else None
                self.happened.append(
                    group_events.PartWritten(world.now, action.offer.file, parts, "" if bad else path, bad)
                )
            case group_events.SendParts():
                self.send_parts(action)
            case group_events.MakeResult():
                self.make_result(action)
            case group_events.WriteCheckpoint():
                self.write_checkpoint(action)
            case group_events.DropFiles():
                self.made = {
                    file: kept
                    for file, kept in self.made.items()
                    if kept[:2] != (action.job, action.attempt)
                    or (action.role is not None and kept[2] != action.role)
                    or file == action.besides
                }
            case _:
                pass

    # --- the link ------------------------------------------------------------------------------------------------------

    def tell(self, message: Any) -> None:
        """The link: strangers aren't heard."""
        world = self.world
        if isinstance(message, RankHello):
            assert (message.secret, message.rank, message.epoch) == (b"secret", self.number, world.epoch_of(self))
            self.greeted = True
        others = [self.others[0]] if self.number else [self.others[each] for each in range(1, world.size)]
        for each in others:
            if not each.is_over and world.carries(self, each, message):
                world.put(self, each, message)

    def meet(self, members: tuple[m.Member, ...]) -> None:
        """The others are known, and watched."""
        for member in members:
            self.others[member.rank] = other = self.world.processes[member.pid]
            if other.is_over:
                self.gone.append(member.rank)

    # --- files ---------------------------------------------------------------------------------------------------------

    def find(self, run: m.RunJob) -> None:
        """Some see a file, others don't."""
        offers = [*run.media["video"], *([run.checkpoint] if run.checkpoint else [])]
        found = {each.file: f"/seen/{each.file}" for each in offers if self.world.chance.random() < 0.6}
        missing = tuple(each for each in offers if each.file not in found)
        self.happened.append(group_events.FilesFound(self.world.now, run.sequence, found, missing))

    def send_parts(self, want: group_events.SendParts) -> None:
        """Of a file that is here."""
        if want.file not in self.made:
            self.perform(actions.Send(want.attachment, m.FileGone(want.file, "dropped")))
            return
        for index in range(want.first, want.parts):
            part = m.FilePart(want.file, index, self.world.a_tensor)
            self.perform(actions.Send(want.attachment, part))

    def make_result(self, make: group_events.MakeResult) -> None:
        """Beside the group thread."""
        world = self.world
        if world.faulty(0.02):
            no = m.Failure("overload", "the disk is full")
            self.happened.append(group_events.ResultMade(world.now, make.job, make.attempt, None, failure=no))
            return
        offer = self.write(
            f"out-{make.job}-{make.attempt}", (make.job, make.attempt, "result"), make.output.facts["trail"]
        )
        facts = dict(make.output.facts)
        self.happened.append(group_events.ResultMade(world.now, make.job, make.attempt, offer, facts))

    def write_checkpoint(self, write: group_events.WriteCheckpoint) -> None:
        """Beside the group thread, some time later."""
        assert not [each for each in self.to_write if each.job == write.job], "two checkpoints of a job at once"
        self.to_write.append(write)

    def checkpoint_written(self) -> None:
        """The oldest of them is in a file, or the disk is full."""
        write, world = self.to_write.popleft(), self.world
        key, taken = (write.job, write.attempt, "checkpoint"), cast("tuple[int, int]", write.snapshot)
        assert taken[0] == write.step, "the state of another step"
        offer = failure = None
        if world.faulty(0.02):
            failure = m.Failure("overload", "the disk is full")
        else:
            offer = self.write(f"{write.job}-{write.attempt}-at-{write.step}", key, taken[1], write.step)
        self.handle(group_events.CheckpointWritten(world.now, write.job, write.attempt, write.step, offer, failure))

    def write(self, file: str, key: tuple[str, int, str], trail: int, done: int = 0) -> FileOffer:
        """A file."""
        name = f"{file}-{self.pid}"
        self.made[name] = key
        self.world.contents[name] = done, trail
        return FileOffer(name, f"/made/{name}", 3 * FILE_PART_BYTES)

    # --- the group thread ------------------------------------------------------------------------------------------------

    def begin(self, order: Any) -> None:
        """It is given an order, and has none."""
        thread, world = self.thread, self.world
        assert thread.order is None, "the thread was given two orders"
        thread.order, thread.met = order, ""
        entry = entry_of(order)
        if entry:
            thread.log.append(("unable",) if self.number and entry == ("leave",) and not self.is_leaving else entry)
            world.compare(self)
        if self.number == 0:
            world.watch(order)
        if isinstance(order, KeepJob):
            world.check_all_answered(self)
        if (entry or isinstance(order, KeepJob)) and world.faulty(0.001):  # to load may take as long as it likes
            thread.is_stuck = True

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to."""
        decision = self.core._decision
        return isinstance(decision, Decision) and decision.act == "leave"

    def key(self) -> str:
        """Which collective its order has; empty: none."""
        order, thread = self.thread.order, self.thread
        if self.world.size == 1:
            return ""
        if isinstance(order, Form):
            return f"form {order.epoch} {order.round}"
        streams = isinstance(order, AtStage) and isinstance(order.job.work, m.InitializeStage | m.RunTask)
        meets = thread.job is not None and thread.job.run.parameters["meets"] and isinstance(order, StepJob)
        if not streams and not meets and not isinstance(order, StartJob):
            return ""
        assert thread.round, "a collective without a process group"
        return f"{self.world.epoch_of(self)} {thread.round} {thread.count}"

    def can_go_on(self) -> bool:
        """Whether its thread waits for nobody."""
        thread = self.thread
        if thread.order is None or thread.is_stuck or self.is_over:
            return False
        if not thread.met:
            return True
        meet = self.world.meets[thread.met]
        return meet.is_broken or len(meet.entered) == self.world.size or self.is_left_alone()

    def is_left_alone(self) -> bool:
        """Whether a peer that it waits for won't come."""
        thread = self.thread
        entered = self.world.meets[thread.met].entered
        others = [each for each in self.others.values() if each.number not in entered]
        if isinstance(thread.order, Form):
            return any(each.is_over for each in others)
        return any(self.has_left(each) for each in others)

    def has_left(self, other: Rank) -> bool:
        """Whether another rank is in the process group of this one no more."""
        return other.is_over or other.thread.round != self.thread.round

    def go_on(self) -> None:
        """Its thread comes a bit further."""
        world, thread = self.world, self.thread
        key = thread.met or self.key()
        if not key:
            self.finish(NO_JOB if self.is_at_nothing else world.failing(self, None))
            return
        meet = world.meets.setdefault(key, Meet(fails_everywhere=world.faulty(0.01)))
        if not thread.met:
            if world.failing(self, meet):
                meet.is_broken = True
                self.finish(m.Failure("stage", f"rank {self.number} raised"))
                return
            thread.met = key
            meet.entered.add(self.number)
        elif len(meet.entered) == world.size and self.is_thrown_out():
            self.finish(BROKE, is_broken=True)
        elif len(meet.entered) == world.size:
            order = self.thread.order
            if meet.fails_everywhere and isinstance(order, AtStage) and isinstance(order.job.work, m.InitializeStage):
                self.finish(m.Failure("request", "all refuse it"), is_apart=False)
                return
            late = meet.fails_everywhere or world.failing(self, None)
            self.finish(m.Failure("stage", "all raise") if late else None)
        else:
            meet.is_broken = True
            self.finish(BROKE, is_broken=True)

    @property
    def is_at_nothing(self) -> bool:
        """Whether it is to go on with a job that has failed here: what it was told before that was known."""
        return isinstance(self.thread.order, StepJob) and self.thread.job is None

    def is_thrown_out(self) -> bool:
        """Whether another rank, which came out of the collective and then failed, takes this one along."""
        if isinstance(self.thread.order, Form) or not any(self.has_left(each) for each in self.others.values()):
            return False
        return self.world.chance.random() < 0.5

    def finish(self, failure: Any, *, is_broken: bool = False, is_apart: bool = True) -> None:
        """It reports."""
        thread = self.thread
        order, had_collective = thread.order, bool(thread.met)
        if isinstance(failure, bool):
            failure = m.Failure("stage", f"rank {self.number} raised") if failure else None
        thread.order, thread.met = None, ""
        thread.count += had_collective
        thread.done += bool(entry_of(order))
        more: dict[str, Any] = {}
        if failure is None:
            failure, more = self.do(order)
        elif isinstance(order, AtStage):
            self.stage_failed(order, failure, more)
        self.count_unkept(order, failure, more)
        if failure is not None:
            if isinstance(order, StartJob | StepJob) and not is_broken and failure is not NO_JOB:
                self.world.note_cause(self, failure)
            is_apart = is_apart and not isinstance(order, KeepJob)
            if is_apart:
                thread.round = 0
            if isinstance(order, StartJob | StepJob | CloseJob):
                thread.job = None  # closed, whatever its end raises
        report = group_events.OrderReport(order, failure, is_broken, took_s=0.5, apart=is_apart, **more)
        self.handle(group_events.OrderDone(self.world.now, report))

    def count_unkept(self, order: Any, failure: Any, more: dict[str, Any]) -> None:
        """How many steps would be lost, and whether that must be so."""
        thread = self.thread
        if isinstance(order, StartJob | KeepJob):
            thread.unkept = 0
        elif isinstance(order, StepJob):
            thread.unkept += 1
        if isinstance(order, StartJob | StepJob | KeepJob):
            thread.keeps = failure is None and more.get("keeps", thread.keeps)

    def stage_failed(self, order: AtStage, failure: m.Failure, more: dict[str, Any]) -> None:
        """As a stage's thread says it."""
        reply = self.world.toy.failed(order.job, failure.kind, failure.message)
        more["finished"] = events.Finished(order.stage, order.job, reply)
        if isinstance(order.job.work, m.InitializeStage | m.ReleaseStage):
            self.thread.sessions.discard(order.job.work.session)  # a release raises when all is dropped

    def do(self, order: Any) -> tuple[m.Failure | None, dict[str, Any]]:
        """What an order does when nothing goes wrong."""
        thread = self.thread
        match order:
            case Form():
                thread.round, thread.count = order.round, 0
            case AtStage():
                return None, {"finished": self.at_stage(order)}
            case StartJob(run=run):
                assert thread.job is None, "two jobs"
                files = {each.file for each in (*run.media["video"], *([run.checkpoint] if run.checkpoint else []))}
                assert set(order.files) == files or (self.number and order.share), "a file is nowhere"
                kept = self.world.contents[run.checkpoint.file] if run.checkpoint else (0, 0)
                thread.job = Doing(run, *kept)
                return None, self.where()
            case StepJob():
                job = thread.job
                assert job is not None, "a step of no job"
                if job.run.parameters["fails"] and job.done + 1 == job.run.parameters["steps"]:
                    return m.Failure("request", "it can't be done", field="seed"), {}
                job.trail = trail_of(job.run.job, job.done, job.trail)
                job.done += 1
                return None, self.where()
            case KeepJob():
                job = thread.job
                assert job is not None and self.number == 0  # noqa: PT018
                return None, {"snapshot": (job.done, job.trail)}
            case CloseJob():
                thread.job = None
            case LeaveGroup():
                thread.round = 0
            case LoadJobs():
                pass
        return None, {}

    def where(self) -> dict[str, Any]:
        """Where the job stands."""
        job = self.thread.job
        assert job is not None
        given: Any = job.run.parameters
        steps, switch = given["steps"], given["switch"]
        if job.done == steps:
            self.thread.job = None
            frames = np.zeros((1, 2, 2, 3), np.uint8)
            return {"output": JobOutput(frames, facts={"trail": job.trail})}
        keeps = zlib.crc32(f"{job.run.job}{job.done}".encode()) % 4 > 0
        if job.done < switch:
            return {"stage": "high", "step": job.done, "steps": switch, "keeps": keeps}
        return {"stage": "low", "step": job.done - switch, "steps": steps - switch, "keeps": keeps}

    def at_stage(self, order: AtStage) -> events.Finished:
        """A stage that all ranks compute."""
        sessions, job = self.thread.sessions, order.job
        match job.work:
            case m.InitializeStage() as work:
                assert work.session not in sessions, "initialized twice"
                sessions.add(work.session)
            case m.RunTask() as work:
                assert work.session in sessions, "a session that isn't here"
                applied = self.world.applied.setdefault((work.session, work.index), job.applied)
                assert applied == job.applied, "another control on another rank"
                assert set(work.inputs) == {"control"}, "the control is missing"
            case m.ReleaseStage() as work:
                sessions.discard(work.session)
            case _:
                pass
        return events.Finished(order.stage, job, well_done(job))

    def stage_done(self, stage: str) -> None:
        """A stage's own thread, at the leader."""
        job = self.stages.pop(stage)
        failed = self.world.faulty(0.01) and not isinstance(job.work, actions.BuildStage)
        reply = self.world.toy.failed(job) if failed else well_done(job)
        self.handle(events.Reported(self.world.now, events.Finished(stage, job, reply)))
