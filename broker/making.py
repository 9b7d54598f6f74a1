"""How a session makes chunks: inputs become tasks, and what they make goes on.

A task is sent when its inputs are there, or ahead of them when they come from other stages of its own worker, which gives
them to it by itself. What that needs is asked when it is sent; when its inputs' `TaskDone` comes it arrives, and is a task
like any other from then on.

`session.Session` adds how it begins and ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from reelwire.messages import Artifact, Failure, OpenSession, RunTask, TaskDone, TaskStarted
from reelwire.spec import StageSpec, StreamSpec

from .actors import Actor
from .delivery import Delivering
from .desk import Desk
from .fitting import fitted
from .flow import OVER, READY, StageFlow
from .peers import Peer
from .seats import STAGE_EPOCH
from .stats import IdleGaps
from .steering import AHEAD_MAX
from .transitions import PaceExpired

MADE = ("ready", "running", "draining")
"""The states in which chunks are made."""
BUSY = "actor_busy"
PACE = "pace"
_CAUSES = {READY: BUSY, OVER: ""}


class Line:
    """One stage of a session that runs.

    Attributes:
        spec: the stage.
        flow: how far it is.
        actor: where it runs.
        gaps: what it waits for.
        produces: the artifacts that it makes.
        is_last: whether some of them go to the client.
        is_steered: whether it takes the control.
        refills: whether its end refills the prefetch window.
        followers: those whose actors are given what it makes by its worker itself.
    """

    __slots__ = ("actor", "flow", "followers", "gaps", "is_last", "is_steered", "produces", "refills", "spec")

    def __init__(self, stream: StreamSpec, spec: StageSpec, flow: StageFlow, actor: Actor, gaps: IdleGaps) -> None:
        """Nothing was made yet."""
        prefetch = stream.prefetch
        self.spec = spec
        self.flow = flow
        self.actor = actor
        self.gaps = gaps
        self.produces = frozenset(spec.produces)
        self.followers: list[Line] = []
        self.is_last = not self.produces.isdisjoint(stream.outputs)
        self.is_steered = stream.control in spec.consumes
        self.refills = prefetch is not None and prefetch.refill == "after_stage" and prefetch.refill_after == spec.name


class Making(Delivering):
    """What `Session` is made of while it runs.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Nothing is made yet."""
        super().__init__(desk, identity, owner, request, spec)
        self._lines: dict[str, Line] = {}
        self._settled: list[Line] = []
        self._paced_until: float | None = None

    @abstractmethod
    def _stage_failed(self, failure: Failure) -> None:
        """Make what lies below the failed chunk, then end."""

    def _begin(self) -> None:
        """The stages are there: let the first chunks come."""
        assert self.seats is not None, "begun without a place"
        flow, actors, gaps = self.flow.stages, self.seats.seats, self.timing.gaps
        self._lines = {
            stage.name: Line(self.spec, stage, flow[stage.name], actors[stage.name].actor, gaps[stage.name])
            for stage in self.spec.stages
        }
        for line in self._lines.values():
            self._follow(line)
        if self._refill != "never":
            self._prefetch()
        self._stir()

    def _follow(self, line: Line) -> None:
        """Find out what a stage's own worker makes for it; not for a group's, whose inputs must reach all ranks."""
        if line.actor.group is not None:
            return
        worker = line.actor.worker
        makers = [edge.producer for edge in line.flow.consumes if edge.producer is not None and worker.forwards]
        for maker in makers:
            if self._lines[maker.name].actor.worker is worker and maker not in line.flow.feeders:
                line.flow.feeders.add(maker)
                self._lines[maker.name].followers.append(line)

    # --- tasks ---------------------------------------------------------------------------------------------------------

    def offer(self) -> None:
        """Queue at every actor whose stage could go on, and note what the others wait for."""
        if self.state in MADE:
            for line in self._settled:
                if line.flow.is_stale:
                    self._reuse(line)
            for line in self._lines.values():
                if line.flow.is_stale:
                    self._look(line)
        self._steer()

    def _steer(self) -> None:
        """Look for a control, and tell the client how far its own may go, if either may be further than before."""
        flow, controls = self.flow, self.controls
        if flow.control.issued <= flow.next_commit + AHEAD_MAX and (controls.unbound is None or controls.pending):
            self._touch()
        self._announce()

    def _look(self, line: Line) -> None:
        """Queue at the stage's actor if it could go on, else note what it waits for."""
        stage = line.flow
        stage.is_stale = False
        lack = self.flow.lack(stage)
        if lack == READY:
            if self.clock is not None and line.is_steered:
                lack = self._lack(stage)
            if lack == PACE:
                self._wait_for_clock(line)
            elif stage.settled is None and self.id not in line.actor.waiting:
                self._queue(line)
        elif stage.feeders and self._can_be_ahead(line):
            self.run_next(stage.name)
            return
        cause = "" if stage.finished < stage.started else self._cause(stage, lack)
        if cause != line.gaps.cause:
            line.gaps.turn(cause, self.desk.now)

    def run_next(self, stage: str) -> None:
        """Send the stage's next task, perhaps ahead of inputs; an actor that has nothing else to do starts it at once."""
        assert self.seats is not None, "a task without a place"
        flow, desk, line = self.flow, self.desk, self._lines[stage]
        actor, group, now = line.actor, line.actor.group, desk.now
        index, inputs = flow.peek(stage)
        awaits = flow.lacking(line.flow) if line.flow.feeders else ()
        task = RunTask(
            session=self.id,
            pipeline=self.spec.name,
            stage=stage,
            epoch=self.epoch,
            stage_epoch=STAGE_EPOCH,
            index=index,
            inputs=inputs,
            is_first=index == 0,
            is_last=index == self.chunks - 1,
            reservation=self.controls.reservation() if line.is_steered and index == self.controls.unbound else None,
            shared=self.seats.shared[stage],
            awaits=awaits,
        )
        if group is not None:
            task = group.number(task)
        packed, reason = fitted(task, actor.limits, inputs.values())
        if reason is not None:
            text = f"the inputs can't be sent to worker {actor.worker.name!r}: {reason}"
            desk.unfit[self.id] = Failure("stage", text, stage, index)
            return
        flow.dispatch(stage)
        if group is None:
            desk.send(actor.worker, task, packed)
        else:
            group.send(desk, task, packed)
        if awaits:
            actor.send_ahead(self.id)
            starts = False
        else:
            was_idle = actor.is_idle
            starts = was_idle and not actor.awaiting  # one of those may have begun meanwhile
            actor.send(self.id, now)
            if was_idle:  # else it is watched already, and has more time now, not less
                desk.watch(actor)
            self.timing.admitted(stage, index, now)
        if starts and flow.start(stage):
            desk.unsettled[self.id] = self
            return
        self._look(line)  # nobody else can go on
        if starts:
            self._steer()

    def on_started(self, event: TaskStarted) -> None:
        """An actor began a task: the inputs have left their edges."""
        if not self._begins(event):
            self.refuse("orphans", event)
            return
        if self.flow.stages[event.stage].started == event.index:
            self.flow.start(event.stage)
            self._stir()
        for follower in self._lines[event.stage].followers:
            follower.flow.is_stale = True
            self._stir()
        self._bound_early(event)
        self.timing.started(event.stage, event.index, self.desk.now)

    def on_done(self, event: TaskDone) -> None:
        """A task's outputs: the window is refilled, they go on, and what is complete is committed.

        The order of the steps carries weight, as ARCHITECTURE.md says. The refill comes first, while the stage doesn't
        count as free yet: the next chunk's task must not make the room that the refill then finds.
        """
        assert self.seats is not None, "a result without a place"
        flow, desk, name, index, line = self.flow, self.desk, event.stage, event.index, self._lines[event.stage]
        if not self._is_oldest_task(name, index):
            self.refuse("orphans", event)
            return
        reason = self._misbound(event) if line.is_steered or event.applied is not None else None
        if reason is None and (desk.memory.arrived or desk.memory.objection is not None):
            reason = self.leases.objection(self.seats.shared[name])
        if event.outputs.keys() != line.produces:
            made, wanted = ", ".join(event.outputs) or "nothing", ", ".join(line.spec.produces)
            reason = f"made {made} instead of {wanted}"
        if reason is not None:
            self._strike(name, index)
            self._stage_failed(Failure("stage", reason, name, index))
            return
        if line.refills and self.state != "draining":  # a session that drains refills nothing
            self._prefetch()
        self._strike(name, index)
        flow.finish(name, event.outputs)
        self._forwarded(line, event)
        if desk.memory.arrived:
            self._lend(line, index)
        if index < flow.limit and event.facts:
            self._facts.setdefault(index, {}).update(event.facts)
        if event.constant and line.spec.settles:
            self._keep_constant(line, event.outputs)
        self.timing.completed(name, index, event.run_s, desk.now)
        if line.is_last:
            self._commit()
        desk.unsettled[self.id] = self
        if flow.next_commit == flow.limit or self.state == "releasing":
            self._all_made()

    def on_pace(self, _event: PaceExpired) -> None:
        """The picture has come far enough for the next chunk to be begun."""
        self._paced_until = None
        self.flow.stages[self._steered].is_stale = True
        self._stir()

    def _queue(self, line: Line) -> None:
        """Wait for a turn at the stage's actor."""
        index = line.flow.dispatched
        line.actor.waiting.add(self.id, self, self._media_s(index))
        self.timing.offered(line.flow.name, index, self.desk.now)
        self.desk.stirred[line.actor] = None

    def _can_be_ahead(self, line: Line) -> bool:
        """Whether the stage's next task can be sent before its inputs are there, because its own worker makes them."""
        stage, clock = line.flow, self.clock if line.is_steered else None
        if stage.settled is not None or not line.actor.has_room_ahead or not self.flow.comes(stage):
            return False
        return clock is None or clock.begins_at(stage.dispatched) <= self.desk.now

    def _forwarded(self, line: Line, event: TaskDone) -> None:
        """A worker gave what was made to the tasks that awaited it: with all that they need, they are like any other."""
        for follower in line.followers:
            awaited = follower.flow.awaits.get(event.index)
            if awaited is not None:
                awaited -= event.outputs.keys()
                if not awaited:
                    del follower.flow.awaits[event.index]
                    self._arrived(follower, event.index)

    def _arrived(self, line: Line, index: int) -> None:
        assert self.seats is not None, "forwarded without a place"
        stage, actor, now = line.flow, line.actor, self.desk.now
        if self.seats.seats[stage.name].state != "live" or any(earlier < index for earlier in stage.awaits):
            return  # its release has dropped the task, unless that came too late; or it is of a session that fails
        starts = actor.is_idle
        actor.arrive(self.id, now)
        actor.waiting.charge(self.id, self._media_s(index))
        if starts:
            self.desk.watch(actor)
        self.timing.offered(stage.name, index, now)
        self.timing.admitted(stage.name, index, now)
        if starts:
            self.flow.start(stage.name)

    def _lend(self, line: Line, index: int) -> None:
        """Let the leases on a result's shared memory begin, also where only those have it whom its worker gave it."""
        if index < self.flow.limit:
            self.leases.begin(index)
            return
        assert self.seats is not None, "a result without a place"
        ahead = {each.flow.name for each in line.followers if each.flow.dispatched > index}
        self.leases.begin_dropped(index, {name for name in ahead if self.seats.seats[name].state != "gone"})

    def _media_s(self, index: int) -> float:
        return self.spec.frames_of(index) / self.spec.fps

    def _wait_for_clock(self, line: Line) -> None:
        """Look again when the chunk may be begun; it has no turn until then."""
        assert self.clock is not None, "no clock to wait for"
        line.actor.waiting.discard(self.id)
        at = self.clock.begins_at(line.flow.dispatched)
        if at != self._paced_until:
            self._paced_until = at
            self.desk.timers.set(("pace", self.id), at)

    def _prefetch(self) -> None:
        """Fill the prefetch window as far as its edge has room, which each condition that is begun at once makes."""
        flow = self.flow
        while flow.prefetch_one():
            assert flow.condition is not None, "a prefetch of nothing"
            self.timing.entered(flow.condition.artifact, flow.condition.issued - 1, self.desk.now)
            self._stir()
            if flow.has_window and not flow.condition.has_room:
                self.desk.send_tasks()

    def _keep_constant(self, line: Line, outputs: Mapping[str, Artifact]) -> None:
        """The outputs of all later chunks are the same: the stage needn't run again.

        One that makes what goes to the client runs on, because each of its chunks is committed when it is done.
        """
        if line.flow.settled is None and not line.is_last:
            line.flow.settled = outputs
            line.actor.waiting.discard(self.id)
            self.timing.withdrawn(line.flow.name, line.flow.dispatched)
            self._settled.append(line)
            self.leases.keep()

    def _reuse(self, line: Line) -> None:
        while (index := self.flow.reuse(line.flow.name)) is not None:
            for artifact in line.spec.produces:
                self.leases.begin_kept(artifact, index)

    def _begins(self, event: TaskStarted) -> bool:
        """Whether a task that was sent and hadn't begun begins now."""
        assert self.seats is not None, "started without a place"
        actor, stage = self.seats.actor(event.stage), self.flow.stages[event.stage]
        if self.id not in actor.tasks or not max(stage.told, stage.finished) <= event.index < stage.dispatched:
            return False
        if event.index in stage.awaits:
            return False
        stage.told = event.index + 1
        self.desk.answered(actor)
        return True

    def _is_oldest_task(self, stage: str, index: int) -> bool:
        """Whether a task is the oldest that its actor has of this session: only that one can be over."""
        assert self.seats is not None, "a task without a place"
        actor, flow = self.seats.seats[stage].actor, self.flow.stages[stage]
        if flow.finished != index:
            return False
        return self.id in actor.tasks or (self.id in actor.ahead and index not in flow.awaits)

    def _strike(self, stage: str, index: int) -> None:
        """Strike the oldest task off its actor's list."""
        assert self.seats is not None, "a task without a place"
        actor = self.seats.seats[stage].actor
        if self.id not in actor.tasks:  # the release came too late for it
            actor.arrive(self.id, self.desk.now)
        actor.strike(self.id)
        self.leases.task_over(stage, index)
        self.desk.answered(actor)
        if actor.waiting:
            self.desk.stirred[actor] = None
        if self.flow.stages[stage].started == index:
            self.flow.start(stage)

    # --- helpers -------------------------------------------------------------------------------------------------------

    def idle_cause(self, name: str) -> str:
        """Why a stage doesn't run; empty when it does, or has nothing left to do."""
        stage = self.flow.stages[name]
        return self._cause(stage, self._lack(stage))

    def _lack(self, stage: StageFlow) -> str:
        """What a stage's next task lacks, as `Flow.lack` has it, or `PACE` when it would be too far ahead of the picture."""
        lack = self.flow.lack(stage)
        if lack == READY and self.clock is not None and stage.name == self._steered:
            return PACE if self.clock.begins_at(stage.dispatched) > self.desk.now else READY
        return lack

    def _cause(self, stage: StageFlow, lack: str) -> str:
        """What a stage with such a lack waits for; empty when it runs, or has nothing left to do."""
        if stage.finished < stage.started:
            return ""
        if stage.started in stage.awaits:
            return next(edge.missing for edge in stage.consumes if edge.artifact in stage.awaits[stage.started])
        if stage.started < stage.dispatched:
            return BUSY
        return "" if stage.settled is not None else _CAUSES.get(lack, lack)

    def _stir(self) -> None:
        self.desk.unsettled[self.id] = self
