"""What a worker does, decided without a socket, a thread or a clock: `handle(event)` gives the actions.

Two things are kept here: the attachment to the broker, and (one `Actor` each) the stages. The attachment::

    idle --Started--> greeting --Welcome--> attached
                       ^   |                   |
                       |   `-- too long: Stop  |
                       `--- silence, Rejected, Goodbye: all sessions are dropped and released

What a stage makes is given to the tasks of other stages here that await it, before the broker is told; the broker hears of
the result first, and then of what began with it.

Asked to stop, an attached worker says `Draining` and goes on until the sessions that it has are released and what it
lent of its shared memory is back.

While greeting nothing but hellos is sent, each over a new connection, which leaves whatever waited on the old one
behind: so nothing can be said under a number that is no longer ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Literal, assert_never

from reelwire import versions, wire
from reelwire.messages import (
    Draining,
    Goodbye,
    Heartbeat,
    InitializeStage,
    MemoryOffer,
    ProbeMemory,
    Rejected,
    ReleaseStage,
    ReturnSegments,
    RunTask,
    SegmentUse,
    SetStageKeys,
    StageFailed,
    StageOffer,
    TaskDone,
    Welcome,
    WorkerHello,
)
from reelwire.spec import StreamSpec
from reelwire.tensors import Shared

from .actions import (
    AbandonMemory,
    Action,
    AnswerProbe,
    BuildStage,
    Connect,
    Log,
    Ready,
    Run,
    Send,
    SetLimits,
    Stop,
    TakeBack,
)
from .actor import Actor, Order, said_of
from .config import WorkerConfig
from .events import (
    Event,
    Finished,
    Malformed,
    OutboxFull,
    Received,
    Reported,
    ShutdownRequested,
    Started,
    Tick,
    failure_line,
)

HELLO_RETRY_S = 3.0
"""Silence after a hello before the next one."""
HELLO_BACKOFF_MAX_S = 32.0
"""Longest pause before a hello of a worker that was rejected again and again (two processes of one name, say)."""
HELLO_STEADY_S = 30.0
"""An attachment that held so long ends the backoff."""

State = Literal["idle", "greeting", "attached", "stopped"]


class WorkerCore:
    """One worker process.

    Args:
        config: its settings.
        spec: the pipeline that it serves.
        version: version of reelwire.
        packages: versions of what its results depend on.
        memory: shared memory that it can write; None when it has none.

    Attributes:
        actors: stage name to actor, in the order of the spec's initialization.
        limits: what is accepted from the broker, as the hello says.
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
    ) -> None:
        """Start with no connection and no weights."""
        names = [name for name in spec.initialize_order if not config.stages or name in config.stages]
        self.config = config
        self.actors = {
            name: Actor(StageOffer(spec.name, name, config.slots, config.cache_bytes_max, config.mailbox))
            for name in names
        }
        self.counters: Counter[str] = Counter()
        self.limits = wire.Limits(frame_bytes_max=config.frame_bytes_max)
        self._hello = WorkerHello(
            version,
            config.name,
            config.device,
            (spec,),
            tuple(actor.offer for actor in self.actors.values()),
            dict(packages or {}),
            asdict(self.limits),
            memory,
            forwards=True,
        )
        self._state: State = "idle"
        self._attachment = 0
        self._building = False
        self._ready = False
        self._name = config.name
        self._heartbeat_s, self._missed = 1.0, 3
        self._hello_at = self._give_up_at = self._beat_at = self._silent_at = self._attached_at = 0.0
        self._rejections = 0
        self._stuck_at: float | None = None
        self._drain_until: float | None = None
        self._read_by_stages = {artifact for stage in spec.stages for artifact in stage.consumes}
        makers = {artifact: stage.name for stage in spec.stages for artifact in stage.produces}
        # Which of the stages here make something for which others here.
        self._makers = {
            stage.name: [makers[each] for each in stage.consumes if makers.get(each) in names and stage.name in names]
            for stage in spec.stages
        }
        self._followers = {name: [other for other in names if name in self._makers[other]] for name in names}
        # Pieces of shared memory that were sent, by segment and generation; whether a stage may read them.
        self._lent: dict[tuple[str, int], bool] = {}

    @property
    def wake_at(self) -> float | None:
        """When time itself is the next event."""
        if self._state in ("idle", "stopped"):
            return None
        times = [self._hello_at, self._give_up_at] if self._state == "greeting" else [self._beat_at, self._silent_at]
        return min(time for time in (*times, self._stuck_at, self._drain_until) if time is not None)

    def handle(self, event: Event) -> list[Action]:
        """Apply one event. Never raises for what a peer sent or a stage did."""
        if self._state == "stopped":
            return []
        match event:
            case Started():
                assert self._state == "idle", "a worker starts once"
                self._give_up_at = event.now + self.config.connect_timeout_s
                return self._greet(event.now)
            case Received():
                return self._received(event)
            case Malformed():
                return self._malformed(event)
            case Reported():
                return list(self.reported(event.report))
            case OutboxFull():
                return self._lose(event.now, "the broker takes nothing")
            case Tick():
                return self._tick(event)
            case ShutdownRequested():
                return self._shut_down(event.now)
            case _:
                assert_never(event)

    def reported(self, report: Finished) -> Iterator[Action]:
        """What `handle` gives for a report, piece by piece, and to be taken whole before the next event.

        Whoever waits comes first: the stages that go on if one here awaits the result, otherwise the broker.
        """
        actor, job, reply = self.actors[report.stage], report.job, report.reply
        if not isinstance(reply, TaskDone) or self._state == "stopped" or not actor.wants(job):
            yield from self._reported(report)
            return
        task, followers = job.work, self._followers[report.stage]
        assert isinstance(task, RunTask), "something else than a task has outputs"
        passed = [step for name in followers if (step := self.actors[name].forward(task, reply.outputs))]
        yield from [step for step in passed if isinstance(step, Run)]
        packed = None if report.pack is None else report.pack()
        own = None
        if isinstance(packed, StageFailed):
            yield from self._reported(replace(report, reply=packed))
        else:
            own = actor.go_on(job)
            yield Send(self._attachment, reply, packed)
            if followers:
                actor.keep(task, reply.outputs)
            if report.pieces:
                self._lend(report.pieces, reply)
        for step in [own, *passed] if own else passed:
            yield from said_of(step)[isinstance(step, Run) :]
        if own:  # its thread is the one that has reported, and waits for nothing
            yield own

    def check(self) -> None:
        """Assert what always holds."""
        for actor in self.actors.values():
            actor.check()
        assert (self._state == "attached") == (self._attachment > 0), "attached and numbered go together"
        if self._state == "greeting":
            assert not self._lent, "shared memory is lent, and nobody is there"
            for actor in self.actors.values():
                assert all(held.state == "releasing" for held in actor.held.values()), "a session outlived its broker"
        assert (self.wake_at is None) == (self._state in ("idle", "stopped"))

    def status(self) -> dict[str, object]:
        """What is there, as plain data for the log."""
        return {
            "state": self._state,
            "attachment": self._attachment,
            "sessions": {name: sorted(actor.held) for name, actor in self.actors.items()},
            "dropped": dict(self.counters + sum((actor.dropped for actor in self.actors.values()), Counter())),
        }

    # --- the attachment ----------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> list[Action]:
        """Say hello over a new connection."""
        self._state, self._attachment = "greeting", 0
        self._hello_at = now + HELLO_RETRY_S
        return [Connect(), Send(0, self._hello)]

    def _received(self, event: Received) -> list[Action]:
        message, attachment, now = event.message, event.attachment, event.now
        if isinstance(message, Welcome):
            return self._welcomed(message, attachment, now)
        if isinstance(message, Rejected) and attachment in (0, self._attachment):
            return self._rejected(message, now)
        if self._state != "attached" or attachment != self._attachment:
            self.counters["foreign_attachment"] += 1
            dropped = {"reason": "foreign_attachment", "message": type(message).__name__}
            return [Log("debug", "message_dropped", dropped)]
        self._silent_at = max(self._silent_at, now + self._missed * self._heartbeat_s)
        match message:
            case Heartbeat():
                self._silent_at = max(self._silent_at, now + message.busy_for_s)
                return []
            case Goodbye():
                reason = f"the broker left: {message.reason}" if message.reason else "the broker left"
                return self._lose(now, reason)
            case InitializeStage() | RunTask() | SetStageKeys() | ReleaseStage():
                return self._work(message)
            case ProbeMemory(owner=owner):
                return [AnswerProbe(self._attachment, owner)]
            case ReturnSegments(segments=segments):
                return [*self._take_back(segments), *self._drained()]
            case Rejected():
                return []
            case _:
                assert_never(message)

    def _welcomed(self, message: Welcome, attachment: int, now: float) -> list[Action]:
        if self._state != "greeting" and attachment <= self._attachment:
            self.counters["foreign_attachment"] += 1
            return []
        ours = self._hello.version
        if not versions.fit(message.version, ours):
            return self._stop(3, f"the broker has version {message.version}, this worker has {ours}")
        if attachment < 1 or message.heartbeat_s <= 0 or message.missed < 1:
            self.counters["malformed"] += 1
            return [Log("warning", "message_dropped", {"reason": "malformed", "message": "Welcome"})]
        if self._drain_until is not None:  # whom it waited for is gone with the attachment before
            return self._stop(0, "stopped as asked for")
        actions: list[Action] = self._abandon(now) if self._state == "attached" else []
        self._state, self._attachment, self._name = "attached", attachment, message.name
        self._heartbeat_s, self._missed = message.heartbeat_s, message.missed
        self._attached_at = now
        self._silent_at = now + self._missed * self._heartbeat_s
        actions.append(SetLimits(wire.Limits.of(message.limits)))
        actions.append(Log("info", "attached", {"name": message.name, "broker_version": message.version}))
        actions += self._beat(now)
        if not self._building:
            # After the first heartbeat has said how long it may take: an import can hold the interpreter for seconds.
            self._building = True
            for actor in self.actors.values():
                actions += actor.build()
        for actor in self.actors.values():
            actions += actor.announce(attachment)
        return [*actions, *self._check_ready()]

    def _rejected(self, message: Rejected, now: float) -> list[Action]:
        match message.code:
            case "version":
                return self._stop(3, message.message)
            case "conflict":
                return self._stop(2, message.message)
            case "unknown_peer" | "malformed" if self._state == "greeting":
                return []  # said about something from before the hello
            case "limit" if self._state == "greeting":
                self._hello_at = now + self._backoff(now)
                return [Log("warning", "rejected", {"code": message.code, "reason": message.message})]
            case _:
                return self._lose(now, f"the broker rejected this worker: {message.message}", rejected=True)

    def _malformed(self, event: Malformed) -> list[Action]:
        if event.code == "version":
            return self._stop(3, event.reason)
        self.counters["malformed"] += 1
        return [Log("warning", "message_dropped", {"reason": "malformed", "detail": event.reason})]

    def _lose(self, now: float, reason: str, *, rejected: bool = False) -> list[Action]:
        """The attachment is over: give up all that hung on it, and say hello again."""
        if self._state != "attached":
            return []
        if self._drain_until is not None:
            return self._stop(0, "stopped while the broker was away")
        actions: list[Action] = [Log("warning", "attachment_lost", {"reason": reason})]
        actions += self._abandon(now)
        if not self.config.reconnect:
            return [*actions, *self._stop(3, reason)]
        self._give_up_at = now + self.config.connect_timeout_s
        hello = self._greet(now)
        pause = self._backoff(now) if rejected else 0.0
        if not pause:
            return [*actions, *hello]
        self._hello_at = now + pause
        self._give_up_at += pause
        return actions

    def _backoff(self, now: float) -> float:
        """Pause before the next hello: none the first time, then doubling from one second."""
        if self._attached_at and now - self._attached_at >= HELLO_STEADY_S:
            self._rejections = 0
        self._rejections += 1
        return 0.0 if self._rejections == 1 else min(2.0 ** (self._rejections - 2), HELLO_BACKOFF_MAX_S)

    def _abandon(self, now: float) -> list[Action]:
        self._lent.clear()
        actions: list[Action] = [AbandonMemory()]
        actions += [action for actor in self.actors.values() for action in actor.abandon()]
        if any(actor.settling for actor in self.actors.values()):
            self._stuck_at = now + self.config.stuck_s
        return actions

    def _tick(self, event: Tick) -> list[Action]:
        now = event.now
        if self._drain_until is not None and now >= self._drain_until:
            return self._overdue()
        if self._stuck_at is not None and now >= self._stuck_at:
            stuck = _names([name for name, actor in self.actors.items() if actor.settling])
            return self._leave(1, f"{stuck}: still at work {self.config.stuck_s:g} s after the broker gave it up")
        if self._state == "greeting":
            if now >= self._give_up_at:
                reason = f"no broker answers at {self.config.broker} for {self.config.connect_timeout_s:g} s"
                return self._stop(3, reason)
            return self._greet(now) if now >= self._hello_at else []
        if self._state == "attached" and now >= self._silent_at and event.drained:
            silence = self._missed * self._heartbeat_s
            return self._lose(now, f"nothing was heard from the broker for {silence:g} s")
        if self._state == "attached" and now >= self._beat_at:
            return self._beat(now)
        return []

    def _beat(self, now: float) -> list[Action]:
        self._beat_at = now + self._heartbeat_s
        busy = any(actor.session_bytes is None for actor in self.actors.values())
        return [Send(self._attachment, Heartbeat(self.config.busy_for_s if busy else 0.0))]

    # --- the stages --------------------------------------------------------------------------------------------------

    def _work(self, message: Order) -> list[Action]:
        actor = self.actors.get(message.stage)
        if actor is None or message.pipeline != actor.offer.pipeline:
            self.counters["unknown_stage"] += 1
            fields = {"pipeline": message.pipeline, "stage": message.stage, "session": message.session}
            return [Log("warning", "message_dropped", {"reason": "unknown_stage", **fields})]
        actions = actor.receive(message, self._attachment)
        if isinstance(message, RunTask) and message.awaits:
            for maker in self._makers[message.stage]:  # it may have been made while the task was on its way
                if made := self.actors[maker].made(message):
                    actions += said_of(actor.forward(message, made))
        return [*actions, *self._drained()]

    def _reported(self, report: Finished) -> list[Action]:
        """What comes of a report that is of no use to anybody, or of something else than a task that went well."""
        if self._state == "stopped":
            return []
        actor, reply = self.actors[report.stage], report.reply
        actions: list[Action] = []
        if isinstance(reply, StageFailed):
            actions.append(failure_line(report, reply))
            if isinstance(report.job.work, BuildStage):
                code = 2 if reply.failure.kind == "request" else 1
                failure = reply.failure
                what = f"{failure.field}: {failure.message}" if failure.field else failure.message
                return [*actions, *self._leave(code, f"{report.stage} can't be built: {what}")]
        if isinstance(reply, TaskDone):
            # The broker waits for the end of the task, and for nothing else of it.
            reply = replace(reply, outputs={}, facts={})
        actions += actor.finished(report.job, reply, self._attachment)
        if report.pieces:
            actions.append(TakeBack(report.pieces))
        if not any(each.settling for each in self.actors.values()):
            self._stuck_at = None
        return [*actions, *(self._drained() or self._check_ready())]

    def _lend(self, pieces: Sequence[SegmentUse], done: TaskDone) -> None:
        """Note what a result stands in, and for whom."""
        for_clients = {
            (tensor.place.segment, tensor.place.generation)
            for name, artifact in done.outputs.items()
            for tensor in artifact.tensors.values()
            if name not in self._read_by_stages and isinstance(tensor.place, Shared)
        }
        for piece in pieces:
            key = (piece.segment, piece.generation)
            self._lent[key] = key not in for_clients

    def _take_back(self, segments: Sequence[SegmentUse]) -> list[Action]:
        """Take what was sent and nothing else: a stage may be writing to the rest."""
        ours = tuple(use for use in segments if (use.segment, use.generation) in self._lent)
        for use in ours:
            del self._lent[use.segment, use.generation]
        if len(ours) < len(segments):
            self.counters["unknown_segment"] += len(segments) - len(ours)
        return [TakeBack(ours)] if ours else []

    def _check_ready(self) -> list[Action]:
        built = all(actor.session_bytes is not None for actor in self.actors.values())
        if self._ready or not built or self._state != "attached":
            return []
        self._ready = True
        return [Ready(self._name), Log("info", "ready", {"stages": _names(list(self.actors))})]

    def _occupied(self) -> str:
        return _names([name for name, actor in self.actors.items() if actor.occupied])

    def _overdue(self) -> list[Action]:
        """The drain has taken as long as it may. Only a client that doesn't take its last chunks does no harm.

        It has copied them, all but surely: a client does that when they arrive, and the broker hears of it when the
        application asks for the next one, which may be never.
        """
        within = f"within {self.config.drain_s:g} s"
        if occupied := self._occupied():
            return self._leave(1, f"{occupied}: sessions didn't end {within}")
        reason = f"what was lent of the shared memory didn't come back {within}"
        if any(self._lent.values()):
            return self._leave(1, reason)
        kept = Log("warning", "clients_hold_memory", {"pieces": len(self._lent), "reason": reason})
        return [kept, *self._leave(0, reason)]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _shut_down(self, now: float) -> list[Action]:
        if self._drain_until is not None:
            return self._leave(1, "stopped at once, as asked for twice")
        for actor in self.actors.values():
            actor.draining = True
        if self._state != "attached":
            return self._leave(0, "stopped as asked for")
        self._drain_until = now + self.config.drain_s
        draining = Log("info", "draining", {"limit_s": self.config.drain_s})
        return self._drained() or [Send(self._attachment, Draining()), draining]

    def _drained(self) -> list[Action]:
        """Leave, if that was asked for, nobody lives here any more, and nobody reads what was made here."""
        if self._drain_until is None or self._occupied() or self._lent:
            return []
        return self._leave(0, "stopped as asked for")

    def _leave(self, code: int, reason: str) -> list[Action]:
        goodbye: list[Action] = [Send(self._attachment, Goodbye(reason))] if self._state == "attached" else []
        return [*goodbye, *self._stop(code, reason)]

    def _stop(self, code: int, reason: str) -> list[Action]:
        self._state, self._attachment = "stopped", 0
        return [
            Log("info" if code == 0 else "error", "stopped", {"reason": reason, "exit_code": code}),
            Stop(code, reason),
        ]


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)
