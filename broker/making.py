"""How a session makes chunks: controls become tasks, outputs go on, and what is complete goes to the client.

`session.Session` adds how it begins and ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from reelwire.messages import (
    Ack,
    Artifact,
    Chunk,
    ChunkTiming,
    Failure,
    OpenSession,
    RunTask,
    SessionChanged,
    TaskDone,
    TaskStarted,
)
from reelwire.spec import Plain, StageSpec, StreamSpec

from .actors import TaskKey
from .credit import Window
from .desk import Desk
from .fitting import chunk_misfit, misfit
from .leases import Leases
from .peers import Peer
from .seats import STAGE_EPOCH
from .steering import AHEAD_MAX, Steering
from .transitions import ENDED, State

_NO_TIMES = ChunkTiming(0.0, 0.0, 0.0, {})


class Making(Steering):
    """What `Session` is made of while it runs.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        ring: committed chunks that weren't acknowledged; as many as the output's edge holds.
        credit: how far the client lets it go.
        leases: what stages and client read of shared memory.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Nothing is made yet."""
        super().__init__(desk, identity, owner, request, spec)
        self.ring: deque[Chunk] = deque()
        self.credit = Window(request.credit)
        self.leases = Leases(self.flow, desk.memory)
        self._facts: dict[int, dict[str, Plain]] = {}
        self._told: tuple[State, int, Failure | None] = ("opening", 0, None)
        self._stalled_since: float | None = None
        self._settled: list[str] = []

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

    # --- tasks ---------------------------------------------------------------------------------------------------------

    def offer(self) -> None:
        """Queue at every actor whose stage could go on, and note what the others wait for."""
        if self.seats is None or self.state not in ("ready", "running", "draining"):
            return
        for name in self._settled:
            while (index := self.flow.reuse(name)) is not None:
                for edge in self.flow.stages[name].produces:
                    self.leases.begin_settled(edge.artifact, index)
        for name, stage in self.flow.stages.items():
            actor = self.seats.actor(name)
            if stage.settled is None and self.flow.is_ready(name) and self.id not in actor.waiting:
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
            reservation=self.controls.reservation() if self._is_open(stage, index) else None,
            shared=self.seats.shared[stage],
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
        self._bound_early(event)
        self.timing.started(event.stage, event.index, self.desk.now)
        self._stir()

    def on_done(self, event: TaskDone) -> None:
        """A task's outputs: the window is refilled, they go on, and what is complete is committed.

        The refill comes first, while the stage doesn't count as free yet: the next chunk's task must not make the room
        that the refill then finds.
        """
        assert self.seats is not None, "a result without a place"
        flow, stage = self.flow, self.spec.stage(event.stage)
        if not self._is_oldest_task(event.stage, event.index):
            self.refuse("orphans", event)
            return
        reason = self._misbound(event) or self.leases.objection(self.seats.shared[event.stage])
        if event.outputs.keys() != set(stage.produces):
            made, wanted = ", ".join(event.outputs) or "nothing", ", ".join(stage.produces)
            reason = f"made {made} instead of {wanted}"
        if reason is not None:
            self._strike(event.stage, event.index)
            self._stage_failed(Failure("stage", reason, event.stage, event.index))
            return
        if self._refills_after(event.stage):
            self._prefetch()
        self._strike(event.stage, event.index)
        flow.finish(event.stage, event.outputs)
        if event.index < flow.limit:
            self.leases.begin(event.index)
        if event.constant and stage.settles:
            self._settle(stage, event.outputs)
        self.timing.completed(event.stage, event.index, event.run_s, self.desk.now)
        if flow.next_commit <= event.index < flow.limit:
            self._facts.setdefault(event.index, {}).update(event.facts)
        self._commit()
        self._stir()
        self._all_made()

    def _refills_after(self, stage: str) -> bool:
        """Whether the end of a stage refills the prefetch window; a session that drains refills nothing."""
        prefetch = self.spec.prefetch
        if prefetch is None or self.state == "draining":
            return False
        return self._refill == "after_stage" and prefetch.refill_after == stage

    def _settle(self, stage: StageSpec, outputs: Mapping[str, Artifact]) -> None:
        """The outputs of all later chunks are the same: the stage needn't run again.

        One that makes what goes to the client runs on, because each of its chunks is committed when it is done.
        """
        flow = self.flow.stages[stage.name]
        if flow.settled is None and not set(stage.produces).intersection(self.spec.outputs):
            assert self.seats is not None, "settled without a place"
            flow.settled = outputs
            self._settled.append(stage.name)
            self.leases.settle()
            self.seats.actor(stage.name).waiting.discard(self.id)

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
        self.leases.task_over(stage, index)
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
        """Send what is complete, in order, as far as the client's credit goes; what it doesn't take stays on its edge."""
        while (outputs := self.flow.complete()) is not None:
            index = self.flow.next_commit
            if not self.credit.allows(index):
                self._wait_for_client()
                return
            snapshot, facts = self.controls.given[index], self._facts.get(index, {})
            assert snapshot.applied is not None, "a chunk was made of a control that nobody knows"
            chunk = Chunk(self.id, index, outputs, snapshot.applied, facts, _NO_TIMES, index == self.chunks - 1)
            reason = None if self.owner is None else chunk_misfit(chunk, self.flow.stages, self.owner.limits)
            if reason is not None:
                text = f"chunk {index} can't be sent to the client: {reason}"
                self.desk.unfit[self.id] = Failure("request", text, index=index, field="frame_bytes_max")
                return
            self.flow.commit()
            self.controls.committed(index)
            self._facts.pop(index, None)
            chunk = replace(chunk, timing=self.timing.committed(index, snapshot.changes_at, self.desk.now))
            self.credit.send(sum(artifact.nbytes for artifact in outputs.values()))
            self.ring.append(chunk)
            self._tell(chunk)
            self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Something is the client's to take: it has `stall_s` to do so."""
        if self._stalled_since is None:
            self._stalled_since = self.desk.now
            if self.state != "releasing" and ("stall", self.id) not in self.desk.timers:
                self._timer("stall", self.desk.config.stall_s)

    def on_ack(self, event: Ack) -> None:
        """The application took chunks: the ring and the output's edge have room again, and more may be sent.

        What was said before, or is overtaken by it, changes nothing.
        """
        flow = self.flow
        if event.chunks > flow.next_commit:
            self.refuse("acks_beyond_the_end", event)
        grew = self.credit.grant(event.credit)
        took = flow.acknowledge(event.chunks)
        if not took and not grew:
            return
        if took:
            self.leases.acknowledged()
            while self.ring and self.ring[0].index < flow.acked:
                self.ring.popleft()
        self._stalled_since = None
        if self.ring:
            self._wait_for_client()
        self._commit()
        self._stir()
        self._all_made()

    def on_early_ack(self, event: Ack) -> None:
        """There is nothing to take yet; the credit counts."""
        if event.chunks > 0:
            self.refuse("acks_beyond_the_end", event)
        self.credit.grant(event.credit)

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _stir(self) -> None:
        self.desk.unsettled[self.id] = self
        self.desk.settle()

    def _task_key(self, index: int) -> TaskKey:
        return self.id, self.epoch, STAGE_EPOCH, index

    def idle_cause(self, name: str) -> str:
        """Why a stage doesn't run; empty when it does, or has nothing left to do."""
        stage = self.flow.stages[name]
        if stage.finished < stage.started or (stage.settled is not None and stage.finished == stage.dispatched):
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
