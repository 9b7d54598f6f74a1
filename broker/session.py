"""One session as a state machine: `Session.handle(event)` looks its handler up in `transitions.TRANSITIONS`.

The session owns its dataflow (`flow`), what steers it (`controls`), its places at the actors (`seats`) and its clock
(`timing`). It ends exactly once; its first outcome holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from reelwire.messages import (
    EndSession,
    Failure,
    OpenSession,
    SessionEnded,
    StageFailed,
    StageInitialized,
    StageReleased,
    TaskDone,
    TaskStarted,
)
from reelwire.spec import StreamSpec

from . import transitions as t
from .desk import Desk, described
from .making import Making
from .peers import Peer
from .seats import STAGE_EPOCH, Seats
from .transitions import TRANSITIONS, State


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the session will have ended."""

    state: State
    failure: Failure | None = None


class Session(Making):
    """One stream, from its request to its end.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        key: the client's key for it.
        attachment: the client's number when it asked.
        outcome: how it will end, once that is known.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """Wait for room at the workers."""
        super().__init__(desk, identity, owner, request, spec)
        self.key = request.key
        self.attachment = owner.attachment
        self.outcome: Outcome | None = None
        self._request: OpenSession | None = request
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
        self._announce()

    def is_current(self, epoch: int, stage_epoch: int) -> bool:
        """Whether a stage speaks of this attempt at the session, not of an earlier one."""
        return (epoch, stage_epoch) == (self.epoch, STAGE_EPOCH)

    # --- opening and initializing --------------------------------------------------------------------------------------

    def on_placed(self, event: t.Placed) -> None:
        """Take the places and have the first stage initialized."""
        assert self._request is not None, "placed twice"
        self._drop_timers("placement")
        self.seats = Seats(self.id, self.epoch, self._request, self.spec, event.actors, self.desk)
        self._request = None
        for actor in event.actors.values():
            actor.worker.sessions[self.id] = self
        self.state = "initializing"
        self.seats.initialize_next()

    def on_placement_expired(self, _event: t.PlacementExpired) -> None:
        """Nobody had room."""
        waited = self.desk.config.placement_timeout_s
        advice = self.desk.config.retry_after_s
        self._end_unplaced(Outcome("failed", Failure("overload", f"no room within {waited:g} s", retry_after_s=advice)))

    def on_end_unplaced(self, event: EndSession) -> None:
        """Nothing was accepted, so there is nothing to deliver."""
        self._end_unplaced(Outcome("cancelled" if event.mode == "cancel" else "closed"))

    def on_initialized(self, event: StageInitialized) -> None:
        """Go on with the next stage; after the last one the session is ready and its prefetch begins."""
        assert self.seats is not None, "initialized without a place"
        if not self.seats.initialized(event):
            self.refuse("orphans", event)
        elif not self.seats.initialize_next():
            self.state = "ready"
            now = self.desk.now
            self.timing.ready(now)
            self.controls.active_at = now
            self._timer("idle", self.desk.config.control_idle_s)
            self.desk.log("info", "session_ready", session=self.id)
            self._prefetch()
            self._stir()

    # --- the end -------------------------------------------------------------------------------------------------------

    def on_end(self, event: EndSession) -> None:
        """Deliver what was accepted, or drop it; then release."""
        if event.mode == "cancel":
            self._give_up(Outcome("cancelled"))
        elif self.state in ("ready", "running"):
            self._drain(Outcome("closed"), self.desk.config.close_timeout_s)
        elif self.state == "initializing":
            self._release(Outcome("closed"))

    def on_give_up(self, _event: t.ClientLeft | t.GraceExpired) -> None:
        """Nobody is there to take the rest."""
        if self.state == "opening":
            self._end_unplaced(Outcome("cancelled"))
        else:
            self._give_up(Outcome("cancelled"))

    def on_client_lost(self, _event: t.ClientLost) -> None:
        """Go on without the client for a while."""
        self.owner = None
        self._timer("grace", self.desk.config.client_grace_s)
        self.desk.log("info", "session_detached", session=self.id)

    def on_stage_failed(self, event: StageFailed) -> None:
        """A stage raised: while it was initialized, at a chunk, or while it was released."""
        assert self.seats is not None, "failed without a place"
        failure = replace(event.failure, stage=event.stage, index=event.index if event.phase == "run" else None)
        if event.phase == "release" and self.state == "releasing":
            if not self.seats.not_released(event):
                self.refuse("orphans", event)
            self._release_next()
        elif event.phase == "initialize" and self.state in ("initializing", "releasing"):
            if not self.seats.not_initialized(event):
                self.refuse("orphans", event)
            elif self.state == "initializing":
                self._release(Outcome("failed", failure))
        elif event.phase == "run" and event.index is not None and self._is_oldest_task(event.stage, event.index):
            self._strike(event.stage, event.index)
            if self.state == "releasing":
                self.flow.fail(event.stage)
                self.refuse("late_answers", event)
            else:
                self._stage_failed(failure)
        else:
            self.refuse("orphans", event)

    def on_worker_lost(self, event: t.WorkerLost) -> None:
        """What lived at the worker is gone; the session can't go on, the other stages are released."""
        assert self.seats is not None, "lost without a place"
        self.seats.lose(event.worker)
        if self.state == "releasing":
            self._release_next()
        else:
            failure = Failure("worker_lost", f"worker {event.worker.name!r} was lost: {event.reason}")
            self._release(Outcome("failed", failure))

    def on_idle_expired(self, _event: t.IdleExpired) -> None:
        """Close the session if nobody has steered it and nothing was made for so long; a held key is activity."""
        limit, now = self.desk.config.control_idle_s, self.desk.now
        since = max(self.controls.active_at, self.timing.committed_at or 0.0)
        if self.controls.holds or self.flow.next_commit < self.flow.next_control_index:
            since = now
        if since + limit > now:
            self._timer("idle", since + limit - now)
        else:
            failure = Failure("timeout", f"no control for {limit:g} s")
            self._drain(Outcome("closed", failure), self.desk.config.close_timeout_s)

    def on_stall_expired(self, _event: t.StallExpired) -> None:
        """Close the session if its client has acknowledged nothing for so long; a lost client has its grace instead."""
        limit, now = self.desk.config.stall_s, self.desk.now
        since = now if self.owner is None else self._stalled_since
        if not self.ring:
            return
        if since + limit > now:
            self._timer("stall", since + limit - now)
        else:
            failure = Failure("stalled", f"no chunk was taken for {limit:g} s")
            self._give_up(Outcome("closed", failure))

    def on_drain_expired(self, _event: t.CloseExpired) -> None:
        """Stop waiting for stages; a hung one costs its worker. A client that doesn't read isn't a hung stage."""
        assert self.seats is not None, "drained without a place"
        limit_s = self.desk.config.close_timeout_s
        if self._waits_for_client():
            self._timer("close", limit_s)
            return
        for stage, seat in self.seats.seats.items():
            oldest = next(iter(seat.actor.outstanding.values()), None)
            if oldest is not None and seat.actor.has_task_of(self.id) and oldest.sent_at + limit_s <= self.desk.now:
                self.desk.give_up(seat.actor.worker, f"stage {stage!r} hung while {self.id} drained")
        self._release(Outcome("failed", Failure("timeout", "what was accepted wasn't made in time")))

    def on_release_expired(self, _event: t.CloseExpired) -> None:
        """A stage that doesn't answer its release is hung, and so its worker is lost."""
        assert self.seats is not None, "released without a place"
        worker = self.seats.releasing_worker()
        if worker is not None:
            self.desk.give_up(worker, f"a stage didn't release {self.id} in time")

    def on_released(self, event: StageReleased) -> None:
        """Release the next stage."""
        assert self.seats is not None, "released without a place"
        if not self.seats.released(event.stage):
            self.refuse("orphans", event)
        self._release_next()

    def on_late_answer(self, event: StageInitialized | TaskStarted | TaskDone) -> None:
        """What a stage still says while the session is released is dropped; its actor's list is kept right."""
        assert self.seats is not None, "an answer without a place"
        if isinstance(event, StageInitialized):
            known = self.seats.initialized(event)
        elif isinstance(event, TaskStarted):
            known = self._task_key(event.index) in self.seats.actor(event.stage).outstanding
        else:
            known = self._is_oldest_task(event.stage, event.index)
            if known:
                self._strike(event.stage, event.index)
                self.flow.fail(event.stage)
        self.refuse("late_answers" if known else "orphans", event)

    def on_keep_expired(self, _event: t.KeepExpired) -> None:
        """Nobody came for the last chunks."""
        self._drop_ring()
        self._maybe_end()

    def on_shutting_down(self, event: t.ShuttingDown) -> None:
        """Deliver what was accepted, in the time that the broker has."""
        outcome = Outcome("closed", Failure("shutdown", "the broker stops"))
        if self.state == "opening":
            self._end_unplaced(outcome)
        elif self.state == "initializing":
            self._release(outcome)
        elif self.state in ("ready", "running"):
            self._drain(outcome, event.within_s)

    def _stage_failed(self, failure: Failure) -> None:
        """Make what lies below the failed chunk, then end; of several failures the lowest chunk's counts."""
        self.desk.log("warning", "stage_failed", session=self.id, **described(failure))
        assert failure.index is not None, "a failure of a task without its chunk"
        self.flow.fail(failure.stage)
        if failure.index < self.flow.limit:
            self.outcome = Outcome("failed", failure)
            self._drain(self.outcome, self.desk.config.close_timeout_s, upto=failure.index)
        else:
            self._stir()
            self._all_made()

    def _drain(self, outcome: Outcome, within_s: float, upto: int | None = None) -> None:
        """Make what was accepted (below `upto`, if there is such a bound), nothing else."""
        self.outcome = self.outcome or outcome
        accepted = self.flow.next_control_index
        self.flow.cut(accepted if upto is None else min(accepted, upto))
        self._facts = {index: facts for index, facts in self._facts.items() if index < self.flow.limit}
        if self.state != "draining":
            self.state = "draining"
            self._drop_timers("idle")
            self._timer("close", within_s)
        self._unqueue()
        self._stir()
        self._all_made()

    def _all_made(self) -> None:
        """Release the stages when no chunk is left to be made; end when none is left to be taken."""
        if self.state == "releasing":
            self._maybe_end()
        elif self.state in ("running", "draining") and self.flow.next_commit == self.flow.limit:
            if self.flow.next_commit == self.chunks:
                self.outcome = Outcome("completed")
            assert self.outcome is not None, "all made, and nobody asked for the end"
            self._release(self.outcome)

    def _give_up(self, outcome: Outcome) -> None:
        """Drop what is there for the client, and release."""
        self._drop_ring()
        if self.state == "releasing":
            self._maybe_end()
        else:
            self._release(outcome)

    def _release(self, outcome: Outcome) -> None:
        """Make nothing more, and give the places back; an outcome that names a failure holds."""
        if self.outcome is None or self.outcome.failure is None:
            self.outcome = outcome
        self.state = "releasing"
        self.flow.clear()
        self._snapshots.clear()
        self._facts.clear()
        self._unqueue()
        self._drop_timers("idle", "stall", "close")
        for gaps in self.timing.gaps.values():
            gaps.turn("", self.desk.now)
        self._release_next()

    def _release_next(self) -> None:
        assert self.seats is not None, "released without a place"
        if self.seats.release_next() is None:
            self._drop_timers("close")
            self._maybe_end()
        else:
            self._timer("close", self.desk.config.close_timeout_s)

    def _maybe_end(self) -> None:
        """End when the stages are gone and the client has everything."""
        assert self.seats is not None, "ended without a place"
        assert self.outcome is not None, "ended without an outcome"
        if not self.seats.all_gone:
            return
        if self.ring:
            self._timer("keep", self.desk.config.result_keep_s)
        else:
            self._end(self.outcome)

    def _end_unplaced(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.state = outcome.state
        self._drop_timers(*t.EXPIRED)
        self.desk.touched.pop(self.id, None)
        self.desk.unsettled.pop(self.id, None)
        self.desk.ended.append(self.id)
        self._tell(SessionEnded(self.id, outcome.state, outcome.failure))
        self.desk.counters[f"sessions_{outcome.state}"] += 1
        self.desk.log("info", "session_ended", session=self.id, state=outcome.state, **described(outcome.failure))

    def _drop_ring(self) -> None:
        self.flow.acknowledge(self.flow.next_commit)
        self.ring.clear()

    def _unqueue(self) -> None:
        """Look for no more controls, and leave the queues of actors whose stage has nothing to do any more."""
        self.desk.touched.pop(self.id, None)
        if self.seats is not None:
            for name in self.flow.stages:
                if not self.flow.is_ready(name):
                    self.seats.actor(name).waiting.pop(self.id, None)

    def _waits_for_client(self) -> bool:
        """Whether nothing that is to be made runs or waits for an actor: then the full output is what holds it up."""
        limit = self.flow.limit
        for name, stage in self.flow.stages.items():
            if min(stage.dispatched, limit) > stage.finished or self.flow.is_ready(name):
                return False
        return bool(self.ring)

    def check(self) -> None:
        """Assert the invariants."""
        flow = self.flow
        flow.check()
        assert (self.seats is None) == (self.state == "opening"), f"{self.state} and its places don't fit"
        if self.seats is not None:
            self.seats.check()
        assert [chunk.index for chunk in self.ring] == list(range(flow.acked, flow.next_commit)), "the ring has a gap"
        made = self.state in ("ready", "running", "draining")
        assert set(self._snapshots) == (set(range(flow.next_commit, flow.next_control_index)) if made else set())
        assert all(flow.next_commit <= index < flow.limit for index in self._facts), "facts of a chunk that is over"
        assert (self.outcome is not None) == (self.state in ("draining", "releasing")), "the end is known too early"
        self.timing.check(sum(edge.capacity for edge in flow.edges.values()) + 2 * len(flow.stages))
