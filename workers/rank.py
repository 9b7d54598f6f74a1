"""A rank of a worker group that follows: it keeps what the broker sends, and does what the leader decides. Pure.

It is a worker to the broker, which it greets and is lost by like any other, but it offers nothing: what it says of what it
did, it says to its leader, over the link between the ranks. So a broker may come and go while the group works.

The leader doesn't decide before it was greeted, and it is greeted when all weights are here. It decides one thing after the
other, and waits for what came of it; only the next step of a job may come while this rank is at the one before, and is kept
until that is done. Both are answered, also where the first has failed and the second can't be done for that.

Whatever is said over the link may be lost with a connection. So this rank says again, now and then, what the leader hasn't
shown to have heard: its hello until the first decision, each body that it keeps until it is asked for or dropped, its
farewell until all leave. A decision that comes again is answered again if it was answered. One that was lost comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from reelwire.group_messages import Decision, Farewell, Have, Outcome, RankHello, ToLeader
from reelwire.job_spec import JobSpec
from reelwire.messages import (
    EndGroup,
    Failure,
    InitializeStage,
    JoinGroup,
    Membership,
    MemoryOffer,
    ProbeMemory,
    RanksLost,
    ReleaseStage,
    RunJob,
    RunTask,
    ToWorker,
    WorkerHello,
)
from reelwire.spec import StreamSpec

from .actions import AnswerProbe, BuildStage, Job, Log, Send
from .attachment import Attachment
from .bodies import Bodies, Body, with_control
from .config import WorkerConfig
from .events import Malformed, OutboxFull, Received, Reported, ShutdownRequested, Started, Tick
from .group_events import (
    AnyAction,
    AnyEvent,
    AtStage,
    CheckpointWritten,
    CloseJob,
    Do,
    FilesFound,
    Form,
    FrameEncoded,
    JoinLink,
    KillRanks,
    LeaveGroup,
    LinkSaid,
    LoadJobs,
    Opened,
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
from .lockstep import AGAIN_S, LEAVE_S, failure_of, order_failed, unloadable

MARGIN_S = 5.0
"""How much longer than the leader a rank waits for its own thread: the leader knows who is to blame.

A step has twice the time, as the others may have begun with it when they had the whole of theirs for the one before.
"""


FAREWELL = Farewell("asked to stop", in_order=True)
"""What the leader is asked for by a rank that was asked to stop."""


class RankCore(Attachment):
    """One worker process that follows.

    Args:
        config: its settings.
        spec: the pipeline that its group serves.
        version: version of reelwire.
        packages: versions of what its results depend on.
        memory: shared memory that it can write; None when it has none.
        place: its place in its group.
        kinds: the kinds of jobs that its group does.
        grouped: the stages that all ranks of its group compute together, in the order in which they are built.

    Attributes:
        counters: what was dropped or went wrong, by reason.
        wake_at: when the next Tick is due, in monotonic seconds; None before the start and after the stop.
    """

    def __init__(
        self,
        config: WorkerConfig,
        spec: StreamSpec,
        version: str,
        packages: Mapping[str, str] | None = None,
        memory: MemoryOffer | None = None,
        *,
        place: Membership,
        kinds: Sequence[JobSpec] = (),
        grouped: Sequence[str] = (),
    ) -> None:
        """Start with no connection, no epoch and no weights."""
        super().__init__(config, version)
        assert place.rank > 0, "rank 0 leads"
        self._spec, self._packages, self._memory, self._place = spec, dict(packages or {}), memory, place
        self._work = (*grouped, *(kind.name for kind in kinds))
        builds = [AtStage(stage, Job(0, BuildStage(spec.name, stage))) for stage in grouped]
        self._loads: deque[Order] = deque([*builds, LoadJobs()] if kinds else builds)
        self._loaded = False
        self._join: JoinGroup | None = None
        self._greeted = False
        self._epoch = self._number = 0
        self._bodies = Bodies()
        self._order: Order | None = None
        self._decision: Decision | None = None
        self._ahead: Decision | None = None  # the step behind it
        self._failure: Failure | None = None  # of a decision that can't be done here
        self._order_due_at: float | None = None
        self._has_left = False
        self._answers: deque[Outcome] = deque(maxlen=2)  # the leader waits for no more than these
        self._now = self._again_at = 0.0

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Apply one event. Never raises for what a peer sent or a stage did."""
        if self._state == "stopped":
            return []
        self._now = event.now
        match event:
            case OrderDone():
                return self._done(event.report, event.now)
            case LinkSaid():
                return self._linked(event)
            case RankExited():
                if self._is_leaving() and event.rank:
                    return []  # as it should
                return self._over(
                    (event.rank,), f"rank {event.rank} of group {self._place.group} is gone: {event.reason}"
                )
            case TakenIn():
                return self._say_have(self._bodies.taken_in(event))
            case FilesFound():
                return self._say_have(self._bodies.found(event))
            case Opened() | PartWritten() | FrameEncoded() | ResultMade() | CheckpointWritten() | Reported():
                raise AssertionError("only a leader hears of this")
            case Started() | Received() | Malformed() | OutboxFull() | Tick() | ShutdownRequested():
                return self._handle_attachment(event)

    def check(self) -> None:
        """Assert what always holds."""
        assert (self._state == "attached") == (self._attachment > 0), "attached and numbered go together"
        assert (self.wake_at is None) == (self._state in ("idle", "stopped"))
        assert self._decision is None or self._order is not None, "a decision that nobody carries out"
        assert self._ahead is None or _goes_ahead(self._ahead, self._decision), "a decision that waits for nothing"
        assert not self._greeted or self._loaded, "greeted without weights"
        assert (self._order_due_at is None) == (self._decision is None and not self._has_left), (
            "only decisions have limits"
        )
        assert self._failure is None or isinstance(self._order, LeaveGroup), "a failure that is told nobody"

    def status(self) -> dict[str, object]:
        """What is there, as plain data for the log."""
        return {
            "state": self._state,
            "attachment": self._attachment,
            "epoch": self._epoch,
            "decision": self._number,
            "bodies": len(self._bodies),
            "dropped": dict(self.counters),
        }

    # --- the attachment ----------------------------------------------------------------------------------------------

    def _hello(self) -> WorkerHello:
        return WorkerHello(
            self._version,
            self.config.name,
            self.config.device,
            (self._spec,),
            (),
            self._packages,
            asdict(self.limits),
            self._memory,
            group=replace(self._place, epoch=self._epoch, sequence=self._bodies.newest),
        )

    def _begin(self) -> list[AnyAction]:
        return self._load()

    def _joined(self) -> list[AnyAction]:
        return self._check_ready()

    def _heard(self, message: ToWorker, now: float) -> list[AnyAction]:  # noqa: ARG002
        match message:
            case InitializeStage() | RunTask() | RunJob():
                return self._take(message)
            case JoinGroup():
                return self._join_group(message)
            case EndGroup():
                if self._epoch and message.epoch != self._epoch:
                    self.counters["stale_epoch"] += 1
                    return []
                return self._over(message.lost, f"group {self._place.group} is over: {message.reason}", tell=False)
            case ProbeMemory(owner=owner):
                return [AnswerProbe(self._attachment, owner)]
            case _:
                return self._drop("unexpected", message)

    def _abandon(self, now: float) -> list[AnyAction]:  # noqa: ARG002
        return []  # the group lives on, and whatever it needs is here

    def _is_loading(self) -> bool:
        return not self._loaded

    def _check_ready(self) -> list[AnyAction]:
        return self._is_ready(", ".join(self._work)) if self._loaded else []

    def _drain(self) -> list[AnyAction]:
        return self._tell(FAREWELL) if self._greeted else []

    def _drained(self) -> list[AnyAction]:
        """Leave when the leader says so; where there is none yet, nobody misses this rank."""
        return [] if self._greeted else self._leave(0, "stopped as asked for")

    def _overdue(self) -> list[AnyAction]:
        return self._leave(1, f"group {self._place.group} didn't let this rank go within {self.config.drain_s:g} s")

    def _waits_for(self) -> str:
        """Its group, which works without a broker: the leader gives up for all, and a leader that is gone is noticed."""
        return f"group {self._place.group}" if self._number else ""

    def _due_at(self) -> float | None:
        again_at = self._again_at if self._unheard() else None
        return min((time for time in (self._order_due_at, again_at) if time is not None), default=None)

    def _due(self, now: float) -> list[AnyAction]:
        if self._order_due_at is None or now < self._order_due_at:
            return self._tell(*self._unheard())
        if self._is_leaving():
            return self._leave(0, "stopped as asked for")
        act = self._decision.act if self._decision is not None else ""
        rank, within = self._place.rank, f"within {self._limit_s(act):g} s"
        return self._over(
            (rank,), f"rank {rank} of group {self._place.group} didn't do what was decided ({act}) {within}"
        )

    # --- the group -----------------------------------------------------------------------------------------------------

    def _load(self) -> list[AnyAction]:
        if self._loads:
            return self._do(self._loads.popleft())
        self._loaded = True
        return [*self._greet_leader(), *self._check_ready()]

    def _join_group(self, message: JoinGroup) -> list[AnyAction]:
        if message.epoch <= self._epoch:
            return self._drop("stale_epoch", message)
        if self._epoch:
            return self._over((), f"group {self._place.group} is in a later epoch", tell=False)
        self._epoch, self._join = message.epoch, message
        link = JoinLink(message.epoch, message.members, message.link)
        return [link, *self._greet_leader()]

    def _greet_leader(self) -> list[AnyAction]:
        if self._join is None or not self._loaded or self._greeted:
            return []
        self._greeted = True
        return self._tell(*self._unheard())

    def _unheard(self) -> list[ToLeader]:
        """What the leader may not have heard, as far as it has shown."""
        if self._join is None or not self._greeted or self._has_left:
            return []
        hello = [] if self._number else [RankHello(self._epoch, self._join.secret, self._place.rank)]
        asks_to_stop = self._drain_until is not None and not self._is_leaving()
        return [*hello, *self._bodies.all_here(), *([FAREWELL] if asks_to_stop else [])]

    def _tell(self, *messages: ToLeader) -> list[AnyAction]:
        """Say what is said again until the leader shows that it has heard it."""
        if self._again_at <= self._now:
            self._again_at = self._now + AGAIN_S
        return [Tell(message) for message in messages]

    def _take(self, body: Body) -> list[AnyAction]:
        actions = self._bodies.take(body)
        if actions is None:
            return self._drop("duplicate", body)
        return [*actions, *self._say_have(self._bodies.have(body.sequence))]

    def _say_have(self, have: Have | None) -> list[AnyAction]:
        return self._tell(have) if have is not None and self._greeted else []

    def _linked(self, said: LinkSaid) -> list[AnyAction]:
        message = said.message
        match message:
            case Decision():
                return self._decided(message, said.now)
            case Farewell():
                reason = f"rank 0 of group {self._place.group} has left: {message.reason}"
                return self._leave(0, reason) if message.in_order else self._over((), reason, tell=False)
            case _:
                return self._drop("unexpected", message)

    # --- decisions -----------------------------------------------------------------------------------------------------

    def _decided(self, decision: Decision, now: float) -> list[AnyAction]:
        if decision.number <= self._number:
            return [Tell(answer) for answer in self._answers if answer.number == decision.number]
        if decision.number > self._number + 1:
            return self._drop("gap", decision)  # what was lost comes again, and then this one
        is_free = self._decision is None or (self._ahead is None and _goes_ahead(decision, self._decision))
        if not is_free or not self._greeted:
            reason = f"decision {decision.number} of rank 0 came after {self._number}, which isn't done or is another"
            return self._over((), f"group {self._place.group} is out of step: {reason}")
        self._number = decision.number
        if self._decision is not None:
            self._ahead = decision
            return []
        return self._carry_out(decision, now)

    def _carry_out(self, decision: Decision, now: float) -> list[AnyAction]:
        self._decision = decision
        self._order_due_at = now + self._limit_s(decision.act) + MARGIN_S
        order = self._order_of(decision)
        self._bodies.drop(decision.below)
        if isinstance(order, Failure):
            self._failure = order
            return self._do(LeaveGroup())  # which frees the ranks that wait for this one
        return self._do(order)

    def _limit_s(self, act: str) -> float:
        return self.config.step_timeout_s * (2 if act == "step" else 1)

    def _order_of(self, decision: Decision) -> Order | Failure:
        """What this rank's thread is to do, or why it can't."""
        match decision.act:
            case "form":
                assert self._join is not None, "greeted, and nobody said where"
                return Form(self._epoch, decision.round, self._join.store)
            case "initialize" | "run" | "start":
                return self._order_about(decision)
            case "release":
                release = ReleaseStage(decision.session, self._spec.name, decision.stage, 0, 0)
                return AtStage(decision.stage, Job(0, release))
            case "step":
                return StepJob()
            case "end":
                return CloseJob()
            case "leave":
                return LeaveGroup()

    def _order_about(self, decision: Decision) -> Order | Failure:
        kept = self._bodies.pop(decision.sequence)
        if kept is None:
            return self._unable(f"it has no body {decision.sequence}, which is to be done now")
        if kept.failure is not None:
            return kept.failure
        match decision.act, kept.body:
            case "start", RunJob() as run:
                return StartJob(run, kept.files, decision.share)
            case "initialize", InitializeStage() as work:
                return AtStage(work.stage, Job(0, work))
            case "run", RunTask() as task:
                if task.reservation is None:
                    return AtStage(task.stage, Job(0, task))
                if decision.applied is None:
                    return self._unable(f"chunk {task.index} has no control")
                bound = with_control(task, task.reservation.artifact, decision.applied.control)
                return AtStage(task.stage, Job(0, bound, decision.applied))
            case _:
                return self._unable(f"body {decision.sequence} is nothing to {decision.act}")

    def _unable(self, reason: str) -> Failure:
        return Failure("stage", f"rank {self._place.rank} of group {self._place.group} can't: {reason}")

    def _do(self, order: Order) -> list[AnyAction]:
        assert self._order is None, "the thread has an order already"
        self._order = order
        return [Do(order)]

    def _done(self, report: OrderReport, now: float) -> list[AnyAction]:
        assert report.order == self._order, "another order was done"
        self._order = None
        decision, self._decision, self._order_due_at = self._decision, None, None
        failure, self._failure = self._failure or failure_of(report), None
        said: list[AnyAction] = [] if failure is None else [order_failed(report, failure)]
        if decision is None:
            return [*said, *self._load_done(report, failure)]
        self._answers.append(Outcome(decision.number, failure, report.broken, report.apart))
        said.append(Tell(self._answers[-1]))
        if decision.act == "leave":  # and end when the leader has: so the broker hears it of the leader first
            self._has_left, self._order_due_at = True, now + 2 * LEAVE_S
        ahead, self._ahead = self._ahead, None
        return said if ahead is None else [*said, *self._carry_out(ahead, now)]

    def _load_done(self, report: OrderReport, failure: Failure | None) -> list[AnyAction]:
        if failure is None:
            return self._load()
        if isinstance(report.order, AtStage):
            what = f"{failure.field}: {failure.message}" if failure.field else failure.message
            code = 2 if failure.kind == "request" else 1
            return self._leave(code, f"{report.order.stage} can't be built: {what}")
        return self._leave(*unloadable(failure))

    # --- the end -------------------------------------------------------------------------------------------------------

    def _over(self, lost: Sequence[int], reason: str, *, tell: bool = True) -> list[AnyAction]:
        """The epoch is over: leave, to be started anew, unless that was wanted anyway."""
        if self._drain_until is not None or self._is_leaving():
            return self._leave(0, "stopped as asked for")
        others = tuple(rank for rank in lost if rank != self._place.rank)
        said: list[AnyAction] = []
        if tell and self._attachment and self._epoch:
            said.append(Send(self._attachment, RanksLost(self._epoch, tuple(lost), reason)))
        if others:
            said.append(KillRanks(others))
        return [*said, *self._leave(1, f"{reason}; the group is to be started anew")]

    def _is_leaving(self) -> bool:
        return self._has_left or (self._decision is not None and self._decision.act == "leave")

    def _drop(self, reason: str, message: object) -> list[AnyAction]:
        self.counters[reason] += 1
        return [Log("debug", "message_dropped", {"reason": reason, "message": type(message).__name__})]


def _goes_ahead(decision: Decision, before: Decision | None) -> bool:
    """Whether a decision may come while this rank is at the one before."""
    return before is not None and decision.act == "step" and before.act in ("start", "step")
