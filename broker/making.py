"""How a session makes chunks: controls become tasks, outputs go on, and what is complete goes to the client.

`session.Session` adds how it begins and ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace

from reelwire.errors import ControlError
from reelwire.messages import (
    Ack,
    Applied,
    Chunk,
    ChunkTiming,
    ControlAccepted,
    ControlRefused,
    Failure,
    FromBroker,
    OpenSession,
    RunTask,
    SessionChanged,
    SetKeys,
    SubmitControl,
    TaskDone,
    TaskStarted,
)
from reelwire.spec import Plain, StreamSpec

from .actors import TaskKey
from .control import ControlDesk, Snapshot, check_control
from .desk import Desk
from .fitting import chunk_misfit, misfit
from .flow import Flow
from .peers import Peer
from .seats import STAGE_EPOCH, Seats
from .timing import Timing
from .transitions import ENDED, Looked, SessionEvent, State, Timer

AHEAD_MAX = 1
"""Chunks that keys, the pending slot, and the grant for controls by index may be ahead of the output."""

_NO_TIMES = ChunkTiming(0.0, 0.0, 0.0, {})
_REFUSALS = {
    "malformed": "an index is 0 or more",
    "duplicate": "the control of this chunk was accepted before",
    "gap": "the controls before it are missing",
    "past_end": "the session has no such chunk",
    "no_room": "the chunks before it aren't far enough",
}


class Making(ABC):
    """What `Session` is made of while it runs.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        state: see `transitions`.
        owner: None while the client is lost.
        flow: edges and cursors.
        controls: the key register and the pending slot.
        seats: the places at the actors; None until the session has them.
        ring: committed chunks that weren't acknowledged; as many as the output's edge holds.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Nothing is held and nothing flows."""
        self.desk = desk
        self.id, self.token = identity
        self.owner: Peer | None = owner
        self.spec = spec
        self.chunks = request.chunks
        self.epoch = 1
        self.state: State = "opening"
        self.flow = Flow(spec, request.chunks)
        self.controls = ControlDesk(spec, desk.now)
        self.timing = Timing(spec, desk.now, desk.stats_of(spec))
        self.seats: Seats | None = None
        self.ring: deque[Chunk] = deque()
        self._snapshots: dict[int, Snapshot] = {}
        self._facts: dict[int, dict[str, Plain]] = {}
        self._told: tuple[State, int, Failure | None] = ("opening", 0, None)
        self._stalled_since = desk.now

    @property
    @abstractmethod
    def failure(self) -> Failure | None:
        """Why it will have ended, once that is known."""

    @property
    def control_limit(self) -> int:
        """How far explicit controls may go, as the client was told."""
        return self._told[1]

    @abstractmethod
    def _all_made(self) -> None:
        """Go on to the end when no chunk is left to be made, or to be taken."""

    @abstractmethod
    def _stage_failed(self, failure: Failure) -> None:
        """Make what lies below the failed chunk, then end."""

    # --- controls ------------------------------------------------------------------------------------------------------

    def on_keys(self, event: SetKeys) -> None:
        """A newer register replaces the one before; what it offers is looked at when the turn ends."""
        try:
            self.controls.set_keys(event.keys, self.desk.now)
        except ControlError as error:
            self._refuse_control(None, error)
        self._touch()

    def on_early_control(self, event: SubmitControl) -> None:
        """Before the stages are there only the pending slot takes a control."""
        if event.index is None:
            self.on_control(event)
        else:
            self._refuse_control(event.index, ControlError("no_room", "the session isn't ready yet", 0))

    def on_control(self, event: SubmitControl) -> None:
        """An explicit control, for the next index or for the pending slot."""
        try:
            control = check_control(event.control, self.spec)
        except ControlError as error:
            self._refuse_control(event.index, error)
            return
        if event.index is None:
            self.controls.set_pending(control, self.desk.now)
            self._touch()
            return
        expected = self.flow.next_control_index
        code = self.flow.refusal(event.index)
        if code is None:
            self._accept(Snapshot(Applied("explicit", control)), by_index=True)
            return
        text = f"control {event.index} of {self.chunks}: {_REFUSALS[code]}; expected: {expected}"
        self._refuse_control(event.index, ControlError(code, text, expected))

    def on_looked(self, _event: Looked) -> None:
        """Take controls from the slot, the one-shot and the held keys, at most one chunk ahead of the output."""
        flow = self.flow
        while flow.next_control_index <= flow.next_commit + AHEAD_MAX and flow.has_room_for_control():
            snapshot = self.controls.take()
            if snapshot is None:
                break
            self._accept(snapshot)

    def on_late_keys(self, event: SetKeys) -> None:
        """A register that crossed the end of the session changes nothing."""
        self.refuse("late_controls", event)

    def on_late_control(self, event: SubmitControl) -> None:
        """No control is taken any more."""
        self._refuse_control(
            event.index, ControlError("ended", f"the session takes no more controls: it is {self.state}")
        )

    def _accept(self, snapshot: Snapshot, *, by_index: bool = False) -> None:
        now = self.desk.now
        before = self.flow.next_condition_index
        index = self.flow.submit(snapshot.applied.control)
        self._snapshots[index] = snapshot
        if self.flow.condition is not None and self.flow.next_condition_index > before:
            self.timing.entered(self.flow.condition.artifact, index, now)
        self.timing.entered(self.spec.control, index, now)
        self.controls.active_at = now
        self.state = "running"
        if snapshot.applied.source == "explicit":
            self._tell(ControlAccepted(self.id, index, by_index))
        self._stir()

    def _refuse_control(self, index: int | None, error: ControlError) -> None:
        self.desk.count("controls_refused", session=self.id, code=error.code)
        self._tell(ControlRefused(self.id, index, error.code, str(error), error.expected))

    # --- tasks ---------------------------------------------------------------------------------------------------------

    def offer(self) -> None:
        """Queue at every actor whose stage could go on, and note what the others wait for."""
        if self.seats is None or self.state not in ("ready", "running", "draining"):
            return
        for name, stage in self.flow.stages.items():
            actor = self.seats.actor(name)
            if self.flow.is_ready(name) and self.id not in actor.waiting:
                actor.waiting.add(self.id, self, self.spec.frames_of(stage.dispatched) / self.spec.fps)
                self.timing.offered(name, stage.dispatched, self.desk.now)
                self.desk.stirred[actor] = None
            self.timing.gaps[name].turn(self.idle_cause(name), self.desk.now)
        self._touch()
        self._announce()

    def run_next(self, stage: str) -> None:
        """Send the stage's next task; to an actor that has nothing else to do it starts there and then."""
        assert self.seats is not None, "a task without a place"
        actor = self.seats.actor(stage)
        index, inputs = self.flow.peek(stage)
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
        )
        reason = misfit(task, actor.worker.limits)
        if reason is not None:
            text = f"the inputs can't be sent to worker {actor.worker.name!r}: {reason}"
            self.desk.unfit[self.id] = Failure("stage", text, stage, index)
            return
        starts = actor.is_idle
        self.flow.dispatch(stage)
        actor.send(self._task_key(index), self.desk.now)
        self.desk.watch(actor)
        if starts:
            self.flow.start(stage)
        self.timing.admitted(stage, index, self.desk.now)
        self.desk.send(actor.worker, task)
        self.desk.unsettled[self.id] = self

    def on_started(self, event: TaskStarted) -> None:
        """An actor began a task: the inputs have left their edges."""
        if not self._begins(event):
            self.refuse("orphans", event)
            return
        if self.flow.stages[event.stage].started == event.index:
            self.flow.start(event.stage)
        self.timing.started(event.stage, event.index, self.desk.now)
        self._stir()

    def on_done(self, event: TaskDone) -> None:
        """A task's outputs: the window is refilled, they go on, and what is complete is committed.

        The refill comes first, while the stage doesn't count as free yet: the next chunk's task must not make the room
        that the refill then finds.
        """
        flow, stage = self.flow, self.spec.stage(event.stage)
        if not self._is_oldest_task(event.stage, event.index):
            self.refuse("orphans", event)
            return
        missing = set(stage.produces).symmetric_difference(event.outputs)
        if missing:
            self._strike(event.stage, event.index)
            made, wanted = ", ".join(event.outputs) or "nothing", ", ".join(stage.produces)
            self._stage_failed(Failure("stage", f"made {made} instead of {wanted}", event.stage, event.index))
            return
        prefetch = self.spec.prefetch
        if prefetch is not None and prefetch.refill_after == event.stage and self.state != "draining":
            self._prefetch()
        self._strike(event.stage, event.index)
        flow.finish(event.stage, event.outputs)
        self.timing.completed(event.stage, event.index, event.run_s, self.desk.now)
        if flow.next_commit <= event.index < flow.limit:
            self._facts.setdefault(event.index, {}).update(event.facts)
        self._commit()
        self._stir()
        self._all_made()

    def _begins(self, event: TaskStarted) -> bool:
        """Whether a task that was sent and hadn't begun begins now."""
        assert self.seats is not None, "started without a place"
        actor = self.seats.actor(event.stage)
        task = actor.outstanding.get(self._task_key(event.index))
        if task is None or task.started_at is not None:
            return False
        task.started_at = self.desk.now
        self.desk.answered(actor)
        return True

    def _is_oldest_task(self, stage: str, index: int) -> bool:
        """Whether a task is the oldest that its actor has of this session: only that one can be over."""
        assert self.seats is not None, "a task without a place"
        known = self._task_key(index) in self.seats.actor(stage).outstanding
        return known and self.flow.stages[stage].finished == index

    def _strike(self, stage: str, index: int) -> None:
        """Strike the oldest task off its actor's list."""
        assert self.seats is not None, "a task without a place"
        actor = self.seats.actor(stage)
        del actor.outstanding[self._task_key(index)]
        self.desk.answered(actor)
        self.desk.stirred[actor] = None
        if self.flow.stages[stage].started == index:
            self.flow.start(stage)

    def _prefetch(self) -> None:
        """Fill the prefetch window as far as its edge has room."""
        while self.flow.prefetch_one():
            assert self.flow.condition is not None, "a prefetch of nothing"
            artifact, index = self.flow.condition.artifact, self.flow.next_condition_index - 1
            self.timing.entered(artifact, index, self.desk.now)
            self._stir()

    def _commit(self) -> None:
        while (outputs := self.flow.complete()) is not None:
            index = self.flow.next_commit
            snapshot, facts = self._snapshots[index], self._facts.get(index, {})
            chunk = Chunk(self.id, index, outputs, snapshot.applied, facts, _NO_TIMES, index == self.chunks - 1)
            reason = None if self.owner is None else chunk_misfit(chunk, self.flow.stages, self.owner.limits)
            if reason is not None:
                text = f"chunk {index} can't be sent to the client: {reason}"
                self.desk.unfit[self.id] = Failure("request", text, index=index, field="frame_bytes_max")
                return
            self.flow.commit()
            del self._snapshots[index]
            self._facts.pop(index, None)
            chunk = replace(chunk, timing=self.timing.committed(index, snapshot.changes_at, self.desk.now))
            if not self.ring:
                self._stalled_since = self.desk.now
                self._timer("stall", self.desk.config.stall_s)
            self.ring.append(chunk)
            self._tell(chunk)

    def on_ack(self, event: Ack) -> None:
        """The application took chunks: the ring and the output's edge have room again."""
        if event.chunks > self.flow.next_commit:
            self.refuse("acks_beyond_the_end", event)
        if self.flow.acknowledge(event.chunks):
            self._stalled_since = self.desk.now
            while self.ring and self.ring[0].index < self.flow.acked:
                self.ring.popleft()
        self._stir()
        self._all_made()

    # --- helpers -------------------------------------------------------------------------------------------------------

    def refuse(self, reason: str, event: SessionEvent) -> None:
        """Count something that a peer said and that changes nothing here."""
        self.desk.count(reason, session=self.id, state=self.state, message=type(event).__name__)

    def _stir(self) -> None:
        self.desk.unsettled[self.id] = self
        self.desk.settle()

    def _touch(self) -> None:
        if self.state in ("ready", "running") and self.controls.offers:
            self.desk.touched[self.id] = None

    def _tell(self, message: FromBroker) -> None:
        if self.owner is not None:
            self.desk.send(self.owner, message)

    def _timer(self, kind: Timer, in_s: float) -> None:
        self.desk.timers.set((kind, self.id), self.desk.now + in_s)

    def _drop_timers(self, *kinds: Timer) -> None:
        for kind in kinds:
            self.desk.timers.drop((kind, self.id))

    def _task_key(self, index: int) -> TaskKey:
        return self.id, self.epoch, STAGE_EPOCH, index

    def idle_cause(self, name: str) -> str:
        """Why a stage doesn't run; empty when it does, or has nothing left to do."""
        stage = self.flow.stages[name]
        if stage.finished < stage.started:
            return ""
        cause = "ready" if stage.started < stage.dispatched else self.flow.waits_for(name)
        return {"ready": "actor_busy", "end": ""}.get(cause, cause)

    def _announce(self) -> None:
        """Tell the client its state, how far controls may go, and why it ends, when that changes; a grant never goes back."""
        if self.state in ENDED:
            return
        limit = self._told[1]
        if self.state in ("ready", "running"):
            limit = max(limit, min(self.flow.control_limit, self.flow.next_commit + AHEAD_MAX + 1))
        if (self.state, limit, self.failure) != self._told:
            self._told = (self.state, limit, self.failure)
            self._tell(SessionChanged(self.id, self.state, limit, self.failure))
