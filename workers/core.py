"""What a worker does with its stages, decided without a socket, a thread or a clock: `handle(event)` gives the actions.

Kept are the attachment to the broker (`attachment.Attachment`), the stages, one `Actor` each, and on a worker that leads a
group or does jobs a `Leader`, which says when the work of all ranks begins.

What a stage makes is given to the tasks of other stages here that await it, before the broker is told; the broker hears of
the result first, and then of what began with it.

Asked to stop, an attached worker says `Draining` and goes on until the sessions that it has are released and what it
lent of its shared memory is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from reelwire.job_spec import JobSpec
from reelwire.messages import (
    CheckpointKept,
    EndGroup,
    FileGone,
    FilePart,
    ForgetJob,
    InitializeStage,
    LeadGroup,
    Membership,
    MemoryOffer,
    ProbeMemory,
    ReleaseStage,
    ReturnSegments,
    RunJob,
    RunTask,
    SegmentUse,
    SetStageKeys,
    StageFailed,
    StageOffer,
    StopJob,
    TaskDone,
    ToWorker,
    WantFile,
    WorkerHello,
)
from reelwire.spec import StreamSpec
from reelwire.tensors import Shared

from .actions import AnswerProbe, BuildStage, Log, Run, Send, TakeBack
from .actor import Actor, Order, said_of
from .attachment import Attachment
from .config import WorkerConfig
from .events import (
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
from .group_events import AnyAction, AnyEvent, Tell
from .leader import Leader


class WorkerCore(Attachment):
    """One worker process.

    Args:
        config: its settings.
        spec: the pipeline that it serves.
        version: version of reelwire.
        packages: versions of what its results depend on.
        memory: shared memory that it can write; None when it has none.
        place: its place in a group; None: it is none's, or a group of one that nobody named.
        kinds: the kinds of jobs that it does.
        grouped: the stages that all ranks of its group compute together.

    Attributes:
        actors: stage name to actor, in the order of the spec's initialization.
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
        place: Membership | None = None,
        kinds: Sequence[JobSpec] = (),
        grouped: Sequence[str] = (),
    ) -> None:
        """Start with no connection and no weights."""
        super().__init__(config, version)
        names = [name for name in spec.initialize_order if not config.stages or name in config.stages]
        self.actors = {
            name: Actor(
                StageOffer(spec.name, name, config.slots, config.cache_bytes_max, config.mailbox, name in grouped)
            )
            for name in names
        }
        self._spec, self._packages, self._memory = spec, dict(packages or {}), memory
        self._stuck_at: float | None = None
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
        self._kinds = tuple(kinds)
        self._leader: Leader | None = None
        together = {name: actor for name, actor in self.actors.items() if actor.offer.grouped}
        if place is not None or kinds or together:
            place = place or Membership(config.name, 0, 1)
            self._leader = Leader(place, config.step_timeout_s, self._kinds, together, self)

    @property
    def attachment(self) -> int:
        """The number under which the broker is told things; 0: it is away."""
        return self._attachment

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Apply one event. Never raises for what a peer sent, a stage or another rank did."""
        if self._state == "stopped":
            return []
        match event:
            case Reported():
                actions = list(self.reported(event.report))
            case Started() | Received() | Malformed() | OutboxFull() | Tick() | ShutdownRequested():
                actions = self._handle_attachment(event)
            case _:
                assert self._leader is not None, "a group's event, and there is no group"
                actions = self._leader.handle(event)
        return actions if self._leader is None else _decision_first([*actions, *self._led(self._leader, event.now)])

    def reported(self, report: Finished) -> Iterator[AnyAction]:
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

    def end(self, code: int, reason: str) -> list[AnyAction]:
        """End the process."""
        return self._leave(code, reason)

    def ask_to_stop(self, now: float) -> list[AnyAction]:
        """Another rank was asked to stop: so is this one, if it wasn't yet."""
        return [] if self._drain_until is not None else self._shut_down(now)

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
        if self._leader is not None and self._state != "stopped":
            self._leader.check()

    def status(self) -> dict[str, object]:
        """What is there, as plain data for the log."""
        return {
            "state": self._state,
            "attachment": self._attachment,
            "sessions": {name: sorted(actor.held) for name, actor in self.actors.items()},
            "dropped": dict(
                sum((actor.dropped for actor in self.actors.values()), self.counters)
                + (Counter() if self._leader is None else self._leader.counters)
            ),
        }

    # --- the attachment ----------------------------------------------------------------------------------------------

    def _hello(self) -> WorkerHello:
        offers = tuple(actor.offer for actor in self.actors.values())
        hello = WorkerHello(
            self._version,
            self.config.name,
            self.config.device,
            (self._spec,),
            offers,
            self._packages,
            asdict(self.limits),
            self._memory,
            forwards=True,
            jobs=self._kinds,
        )
        leader = self._leader
        return hello if leader is None else replace(hello, group=leader.membership, held=leader.jobs.held)

    def _begin(self) -> list[AnyAction]:
        if self._leader is not None:
            self._leader.begin()
        return [action for actor in self.actors.values() for action in actor.build()]

    def _joined(self) -> list[AnyAction]:
        said = [] if self._leader is None else self._leader.jobs.joined()
        said += [action for actor in self.actors.values() for action in actor.announce(self._attachment)]
        return [*said, *self._check_ready()]

    def _heard(self, message: ToWorker, now: float) -> list[AnyAction]:
        match message:
            case InitializeStage() | RunTask() | SetStageKeys() | ReleaseStage():
                return self._work(message)
            case ProbeMemory(owner=owner):
                return [AnswerProbe(self._attachment, owner)]
            case ReturnSegments(segments=segments):
                return [*self._take_back(segments), *self._drained()]
            case EndGroup() if self._leader is not None and self._leader.is_alone:
                return self._lose(now, f"the broker has given up: {message.reason}")  # it is all there, weights too
            case (
                LeadGroup()
                | EndGroup()
                | RunJob()
                | StopJob()
                | ForgetJob()
                | CheckpointKept()
                | FilePart()
                | FileGone()
                | WantFile()
            ) if self._leader is not None:
                return self._leader.hear(message, now)
            case _:
                self.counters["unexpected"] += 1
                return [Log("warning", "message_dropped", {"reason": "unexpected", "message": type(message).__name__})]

    def _abandon(self, now: float) -> list[AnyAction]:
        self._lent.clear()
        actions: list[AnyAction] = [] if self._leader is None else self._leader.jobs.abandon()
        actions += [action for actor in self.actors.values() for action in actor.abandon()]
        if self._settling():
            self._stuck_at = now + self.config.stuck_s
        return actions

    def _is_loading(self) -> bool:
        is_led = self._leader is not None and not self._leader.loaded
        return is_led or any(actor.session_bytes is None for actor in self.actors.values())

    def _waits_for(self) -> str:
        return "" if self._leader is None else self._leader.jobs.unsettled

    def _due_at(self) -> float | None:
        led_at = None if self._leader is None else self._leader.due_at
        return min((time for time in (self._stuck_at, led_at) if time is not None), default=None)

    def _due(self, now: float) -> list[AnyAction]:
        if self._stuck_at is not None and now >= self._stuck_at:
            stuck = _names(self._settling())
            return self._leave(1, f"{stuck}: still at work {self.config.stuck_s:g} s after the broker gave it up")
        return [] if self._leader is None else self._leader.due(now)

    def _settling(self) -> list[str]:
        """Stages that are at work yet for a lost broker; those of the group wait for their turn, which comes."""
        return [name for name, actor in self.actors.items() if actor.settling and not actor.offer.grouped]

    def _stop(self, code: int, reason: str) -> list[AnyAction]:
        farewell = [] if self._leader is None else self._leader.farewell(reason, in_order=code == 0)
        return [*farewell, *super()._stop(code, reason)]

    def _led(self, leader: Leader, now: float) -> list[AnyAction]:
        """What the ranks do next."""
        actions = [] if self._is_over() else leader.decide(now)
        return actions if self._is_over() else [*actions, *self._check_ready()]

    def _is_over(self) -> bool:
        return self._state == "stopped"

    # --- the stages --------------------------------------------------------------------------------------------------

    def _work(self, message: Order) -> list[AnyAction]:
        actor = self.actors.get(message.stage)
        if actor is None or message.pipeline != actor.offer.pipeline:
            self.counters["unknown_stage"] += 1
            fields = {"pipeline": message.pipeline, "stage": message.stage, "session": message.session}
            return [Log("warning", "message_dropped", {"reason": "unknown_stage", **fields})]
        leader = self._leader if actor.offer.grouped else None
        if leader is not None and not isinstance(message, SetStageKeys) and not leader.number(message):
            fields = {"reason": "unnumbered", "stage": message.stage, "session": message.session}
            return [Log("warning", "message_dropped", {**fields, "message": type(message).__name__})]
        actions: list[AnyAction] = [*actor.receive(message, self._attachment)]
        if isinstance(message, RunTask) and message.awaits:
            for maker in self._makers[message.stage]:  # it may have been made while the task was on its way
                if made := self.actors[maker].made(message):
                    actions += said_of(actor.forward(message, made))
        return [*actions, *self._drained()]

    def _reported(self, report: Finished) -> list[AnyAction]:
        """What comes of a report that is of no use to anybody, or of something else than a task that went well."""
        if self._state == "stopped":
            return []
        actor, reply = self.actors[report.stage], report.reply
        actions: list[AnyAction] = []
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
        if self._stuck_at is not None and not self._settling():
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

    def _take_back(self, segments: Sequence[SegmentUse]) -> list[AnyAction]:
        """Take what was sent and nothing else: a stage may be writing to the rest."""
        ours = tuple(use for use in segments if (use.segment, use.generation) in self._lent)
        for use in ours:
            del self._lent[use.segment, use.generation]
        if len(ours) < len(segments):
            self.counters["unknown_segment"] += len(segments) - len(ours)
        return [TakeBack(ours)] if ours else []

    def _check_ready(self) -> list[AnyAction]:
        if self._is_loading() or (self._leader is not None and not self._leader.formed):
            return []
        return self._is_ready(_names([*self.actors, *(kind.name for kind in self._kinds)]))

    def _occupied(self) -> str:
        return _names([name for name, actor in self.actors.items() if actor.occupied])

    def _overdue(self) -> list[AnyAction]:
        """The drain has taken as long as it may. Only a client that doesn't take its last chunks does no harm.

        It has copied them, all but surely: a client does that when they arrive, and the broker hears of it when the
        application asks for the next one, which may be never.
        """
        within = f"within {self.config.drain_s:g} s"
        if occupied := self._occupied():
            return self._leave(1, f"{occupied}: sessions didn't end {within}")
        if self._leader is not None and (unsettled := self._leader.jobs.unsettled):
            return self._leave(1, f"{unsettled}: it couldn't be handed back {within}")
        reason = f"what was lent of the shared memory didn't come back {within}"
        if any(self._lent.values()):
            return self._leave(1, reason)
        kept = Log("warning", "clients_hold_memory", {"pieces": len(self._lent), "reason": reason})
        return [kept, *self._leave(0, reason)]

    def _drain(self) -> list[AnyAction]:
        for actor in self.actors.values():
            actor.draining = True
        return [] if self._leader is None else self._leader.jobs.drain()

    def _drained(self) -> list[AnyAction]:
        """Leave, if that was asked for, nobody lives here any more, and nobody reads what was made here."""
        if self._drain_until is None or self._occupied():
            return []
        if self._leader is not None and self._leader.loaded:
            self._leader.wind_up(clear=not self._lent)  # and when that is done, it ends the process
            return []
        if self._lent:
            return []
        return self._leave(0, "stopped as asked for")


def _decision_first(actions: list[AnyAction]) -> list[AnyAction]:
    """What the other ranks wait for leaves before what the broker is told of the step before."""
    told = [action for action in actions if isinstance(action, Tell)]
    return [*told, *(action for action in actions if not isinstance(action, Tell))] if told else actions


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)
