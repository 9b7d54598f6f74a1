"""Tasks that are sent ahead of their inputs, which come without the broker or with a message that is small.

Another stage of the same worker makes them, and the worker gives them to the task by itself; or they come from outside,
with the control of a client that looks at one chunk before it steers the next. Then the task lies at its worker meanwhile,
with all that is large, and a `GiveInputs` completes it. What a task needs beside its inputs is asked when it is sent; when
they are there it arrives, and is a task like any other from then on.

`making.Making` adds which tasks there are.
"""

from __future__ import annotations

from abc import abstractmethod

from reelwire.messages import Failure, GiveInputs, OpenSession, TaskDone
from reelwire.spec import StageSpec, StreamSpec

from .actors import Actor
from .delivery import Delivering
from .desk import Desk
from .fitting import fitted
from .flow import RESERVED, StageFlow
from .peers import Peer
from .seats import STAGE_EPOCH
from .stats import IdleGaps


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
        is_given: whether its worker can be sent its tasks ahead of what comes with their controls.
        refills: whether its end refills the prefetch window.
        followers: those whose actors are given what it makes by its worker itself.
    """

    __slots__ = (
        "actor",
        "flow",
        "followers",
        "gaps",
        "is_given",
        "is_last",
        "is_steered",
        "produces",
        "refills",
        "spec",
    )

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
        self.is_given = actor.worker.forwards and any(edge.is_given for edge in flow.consumes)
        self.refills = prefetch is not None and prefetch.refill == "after_stage" and prefetch.refill_after == spec.name


class Forwarding(Delivering):
    """What `Session` is made of where tasks are sent ahead of their inputs.

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
        """Nothing was sent."""
        super().__init__(desk, identity, owner, request, spec)
        self._lines: dict[str, Line] = {}

    def _follow(self, line: Line) -> None:
        """Find out what a stage's own worker makes for it."""
        worker = line.actor.worker
        makers = [edge.producer for edge in line.flow.consumes if edge.producer is not None and worker.forwards]
        for maker in makers:
            if self._lines[maker.name].actor.worker is worker and maker not in line.flow.feeders:
                line.flow.feeders.add(maker)
                self._lines[maker.name].followers.append(line)

    @abstractmethod
    def _send(self, line: Line, awaits: tuple[str, ...]) -> None:
        """Send a stage's next task, perhaps ahead of inputs."""

    @abstractmethod
    def _sent(self, line: Line, index: int, *, has_all: bool) -> None:
        """A stage's actor was sent a task, or what that awaited from outside; whether it has all its inputs."""

    def _can_be_ahead(self, line: Line) -> bool:
        """Whether the stage's next task can be sent before its inputs are there, because its own worker makes them."""
        return self._has_room_ahead(line) and self.flow.comes(line.flow)

    def _has_room_ahead(self, line: Line) -> bool:
        """Whether a task that lacks inputs may be sent, were it for its actor and for the media clock."""
        stage, clock = line.flow, self.clock if line.is_steered else None
        if stage.settled is not None or not line.actor.has_room_ahead:
            return False
        return clock is None or clock.begins_at(stage.next) <= self.desk.now

    def _park(self) -> None:
        """Send the next tasks of a session that is steered chunk by chunk ahead of its next control, after all else.

        That may take any time: so only where nobody else lives, and not before the worker has said that the one before
        has begun, not to be in the way of that. Who comes to live there meanwhile has its turns as ever, because such a
        task is given the control when its own turn comes.
        """
        if self.state != "running" or not self.controls.is_stepped:
            return
        for line in self._lines.values():
            stage = line.flow
            if (
                line.is_given
                and max(stage.told, stage.finished) >= stage.dispatched
                and len(line.actor.tenants) == 1
                and self._has_room_ahead(line)
                and self.flow.comes(stage, outside=True)
            ):
                self._send(line, self.flow.lacking(stage))

    def _give(self, line: Line) -> None:
        """Send what has come from outside for the stage's task that awaits it."""
        flow, stage, desk, actor = self.flow, line.flow, self.desk, line.actor
        given, index = flow.given(stage), stage.outside
        inputs = {name: artifact for name, artifact in given.items() if artifact is not RESERVED}
        message = GiveInputs(
            session=self.id,
            pipeline=self.spec.name,
            stage=stage.name,
            epoch=self.epoch,
            stage_epoch=STAGE_EPOCH,
            index=index,
            inputs=inputs,
            reservation=None if len(inputs) == len(given) else self.controls.reservation(),
        )
        packed, reason = fitted(message, actor.worker.limits, inputs.values())
        if reason is not None:
            self._misfit(line, index, reason)
            return
        desk.send(actor.worker, message, packed)
        actor.unpark(self.id)
        self._sent(line, index, has_all=flow.supply(stage, index, given))

    def _misfit(self, line: Line, index: int, reason: str) -> None:
        """A worker doesn't accept what a task of its stage needs."""
        text = f"the inputs can't be sent to worker {line.actor.worker.name!r}: {reason}"
        self.desk.unfit[self.id] = Failure("stage", text, line.spec.name, index)

    def _forwarded(self, line: Line, event: TaskDone) -> None:
        """A worker gave what was made to the tasks that awaited it: with all that they need, they are like any other."""
        for follower in line.followers:
            if event.index in follower.flow.awaits and self.flow.supply(follower.flow, event.index, event.outputs):
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
