"""One session as a state machine: `Session.handle(event)` looks its handler up in `transitions.TRANSITIONS`.

The session owns its dataflow (`flow`), what steers it (`controls`), its places at the actors (`seats`) and its clock
(`timing`). It ends exactly once; its first outcome holds. What happens while it runs stands in `making`, how it ends in
`ending`; here it begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from reelwire.messages import Failure, OpenSession, StageFailed, StageInitialized
from reelwire.spec import StreamSpec

from . import transitions as t
from .desk import Desk
from .ending import Ending, Outcome
from .flow import READY, RESERVED
from .making import PACE
from .peers import Peer
from .seats import STAGE_EPOCH, Seats
from .steering import STEERED
from .transitions import TRANSITIONS


class Session(Ending):
    """One stream, from its request to its end.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        attachment: the client's number when it asked.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Wait for room at the workers."""
        super().__init__(desk, identity, owner, request, spec)
        self.attachment = owner.attachment
        self._placed_by = desk.now + desk.config.placement_timeout_s
        self._timer("placement", desk.config.placement_timeout_s)

    def handle(self, event: t.SessionEvent) -> None:
        """Take one event in."""
        step = TRANSITIONS.get((self.state, type(event)))
        if step is None:
            assert not isinstance(event, get_args(t.Inner)), f"{type(event).__name__} while {self.state}"
            self.refuse("out_of_protocol", event)
            return
        before = self.state
        getattr(self, step.handler)(event)
        assert self.state == before or self.state in step.to, f"{before} -> {self.state} by {type(event).__name__}"
        if self.id not in self.desk.unsettled:  # else it is told when it is clear how far controls may go
            self._announce()

    def is_current(self, epoch: int, stage_epoch: int) -> bool:
        """Whether a stage speaks of this attempt at the session, not of an earlier one."""
        return (epoch, stage_epoch) == (self.epoch, STAGE_EPOCH)

    def on_placed(self, event: t.Placed) -> None:
        """Take the places and have the first stage initialized."""
        assert self.request is not None, "placed without a request"
        assert self.seats is None, "placed twice"
        self._drop_timers("placement")
        self.seats = Seats(self.id, self.epoch, self.request, self.spec, event.actors, self.desk, self.leases)
        self.seats.share(self.owner)
        for actor in event.actors.values():
            actor.worker.sessions[self.id] = self
        self.state = "initializing"
        self.seats.initialize_next()

    def on_placement_expired(self, _event: t.PlacementExpired) -> None:
        """Nobody had room."""
        waited = self.desk.config.placement_timeout_s
        advice = self.desk.config.retry_after_s
        outcome = Outcome("failed", Failure("overload", f"no room within {waited:g} s", retry_after_s=advice))
        if self.state == "opening":
            self._end(outcome)
        else:
            self._release(outcome)

    def on_initialized(self, event: StageInitialized) -> None:
        """Go on with the next stage; after the last one the session is ready and its prefetch begins."""
        assert self.seats is not None, "initialized without a place"
        if not self.seats.initialized(event):
            self.refuse("orphans", event)
            return
        offer = self.seats.actor(event.stage).offer
        if event.cache_bytes > offer.cache_bytes_max:
            worker = self.seats.actor(event.stage).worker.name
            text = f"the session takes {event.cache_bytes} bytes at stage {event.stage!r} of worker {worker!r}"
            text += f"; accepted: {offer.cache_bytes_max}"
            self._release(Outcome("failed", Failure("request", text, event.stage, field="parameters")))
        elif not self.seats.initialize_next():
            self.state = "ready"
            self._drop_request()
            now = self.desk.now
            self.timing.ready(now)
            self.controls.active_at = now
            self._timer("idle", self.desk.config.control_idle_s)
            self.desk.log("info", "session_ready", session=self.id)
            self._begin()

    def on_stage_failed(self, event: StageFailed) -> None:
        """A stage raised: while it was initialized, at a chunk, or while it was released."""
        assert self.seats is not None, "failed without a place"
        failure = replace(event.failure, stage=event.stage, index=event.index if event.phase == "run" else None)
        if event.phase == "release" and self.state in ("releasing", "returning"):
            if not self.seats.not_released(event):
                self.refuse("orphans", event)
            self._go_on_releasing()
        elif event.phase == "initialize" and self.state in ("initializing", "releasing"):
            if not self.seats.not_initialized(event):
                self.refuse("orphans", event)
            elif self.state == "initializing":
                self._not_initialized(failure)
        elif event.phase == "run" and event.index is not None and self._is_oldest_task(event.stage, event.index):
            self._strike(event.stage, event.index)
            if self.state == "releasing":
                self.flow.fail(event.stage)
                self.refuse("late_answers", event)
            else:
                self._stage_failed(failure)
        else:
            self.refuse("orphans", event)

    def _not_initialized(self, failure: Failure) -> None:
        """A stage that has no room after all sends the session back to those that wait for a place."""
        assert self.seats is not None, "refused without a place"
        if failure.kind != "overload":
            self._release(Outcome("failed", failure))
            return
        if self._placed_by <= self.desk.now:
            advice = failure.retry_after_s or self.desk.config.retry_after_s
            self._release(Outcome("failed", replace(failure, retry_after_s=advice)))
            return
        self.desk.refuses(self.seats.actor(failure.stage))
        self.desk.log("info", "session_returned", session=self.id, stage=failure.stage, reason=failure.message)
        self.state = "returning"
        self._timer("placement", self._placed_by - self.desk.now)
        self._go_on_releasing()

    def _go_on_releasing(self) -> None:
        if self.state == "releasing":
            self._release_next()
        elif self._seats_left():
            self.seats = None
            self.epoch += 1
            self.state = "opening"
            self.desk.returned.append(self.id)

    def _seats_left(self) -> bool:
        """Have the next place given back; whether none is left."""
        assert self.seats is not None, "given back without a place"
        return self.seats.release_next() is None

    def check(self) -> None:
        """Assert the invariants."""
        flow = self.flow
        flow.check()
        self.leases.check()
        assert (self.seats is None) == (self.state == "opening"), f"{self.state} and its places don't fit"
        if self.seats is not None:
            self.seats.check()
        assert [chunk.index for chunk in self.ring] == list(range(flow.acked, flow.next_commit)), "the ring has a gap"
        made = self.state in ("ready", "running", "draining")
        accepted = range(flow.next_commit, min(flow.next_control_index, flow.limit))
        assert sorted(self.controls.given) == (list(accepted) if made else []), "chunks and their controls don't agree"
        self.controls.check()
        self._check_client(made=made)
        if made:
            self._check_lines()
        self._check_settled(made=made)
        self._check_pace(made=made)
        self._check_reservation()
        assert all(flow.next_commit <= index < flow.limit for index in self._facts), "facts of a chunk that is over"
        assert (self.outcome is not None) == (self.state in ("draining", "releasing")), "the end is known too early"
        self.timing.check(sum(edge.capacity for edge in flow.edges.values()) + 2 * len(flow.stages))

    def _check_lines(self) -> None:
        """Every stage that could go on has its turn, and what the others lack is what they are said to wait for."""
        for name, line in self._lines.items():
            lack = self._lack(line.flow)
            assert not line.flow.is_stale, f"{name}: nobody looked at it"
            if name == self._steered and self._paced_until is not None:
                continue  # it may be time to look, but the timer's turn hasn't come
            assert lack != READY or line.flow.settled is not None or self.id in line.actor.waiting, f"{name}: no turn"
            assert line.gaps.cause == self._cause(line.flow, lack), f"{name}: said to wait for {line.gaps.cause!r}"

    def _check_settled(self, *, made: bool) -> None:
        for name, stage in self.flow.stages.items():
            if stage.settled is not None:
                assert made, "a settled output outlives its session"
                assert self.seats is not None, "settled without a place"
                assert self.id not in self.seats.actor(name).waiting, "a settled stage is to run again"
                assert stage.finished < stage.dispatched or not self.flow.is_ready(name), (
                    "a settled output isn't reused"
                )

    def _check_pace(self, *, made: bool) -> None:
        is_set = ("pace", self.id) in self.desk.timers
        assert is_set == (self._paced_until is not None and made), "the media clock wakes nobody"
        if self.clock is not None and made:
            window = min(*(edge.capacity for edge in self.flow.outputs), self.credit.chunks - self.flow.acked)
            assert self.clock.ahead == window, "ahead of the picture by another window than the client's"
        for name, stage in self.flow.stages.items() if made else ():
            if self._lack(stage) == PACE:
                assert self.seats is not None, "paced without a place"
                assert self.clock is not None, "paced without a clock"
                assert self._paced_until == self.clock.begins_at(stage.dispatched), "woken at another time"
                assert self.id not in self.seats.actor(name).waiting, "a chunk that may not begin has its turn"

    def _check_client(self, *, made: bool) -> None:
        """What is the client's to take: sent within its credit, or complete and withheld for want of it."""
        is_withheld = self.flow.complete() is not None
        assert not made or (self._stalled_since is not None) == (bool(self.ring) or is_withheld), "waits for nobody"
        assert not is_withheld or not self.credit.allows(self.flow.next_commit), "withheld, and there is credit"
        assert self.flow.next_commit <= self.credit.chunks, "more chunks were sent than the client takes"
        for chunk in self.ring:
            for one in chunk.timing.stages.values():
                assert 0 <= one.ready_s <= one.admitted_s <= one.started_s <= one.completed_s, "a stage runs backwards"
        is_watched = ("stall", self.id) in self.desk.timers
        assert not made or self._stalled_since is None or is_watched, "waits for its client without end"

    def _check_reservation(self) -> None:
        unbound = self.controls.unbound
        if unbound is not None:
            stage = self.flow.stages[self._steered]
            assert stage.finished <= unbound < self.flow.next_control_index, "a chunk was made of an open reservation"
            held = self.flow.control.held.get(unbound)
            assert (held is RESERVED) == (stage.started <= unbound), "an open reservation isn't on its edge"
        takes = self.state in STEERED and self._takes_control()
        assert not takes or self.id in self.desk.touched, "a control could be taken, and nobody looks"
