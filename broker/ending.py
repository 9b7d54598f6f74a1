"""How a session ends: delivered, closed, cancelled or failed; by its client, its stages, its workers, or time.

An end has one deadline. When that has passed the client is told, whatever is still to be released: a stage that is busy
with a neighbour's work is waited for behind the client's back, one that is hung costs its worker.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from reelwire.messages import (
    EndSession,
    Failure,
    OpenSession,
    SessionEnded,
    StageInitialized,
    StageReleased,
    TaskDone,
    TaskStarted,
)
from reelwire.spec import StreamSpec

from . import transitions as t
from .desk import Desk, described
from .flow import READY
from .making import PACE, Making
from .peers import Peer
from .transitions import State


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the session will have ended."""

    state: State
    failure: Failure | None = None


class Ending(Making):
    """What `Session` is made of when it ends.

    Args:
        desk: where actions and timers go.
        identity: the session's id and its token.
        owner: the client.
        request: what it asked for, with complete parameters.
        spec: the dataflow.

    Attributes:
        key: the client's key for it.
        request: what it asked for, until the stages have it.
        request_bytes: what that takes.
        outcome: how it will end, once that is known.
        end_by: when its end is to be over, in seconds, once it has begun.
        is_told: the client was told that it ended.
    """

    def __init__(
        self, desk: Desk, identity: tuple[str, str], owner: Peer, request: OpenSession, spec: StreamSpec
    ) -> None:
        """No end is in sight."""
        super().__init__(desk, identity, owner, request, spec)
        self.key = request.key
        self.request: OpenSession | None = request
        self.request_bytes = 0
        self.outcome: Outcome | None = None
        self.end_by: float | None = None
        self.is_told = False
        self._is_stopping = False

    @property
    def failure(self) -> Failure | None:
        """Why it will have ended, once that is known."""
        return None if self.outcome is None else self.outcome.failure

    @property
    def shown_state(self) -> str:
        """The state as people are told it: of a session that only waits for its reader, how it will have ended."""
        over = self.state == "releasing" and self.seats is not None and self.seats.all_gone
        return self.outcome.state if over and self.outcome is not None else self.state

    @abstractmethod
    def _go_on_releasing(self) -> None:
        """Give the next place back; after the last one the session ends, or waits for others."""

    def on_end(self, event: EndSession) -> None:
        """Deliver what was accepted, or drop it; then release."""
        if event.mode == "cancel":
            self._give_up(Outcome("cancelled"))
        elif self.state in ("ready", "running"):
            self._drain(Outcome("closed"), self.desk.config.close_timeout_s)
        elif self.state in ("initializing", "returning"):
            self._release(Outcome("closed"))

    def on_end_unplaced(self, event: EndSession) -> None:
        """Nothing was accepted, so there is nothing to deliver."""
        self._end(Outcome("cancelled" if event.mode == "cancel" else "closed"))

    def on_give_up(self, _event: t.ClientLeft | t.GraceExpired) -> None:
        """Nobody is there to take the rest."""
        if self.state == "opening":
            self._end(Outcome("cancelled"))
        else:
            self._give_up(Outcome("cancelled"))

    def on_client_lost(self, _event: t.ClientLost) -> None:
        """Go on without the client for a while, as the grace says, unless somebody waits for the end.

        Nobody can take the session up again in this version.
        """
        self.owner = None
        self.desk.log("info", "session_detached", session=self.id)
        if self._is_stopping:
            self._give_up(Outcome("cancelled"))
        else:
            self._timer("grace", self.desk.config.client_grace_s)

    def on_unfit(self, event: t.Unfit) -> None:
        """What wasn't sent can't be made up for: deliver what lies below it, then end."""
        failure = event.failure
        if self.state == "initializing":
            self._release(Outcome("failed", failure))
        elif self.state != "releasing" and (failure.index or 0) < self.flow.limit:
            self.desk.log("warning", "unfit", session=self.id, **described(failure))
            self.outcome = Outcome("failed", failure)
            self._drain(self.outcome, self.desk.config.close_timeout_s, upto=failure.index)

    def on_worker_lost(self, event: t.WorkerLost) -> None:
        """What lived at the worker is gone; the session can't go on, the other stages are released."""
        assert self.seats is not None, "lost without a place"
        self.seats.lose(event.worker)
        if self.state in ("releasing", "returning"):
            self._go_on_releasing()
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
        """Close the session if its client has taken nothing for so long; a lost client has its grace instead."""
        limit, now = self.desk.config.stall_s, self.desk.now
        if self._stalled_since is None:
            return
        since = now if self.owner is None else self._stalled_since
        if since + limit > now:
            self._timer("stall", since + limit - now)
        else:
            failure = Failure("stalled", f"no chunk was taken for {limit:g} s")
            self._give_up(Outcome("closed", failure))

    def on_drain_expired(self, _event: t.CloseExpired) -> None:
        """Stop waiting for stages. A client that doesn't read is waited for: `stall_s` ends that; so is the media clock."""
        if self._is_held_up():
            self._end_by(self.desk.now + self.desk.config.close_timeout_s)
        else:
            self._release(Outcome("failed", Failure("timeout", "what was accepted wasn't made in time")))

    def on_release_expired(self, _event: t.CloseExpired) -> None:
        """The client waits no longer; what is left to be released is released behind its back."""
        self._judge()
        self._maybe_end()

    def on_released(self, event: StageReleased) -> None:
        """Release the next stage."""
        assert self.seats is not None, "released without a place"
        if not self.seats.released(event.stage):
            self.refuse("orphans", event)
        self._go_on_releasing()

    def on_late_answer(self, event: StageInitialized | TaskStarted | TaskDone) -> None:
        """What a stage still says while the session is released is dropped; its actor's list is kept right."""
        assert self.seats is not None, "an answer without a place"
        if isinstance(event, StageInitialized):
            known = self.seats.initialized(event)
        elif isinstance(event, TaskStarted):
            known = self._begins(event)
        else:
            known = self._is_oldest_task(event.stage, event.index)
            if known:
                self._strike(event.stage, event.index)
                self.flow.fail(event.stage)
                self._forwarded(self._lines[event.stage], event)
                self._lend(self._lines[event.stage], event.index)
        self.refuse("late_answers" if known else "orphans", event)

    def on_keep_expired(self, _event: t.KeepExpired) -> None:
        """Nobody came for the last chunks."""
        self._drop_ring()
        self._maybe_end()

    def on_shutting_down(self, event: t.ShuttingDown) -> None:
        """Deliver what was accepted, in the time that there is; what nobody is there to take isn't waited for."""
        self._is_stopping = True
        who = "the broker" if event.worker is None else f"worker {event.worker.name!r}"
        outcome = Outcome("closed", Failure("shutdown", f"{who} stops"))
        if self.state == "opening":
            self._end(outcome)
        elif self.owner is None:
            self._give_up(outcome)
        elif self.state in ("initializing", "returning"):
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
        self.leases.drop(self.flow.limit)
        self.controls.cut(self.flow.limit)
        self._facts = {index: facts for index, facts in self._facts.items() if index < self.flow.limit}
        if self.state != "draining":
            self.state = "draining"
            self._drop_timers("idle")
            self._end_by(self.desk.now + within_s)
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
        self._drop_request()
        self.flow.clear()
        self.leases.clear()
        self.controls.cut(self.flow.limit)
        self._facts.clear()
        self._unqueue()
        self._drop_timers("placement", "idle", "stall", "pace")
        for gaps in self.timing.gaps.values():
            gaps.turn("", self.desk.now)
        in_time = self.desk.now + self.desk.config.close_timeout_s
        self._end_by(in_time if self.end_by is None else min(self.end_by, in_time))
        self._release_next()

    def _release_next(self) -> None:
        assert self.seats is not None, "released without a place"
        if self.seats.release_next() is None:
            self._drop_timers("close")
        elif self._is_overdue:
            self._judge()
        self._maybe_end()

    def _end_by(self, at: float) -> None:
        """Let the end be over at `at`, in seconds: there is one deadline, whatever is still to be released."""
        self.end_by = at
        self.desk.timers.set(("close", self.id), at)

    @property
    def _is_overdue(self) -> bool:
        return self.end_by is not None and self.end_by <= self.desk.now

    def _judge(self) -> None:
        """Give up the workers of hung stages that owe an answer, and look again when the next one would be hung."""
        assert self.seats is not None, "judged without a place"
        later: list[float] = []
        for actor in self.seats.owing():
            hung_at = self.desk.hung_at(actor)
            assert hung_at is not None, "an answer is owed by an actor that owes none"
            if hung_at <= self.desk.now:
                self.desk.give_up(actor.worker, f"stage {actor.offer.stage!r} hung while {self.id} ended")
            else:
                later.append(hung_at)
        if later:
            self.desk.timers.set(("close", self.id), min(later))

    def _maybe_end(self) -> None:
        """End when the stages are gone and the client has everything; for the client also when its time is over."""
        assert self.seats is not None, "ended without a place"
        assert self.outcome is not None, "ended without an outcome"
        if self.ring:
            if self.seats.all_gone:
                self._timer("keep", self.desk.config.result_keep_s)
        elif self.seats.all_gone:
            self._end(self.outcome)
        elif self._is_overdue:
            self._tell_end(self.outcome)

    def _end(self, outcome: Outcome) -> None:
        self._tell_end(outcome)
        self.outcome = outcome
        self.state = outcome.state
        self._drop_request()
        self._drop_timers(*t.EXPIRED)
        self.desk.touched.pop(self.id, None)
        self.desk.rekeyed.pop(self.id, None)
        self.desk.unsettled.pop(self.id, None)
        self.desk.unfit.pop(self.id, None)
        self.desk.ended.append(self.id)

    def _tell_end(self, outcome: Outcome) -> None:
        """Say once how the session ended; from then on it is nobody's."""
        if self.is_told:
            return
        self.is_told = True
        self._tell(SessionEnded(self.id, outcome.state, outcome.failure))
        self.desk.counters[f"sessions_{outcome.state}"] += 1
        self.desk.log("info", "session_ended", session=self.id, state=outcome.state, **described(outcome.failure))
        self._drop_timers("grace")
        if self.owner is not None:
            self.owner.sessions.pop(self.id)
            self.owner.keys.pop(self.key)
            self.owner = None

    def _drop_request(self) -> None:
        self.request = None
        self.desk.request_bytes -= self.request_bytes
        self.request_bytes = 0

    def _drop_ring(self) -> None:
        self.flow.acknowledge(self.flow.next_commit)
        self.leases.abandon()
        self.ring.clear()

    def _unqueue(self) -> None:
        """Look for no more controls, and leave the queues of actors whose stage has nothing to do any more."""
        self.desk.touched.pop(self.id, None)
        if self.seats is not None:
            for name in self.flow.stages:
                if not self.flow.is_ready(name):
                    self.seats.actor(name).waiting.discard(self.id)

    def _is_held_up(self) -> bool:
        """Whether nothing that is to be made runs or waits for an actor, but for the client or for the media clock."""
        is_paced = False
        for stage in self.flow.stages.values():
            lack = self._lack(stage)
            if min(stage.dispatched, self.flow.limit) > stage.finished or lack == READY:
                return False
            is_paced = is_paced or lack == PACE
        return is_paced or self._stalled_since is not None
