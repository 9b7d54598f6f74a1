"""What a worker does with its stages, decided without a socket, a thread or a clock: `handle(event)` gives the actions.

Two things are kept: the attachment to the broker (`attachment.Attachment`), and, one `Actor` each, the stages.

What a stage makes is given to the tasks of other stages here that await it, before the broker is told; the broker hears of
the result first, and then of what began with it.

Asked to stop, an attached worker says `Draining` and goes on until the sessions that it has are released and what it
lent of its shared memory is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import assert_never

from reelwire.messages import (
    InitializeStage,
    MemoryOffer,
    ProbeMemory,
    ReleaseStage,
    ReturnSegments,
    RunTask,
    SegmentUse,
    SetStageKeys,
    StageFailed,
    StageOffer,
    TaskDone,
    ToWorker,
    WorkerHello,
)
from reelwire.spec import StreamSpec
from reelwire.tensors import Shared

from .actions import Action, AnswerProbe, BuildStage, Log, Run, Send, TakeBack
from .actor import Actor, Order, said_of
from .attachment import Attachment
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


class WorkerCore(Attachment):
    """One worker process.

    Args:
        config: its settings.
        spec: the pipeline that it serves.
        version: version of reelwire.
        packages: versions of what its results depend on.
        memory: shared memory that it can write; None when it has none.

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
    ) -> None:
        """Start with no connection and no weights."""
        super().__init__(config, version)
        names = [name for name in spec.initialize_order if not config.stages or name in config.stages]
        self.actors = {
            name: Actor(StageOffer(spec.name, name, config.slots, config.cache_bytes_max, config.mailbox))
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

    def handle(self, event: Event) -> list[Action]:
        """Apply one event. Never raises for what a peer sent or a stage did."""
        if self._state == "stopped":
            return []
        match event:
            case Reported():
                return list(self.reported(event.report))
            case Started() | Received() | Malformed() | OutboxFull() | Tick() | ShutdownRequested():
                return self._handle_attachment(event)
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

    def _hello(self) -> WorkerHello:
        offers = tuple(actor.offer for actor in self.actors.values())
        return WorkerHello(
            self._version,
            self.config.name,
            self.config.device,
            (self._spec,),
            offers,
            self._packages,
            asdict(self.limits),
            self._memory,
            forwards=True,
        )

    def _begin(self) -> list[Action]:
        return [action for actor in self.actors.values() for action in actor.build()]

    def _joined(self) -> list[Action]:
        said = [action for actor in self.actors.values() for action in actor.announce(self._attachment)]
        return [*said, *self._check_ready()]

    def _heard(self, message: ToWorker, now: float) -> list[Action]:  # noqa: ARG002
        match message:
            case InitializeStage() | RunTask() | SetStageKeys() | ReleaseStage():
                return self._work(message)
            case ProbeMemory(owner=owner):
                return [AnswerProbe(self._attachment, owner)]
            case ReturnSegments(segments=segments):
                return [*self._take_back(segments), *self._drained()]
            case _:
                self.counters["unexpected"] += 1
                return [Log("warning", "message_dropped", {"reason": "unexpected", "message": type(message).__name__})]

    def _abandon(self, now: float) -> list[Action]:
        self._lent.clear()
        actions = [action for actor in self.actors.values() for action in actor.abandon()]
        if any(actor.settling for actor in self.actors.values()):
            self._stuck_at = now + self.config.stuck_s
        return actions

    def _is_loading(self) -> bool:
        return any(actor.session_bytes is None for actor in self.actors.values())

    def _due_at(self) -> float | None:
        return self._stuck_at

    def _due(self, now: float) -> list[Action]:  # noqa: ARG002
        stuck = _names([name for name, actor in self.actors.items() if actor.settling])
        return self._leave(1, f"{stuck}: still at work {self.config.stuck_s:g} s after the broker gave it up")

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
        return [] if self._is_loading() else self._is_ready(_names(list(self.actors)))

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

    def _drain(self) -> list[Action]:
        for actor in self.actors.values():
            actor.draining = True
        return []

    def _drained(self) -> list[Action]:
        """Leave, if that was asked for, nobody lives here any more, and nobody reads what was made here."""
        if self._drain_until is None or self._occupied() or self._lent:
            return []
        return self._leave(0, "stopped as asked for")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)
