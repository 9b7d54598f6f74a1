"""One stage actor of a worker: the sessions it holds, the job it runs and the jobs that wait. Pure.

Jobs are run one at a time in order of receipt, over all sessions. A task that awaits what another stage here makes stands
apart until it is given that, and is taken for received then; if that never comes, it stands there until its session is
released. Every task that is taken gets exactly one answer, TaskDone or StageFailed, unless its session is released,
replaced by a newer epoch or lost with the attachment first: then it is dropped. A reserved control is bound when its task
is handed to the stage's thread, from the newest keys that have come for the session in its epoch (rule 15); what comes
later is for the chunks after it.

Where all ranks of a group compute the stage (`StageOffer.grouped`) it isn't the actor that hands jobs out: its first one
waits until the leader takes it (`take`), and is bound then. The states of a session here::

    initializing --> live --> releasing --> (gone)
         |            |        ^     |
         v            v        |     `--> unreleased (its release raised; another one may try again)
       (gone)       failed ----'
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from reelwire.binding import bind
from reelwire.controls import KeyState, merged
from reelwire.messages import (
    Artifact,
    Failure,
    FailureKind,
    InitializeStage,
    Phase,
    ReleaseStage,
    RunTask,
    SetStageKeys,
    StageFailed,
    StageOffer,
    StageReady,
    StageReleased,
    TaskStarted,
)

from .actions import Action, BuildStage, Job, Log, Run, Send
from .events import Reply

SEEN_MAX = 4096
"""Sessions whose newest epoch an actor remembers."""

Epoch = tuple[int, int]
Order = InitializeStage | RunTask | SetStageKeys | ReleaseStage
"""What a broker asks of an actor."""


@dataclass(slots=True)
class Held:
    """A session at an actor.

    Attributes:
        epoch: which attempt at it.
        state: see the module.
        last_index: the newest chunk that a task came for.
        failure: why the session can't go on here.
        keys: the newest register that came for it in this epoch.
        made: what was made of late, by chunk: the broker may send a task that awaits it before it knows that it is there.
    """

    epoch: Epoch
    state: Literal["initializing", "live", "failed", "releasing", "unreleased"] = "initializing"
    last_index: int = -1
    failure: Failure | None = None
    keys: KeyState = field(default_factory=KeyState)
    made: dict[int, Mapping[str, Artifact]] = field(default_factory=dict)


def said_of(step: Run | Send | None) -> list[Action]:
    """A step, and what the broker is told of it: that a task has begun. The thread has the job before that is put in words."""
    if not isinstance(step, Run):
        return [] if step is None else [step]
    job = step.job
    work = job.work
    if not isinstance(work, RunTask):
        return [step]
    started = TaskStarted(work.session, work.stage, work.epoch, work.stage_epoch, work.index, job.applied)
    return [step, Send(job.attachment, started)]


def with_inputs(task: RunTask, inputs: Mapping[str, Artifact], awaits: tuple[str, ...]) -> RunTask:
    """The task with other inputs: as `dataclasses.replace` makes it, in a fraction of the time."""
    return RunTask(
        task.session,
        task.pipeline,
        task.stage,
        task.epoch,
        task.stage_epoch,
        task.index,
        inputs,
        task.is_first,
        task.is_last,
        task.reservation,
        task.shared,
        awaits,
        task.sequence,
        task.broadcast,
    )


class Actor:
    """One owner of a stage.

    Attributes:
        offer: what the broker was told.
        session_bytes: what one session is expected to take; None until the weights are loaded.
        running: the job that the stage's thread has.
        waiting: jobs behind it, in order of receipt.
        ahead: tasks that await what another stage makes here, in order of receipt.
        held: sessions that have, or are to have, caches here.
        dropped: messages that changed nothing, counted by reason.
        settling: whether something of a lost attachment still runs or waits to be released.
        draining: no new session is taken.
        formed: whether the group that computes it has met; of no meaning where none does.
    """

    def __init__(self, offer: StageOffer) -> None:
        """An actor without weights and without a job."""
        self.offer = offer
        self.session_bytes: int | None = None
        self.running: Job | None = None
        self.waiting: deque[Job] = deque()
        self.ahead: list[Job] = []
        self.held: dict[str, Held] = {}
        self.dropped: Counter[str] = Counter()
        self.settling = False
        self.draining = False
        self.formed = not offer.grouped
        self._seen: dict[str, Epoch] = {}
        self._announced = False
        self._orphaned = False  # the running job is of a lost attachment; numbers can't tell, a new broker counts anew

    @property
    def occupied(self) -> bool:
        """Whether the broker waits for an answer, or a session lives here that it has yet to release."""
        serving = self.running is not None and self.running.attachment > 0 and not self._orphaned
        return serving or any(held.state != "unreleased" for held in self.held.values())

    @property
    def first(self) -> Job | None:
        """The job that comes next, when none is running."""
        return self.waiting[0] if self.waiting and self.running is None else None

    def build(self) -> list[Action]:
        """Have the weights loaded."""
        self.waiting.append(Job(0, BuildStage(self.offer.pipeline, self.offer.stage)))
        return self._next()

    def take(self) -> tuple[Job, list[Action]]:
        """Begin the first job, for the leader of the group; and what the broker is told of it."""
        assert self.offer.grouped and self.running is None, "the job is nobody's to take"  # noqa: PT018
        self.running = job = self._bound(self.waiting.popleft())
        return job, said_of(Run(self.offer.stage, job))[1:]

    def clean_up(self, work: InitializeStage) -> None:
        """Some rank of the group couldn't initialize a session, others could: release it there, before anything else."""
        self.waiting.appendleft(self._silent_release(work.session, _epoch(work)))

    def receive(self, message: Order, attachment: int) -> list[Action]:
        """Take, refuse or drop what the broker asks for."""
        epoch = _epoch(message)
        if epoch < self._seen.get(message.session, epoch):
            return self._drop("stale", message)
        match message:
            case InitializeStage():
                return self._initialize(message, attachment, epoch)
            case RunTask():
                return self._task(message, attachment, epoch)
            case SetStageKeys():
                return self._set_keys(message, epoch)
            case ReleaseStage():
                return self._release(message, attachment, epoch)

    def wants(self, job: Job) -> bool:
        """Whether what the running job makes is of use to anybody: told to the broker, for a session that is still here."""
        work = job.work
        if job.attachment == 0 or self._orphaned or isinstance(work, BuildStage):
            return False
        held = self.held.get(work.session)
        return held is not None and held.epoch == _epoch(work) and held.state in ("initializing", "live")

    def finished(self, job: Job, reply: Reply, attachment: int) -> list[Action]:
        """The stage's thread has done `job`: tell the broker if it still wants to know, and go on."""
        assert self.running is job, "a thread reported a job that it wasn't given"
        answered = job.attachment > 0 and not self._orphaned
        self.running, self._orphaned = None, False
        actions: list[Action] = [Send(attachment, reply)] if answered else []
        match job.work:
            case BuildStage():
                assert isinstance(reply, StageReady), "a worker ends when a build fails"
                self.session_bytes = reply.session_bytes
            case InitializeStage():
                actions += self._initialized(job.work, reply)
            case RunTask():
                actions += self._ran(job.work, reply)
            case ReleaseStage():
                self._released(job.work, reply, retried=answered)
        self.settling = self.settling and self._leftover()
        if run := self._begin():
            actions += [*said_of(run)[1:], run]  # all that is told leaves together, and then the thread is woken
        return [*actions, *self.announce(attachment)]

    def go_on(self, job: Job) -> Run | None:
        """Begin what waits behind a task that went well and that `wants` its end told: all else is as it was."""
        assert self.running is job, "a thread reported a job that it wasn't given"
        self.running = None
        return self._begin()

    def keep(self, task: RunTask, outputs: Mapping[str, Artifact]) -> None:
        """Keep what was made for as long as the broker may not know of it: until so many more are made as it may have sent."""
        held = self.held.get(task.session)
        if held is not None and held.epoch == _epoch(task):
            held.made[task.index] = outputs
            if len(held.made) > 1 + self.offer.mailbox:
                del held.made[next(iter(held.made))]

    def made(self, task: RunTask) -> Mapping[str, Artifact]:
        """What was made here lately for the chunk that another stage's task is for."""
        held = self.held.get(task.session)
        return held.made.get(task.index, {}) if held is not None and held.epoch == _epoch(task) else {}

    def forward(self, made_for: RunTask, outputs: Mapping[str, Artifact]) -> Run | Send | None:
        """Give what was made for a chunk to the task that awaits it here; with all its inputs it waits like any other.

        Returns:
            What comes of that now: a job that begins, the answer to a task whose session has failed here, or nothing.
        """
        for at, job in enumerate(self.ahead):
            task = job.work
            assert isinstance(task, RunTask), "something else than a task awaits inputs"
            if task.index == made_for.index and task.session == made_for.session and _epoch(task) == _epoch(made_for):
                inputs, awaits = dict(task.inputs), []
                for name in task.awaits:
                    if name in outputs:
                        inputs[name] = outputs[name]
                    else:
                        awaits.append(name)
                given = Job(job.attachment, with_inputs(task, inputs, tuple(awaits)))
                if awaits:
                    self.ahead[at] = given
                    return None
                del self.ahead[at]
                return self._enqueue(given)
        return None

    def announce(self, attachment: int) -> list[Action]:
        """Say once per attachment that the stage is ready: weights loaded, nothing left of an earlier attachment."""
        if attachment == 0 or self._announced or not self.formed or self.session_bytes is None or self._leftover():
            return []
        self._announced = True
        return [Send(attachment, StageReady(self.offer.pipeline, self.offer.stage, self.session_bytes))]

    def abandon(self) -> list[Action]:
        """The attachment is lost: drop what waits and release every session, without telling anybody."""
        self.waiting = deque(job for job in self.waiting if job.attachment == 0)
        self.ahead.clear()
        self._orphaned = self.running is not None
        self._announced = False
        self._seen.clear()
        on_the_way = [job.work for job in self._jobs()]
        leaving = {(work.session, _epoch(work)) for work in on_the_way if isinstance(work, ReleaseStage)}
        for session, held in self.held.items():
            held.state = "releasing"
            if (session, held.epoch) not in leaving:
                self.waiting.append(self._silent_release(session, held.epoch))
        self.settling = any(not isinstance(job.work, BuildStage) for job in self._jobs())
        return self._next()

    def check(self) -> None:
        """Assert what always holds."""
        assert self.running is not None or not self.waiting or self.offer.grouped, "a job waits for an idle thread"
        assert self.running is None or self.session_bytes is not None or isinstance(self.running.work, BuildStage)
        if self.running is not None and isinstance(self.running.work, RunTask):
            assert (self.running.applied is None) == (self.running.work.reservation is None), (
                "begun without its control"
            )
        assert all(job.applied is None for job in self.waiting), "a control is bound before its chunk begins"
        assert len(self._seen) <= SEEN_MAX + len(self.held)
        last: dict[str, int] = {}
        tasks = 0
        for job in self.waiting:
            if isinstance(job.work, RunTask):
                tasks += 1
                held = self.held.get(job.work.session)
                assert held is not None, "a task waits for a session that isn't here"
                assert held.epoch == _epoch(job.work), "a task of an older epoch waits"
                assert held.state in ("initializing", "live"), f"a task waits for a session that is {held.state}"
                assert last.get(job.work.session, -1) < job.work.index <= held.last_index, "tasks wait out of order"
                last[job.work.session] = job.work.index
        assert tasks + len(self.ahead) <= self._tasks_max(), "more tasks wait than may"
        for job in self.ahead:
            assert isinstance(job.work, RunTask), "something else than a task awaits inputs"
            assert job.work.awaits, "a task that has its inputs stands apart"
            held = self.held.get(job.work.session)
            assert held is not None, "a task awaits inputs for a session that isn't here"
            assert held.epoch == _epoch(job.work), "a task of an older epoch awaits inputs"
            assert held.state not in ("releasing", "unreleased"), "a task awaits inputs for a session that leaves"
        assert all(len(held.made) <= 1 + self.offer.mailbox for held in self.held.values()), "too much is kept"

    def _initialize(self, message: InitializeStage, attachment: int, epoch: Epoch) -> list[Action]:
        session = message.session
        if self._seen.get(session) == epoch:
            return self._drop("duplicate", message)
        if self.draining:
            return self._refuse(message, "initialize", None, "overload", "the worker was asked to stop", attachment)
        held = self.held.get(session)
        taken = sum(each.state != "unreleased" for each in self.held.values())
        if held is None and taken >= self.offer.slots:
            reason = f"all {self.offer.slots} slots are taken"
            return self._refuse(message, "initialize", None, "overload", reason, attachment)
        if held is not None:
            self._drop_waiting(session)
            if held.state != "releasing":
                self.waiting.append(self._silent_release(session, held.epoch))
        self._remember(session, epoch)
        self.held[session] = Held(epoch)
        self.waiting.append(Job(attachment, message))
        return self._next()

    def _task(self, message: RunTask, attachment: int, epoch: Epoch) -> list[Action]:
        held = self.held.get(message.session)
        if held is None or held.epoch != epoch:
            return self._refuse(message, "run", message.index, "stage", "the session isn't here", attachment)
        if message.index <= held.last_index:
            return self._drop("duplicate", message)
        if held.state in ("releasing", "unreleased"):
            return self._drop("late", message)
        held.last_index = message.index
        if held.failure is not None:
            return [_failed(message, held.failure, attachment)]
        if sum(isinstance(job.work, RunTask) for job in self.waiting) + len(self.ahead) >= self._tasks_max():
            return self._refuse(message, "run", message.index, "overload", "the mailbox is full", attachment)
        if message.awaits and self.offer.grouped:
            reason = f"{', '.join(message.awaits)}: the other ranks of the group aren't given it"
            return self._refuse(message, "run", message.index, "stage", reason, attachment)
        if message.awaits:
            self.ahead.append(Job(attachment, message))
            return []
        return said_of(self._enqueue(Job(attachment, message)))

    def _enqueue(self, job: Job) -> Run | Send | None:
        """Let a task wait that has its inputs."""
        assert isinstance(job.work, RunTask), "something else than a task has inputs"
        failure = self.held[job.work.session].failure
        if failure is not None:
            return _failed(job.work, failure, job.attachment)
        self.waiting.append(job)
        return self._begin()

    def _set_keys(self, message: SetStageKeys, epoch: Epoch) -> list[Action]:
        held = self.held.get(message.session)
        if held is None or held.epoch != epoch or held.state in ("releasing", "unreleased"):
            return self._drop("late", message)
        held.keys = merged(held.keys, message.keys)
        return []

    def _release(self, message: ReleaseStage, attachment: int, epoch: Epoch) -> list[Action]:
        held = self.held.get(message.session)
        self._remember(message.session, epoch)
        if held is None:
            return [Send(attachment, StageReleased(message.session, message.stage, *epoch))]
        if held.state == "releasing" and held.epoch == epoch and self._will_answer(message.session, epoch, attachment):
            return self._drop("duplicate", message)
        self._drop_waiting(message.session)
        held.state, held.epoch = "releasing", epoch
        self.waiting.append(Job(attachment, message))
        return self._next()

    def _initialized(self, work: InitializeStage, reply: Reply) -> list[Action]:
        held = self.held.get(work.session)
        if held is None or held.epoch != _epoch(work) or held.state != "initializing":
            return []
        if not isinstance(reply, StageFailed):
            held.state = "live"
            return []
        awaiting = [job for job in self.ahead if isinstance(job.work, RunTask) and job.work.session == work.session]
        self.ahead = [job for job in self.ahead if job not in awaiting]
        self.waiting += awaiting  # whatever comes for them, nobody is here to be given it
        actions = self._fail_waiting(work.session, reply.failure)
        del self.held[work.session]
        return actions

    def _ran(self, work: RunTask, reply: Reply) -> list[Action]:
        held = self.held.get(work.session)
        if not isinstance(reply, StageFailed) or held is None or held.epoch != _epoch(work) or held.state != "live":
            return []
        held.state, held.failure = "failed", reply.failure
        return self._fail_waiting(work.session, reply.failure)

    def _released(self, work: ReleaseStage, reply: Reply, *, retried: bool) -> None:
        held = self.held.get(work.session)
        if held is None or held.epoch != _epoch(work) or held.state != "releasing":
            return
        again = any(isinstance(each.work, ReleaseStage) and each.work.session == work.session for each in self.waiting)
        if again:
            return
        if isinstance(reply, StageFailed) and retried:
            held.state = "unreleased"
        else:
            del self.held[work.session]

    def _next(self) -> list[Action]:
        return said_of(self._begin())

    def _begin(self) -> Run | None:
        """Hand the next job out, if the thread has none."""
        if self.running is not None or not self.waiting or self.offer.grouped:
            return None
        self.running = job = self._bound(self.waiting.popleft())
        return Run(self.offer.stage, job)

    def _bound(self, job: Job) -> Job:
        """The job with the control that its chunk applies, if it begins now."""
        work = job.work
        if not isinstance(work, RunTask) or work.reservation is None:
            return job
        applied = bind(work.reservation, self.held[work.session].keys)
        inputs = {**work.inputs, work.reservation.artifact: applied.control}
        return Job(job.attachment, with_inputs(work, inputs, work.awaits), applied)

    def _drop_waiting(self, session: str) -> None:
        """Drop what waits for a session, but not a release that somebody waits for."""
        kept = [
            job
            for job in self.waiting
            if isinstance(job.work, BuildStage | ReleaseStage) or job.work.session != session
        ]
        self.waiting = deque(kept)
        self.ahead = [job for job in self.ahead if isinstance(job.work, RunTask) and job.work.session != session]

    def _fail_waiting(self, session: str, failure: Failure) -> list[Action]:
        mine = [job for job in self.waiting if isinstance(job.work, RunTask) and job.work.session == session]
        self.waiting = deque(job for job in self.waiting if job not in mine)
        return [_failed(job.work, failure, job.attachment) for job in mine if isinstance(job.work, RunTask)]

    def _will_answer(self, session: str, epoch: Epoch, attachment: int) -> bool:
        return any(
            isinstance(job.work, ReleaseStage)
            and (job.work.session, _epoch(job.work), job.attachment) == (session, epoch, attachment)
            for job in (self.waiting if self._orphaned else self._jobs())
        )

    def _jobs(self) -> list[Job]:
        return [*([self.running] if self.running else []), *self.waiting]

    def _leftover(self) -> bool:
        return self._orphaned or any(job.attachment == 0 for job in self._jobs())

    def _silent_release(self, session: str, epoch: Epoch) -> Job:
        return Job(0, ReleaseStage(session, self.offer.pipeline, self.offer.stage, *epoch))

    def _refuse(
        self,
        message: InitializeStage | RunTask,
        phase: Phase,
        index: int | None,
        kind: FailureKind,
        reason: str,
        attachment: int,
    ) -> list[Action]:
        stage = self.offer.stage
        failure = Failure(kind, f"{stage}: {reason}", stage=stage, index=index)
        reply = StageFailed(message.session, stage, message.epoch, message.stage_epoch, phase, index, failure)
        return [Send(attachment, reply)]

    def _drop(self, reason: str, message: Order) -> list[Action]:
        self.dropped[reason] += 1
        fields = {"reason": reason, "message": type(message).__name__, "session": message.session}
        return [Log("debug", "message_dropped", {**fields, "stage": self.offer.stage})]

    def _remember(self, session: str, epoch: Epoch) -> None:
        self._seen.pop(session, None)
        self._seen[session] = epoch
        while len(self._seen) > SEEN_MAX:
            oldest = next((name for name in self._seen if name not in self.held), None)
            if oldest is None:
                return
            del self._seen[oldest]

    def _tasks_max(self) -> int:
        # As many again as run and wait may have been sent ahead. And the broker may count a task as gone when it sends the
        # release that drops it, which is before it is gone here.
        return 2 * (1 + self.offer.mailbox) + self.offer.slots


def _epoch(message: Order) -> Epoch:
    return message.epoch, message.stage_epoch


def _failed(task: RunTask, failure: Failure, attachment: int) -> Send:
    reason = replace(failure, index=task.index)
    reply = StageFailed(task.session, task.stage, task.epoch, task.stage_epoch, "run", task.index, reason)
    return Send(attachment, reply)
