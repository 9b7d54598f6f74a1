"""A session's places at the actors: initialized one after the other, and released one after the other.

What the initialization of one stage hands out is given to all later ones. A release is sent at most once if it
succeeds, tried again a bounded number of times if it doesn't, and a stage that can't be released doesn't keep the
others from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reelwire.messages import (
    Artifact,
    Failure,
    InitializeStage,
    OpenSession,
    ReleaseStage,
    StageFailed,
    StageInitialized,
)
from reelwire.spec import StreamSpec
from reelwire.wire import Packed

from .actors import Actor, Errand
from .desk import Desk
from .fitting import fitted, largest_field
from .leases import Leases, sharable
from .peers import Peer

STAGE_EPOCH = 1

SeatState = Literal["kept", "initializing", "live", "releasing", "gone"]


@dataclass(slots=True)
class Seat:
    """A session's place at one actor; `errands` are what was sent there and isn't answered."""

    actor: Actor
    state: SeatState = "kept"
    attempts: int = 0
    errands: set[Errand] = field(default_factory=set)


class Seats:
    """All places of one session.

    Args:
        session: its id.
        request: what it asked for; its parameters are complete.
        spec: the dataflow.
        actors: stage name to actor; each has room.
        desk: where actions go.
        leases: what the session's stages and its client read of shared memory.

    Attributes:
        seats: stage name to place.
        error: the first error of a release.
        shared: stage name to the artifacts that all their readers can take from its worker's shared memory.
    """

    def __init__(
        self,
        session: str,
        epoch: int,
        request: OpenSession,
        spec: StreamSpec,
        actors: Mapping[str, Actor],
        desk: Desk,
        leases: Leases,
    ) -> None:
        """Take a slot at each actor."""
        self._session = session
        self._epoch = epoch
        self._request: OpenSession | None = request
        self._spec = spec
        self._desk = desk
        self._leases = leases
        self._handed = Artifact()
        self.seats = {stage: Seat(actor) for stage, actor in actors.items()}
        self.error: Failure | None = None
        self.shared: dict[str, tuple[str, ...]] = {}
        for actor in actors.values():
            actor.admit(session)

    def actor(self, stage: str) -> Actor:
        """The actor of a stage."""
        return self.seats[stage].actor

    def share(self, client: Peer | None) -> None:
        """Find out anew what may be in shared memory: the session was placed, or somebody can open more than before."""
        workers = {stage: seat.actor.worker for stage, seat in self.seats.items()}
        ranks = {stage: seat.actor.readers for stage, seat in self.seats.items() if seat.actor.group is not None}
        self.shared = sharable(self._spec, workers, client, ranks)

    def initialize_next(self) -> bool:
        """Have the next stage initialized; False when all are."""
        for stage in self._spec.initialize_order:
            seat = self.seats[stage]
            if seat.state == "kept":
                self._initialize(stage, seat)
                return True
        self._request, self._handed = None, Artifact()
        return False

    def initialized(self, message: StageInitialized) -> bool:
        """A stage has its caches; whether it was waited for."""
        seat = self.seats[message.stage]
        if not self._answered(seat, "initialize"):
            return False
        seat.actor.resize(self._session, message.cache_bytes)
        self._desk.freed = True
        if seat.state == "initializing":
            seat.state = "live"
            handed = message.handed
            self._handed = Artifact(
                {**self._handed.values, **handed.values}, {**self._handed.tensors, **handed.tensors}
            )
        return True

    def not_initialized(self, message: StageFailed) -> bool:
        """A stage couldn't make its caches; whether it was waited for. It is released like the others."""
        seat = self.seats[message.stage]
        if not self._answered(seat, "initialize"):
            return False
        if seat.state == "initializing":
            seat.state = "live"
        return True

    def release_next(self) -> str | None:
        """Have the next stage released, unless one is being released; its name, or None when there is none left."""
        for stage in self._spec.releases():
            seat = self.seats[stage]
            if seat.state == "releasing":
                return stage
            if seat.state == "kept":
                self._vacate(stage, seat)
            elif seat.state != "gone":
                self._release(stage, seat)
                return stage
        return None

    def released(self, stage: str) -> bool:
        """A stage dropped its caches; whether it was waited for."""
        seat = self.seats[stage]
        if not self._answered(seat, "release"):
            return False
        self._vacate(stage, seat)
        return True

    def not_released(self, message: StageFailed) -> bool:
        """A release raised: try again, or leave it; whether it was waited for."""
        seat = self.seats[message.stage]
        if not self._answered(seat, "release"):
            return False
        if self.error is None:
            self.error = message.failure
        if seat.attempts < self._desk.config.release_attempts:
            self._release(message.stage, seat)
        else:
            self._desk.counters["releases_failed"] += 1
            self._desk.log("error", "stage_not_released", session=self._session, stage=message.stage)
            self._vacate(message.stage, seat)
        return True

    def lose(self, worker: Peer) -> None:
        """A worker is gone with everything that was there."""
        for stage, seat in self.seats.items():
            if seat.actor.worker is worker and seat.state != "gone":
                self._vacate(stage, seat)

    @property
    def all_gone(self) -> bool:
        """Whether no actor holds anything of the session."""
        return all(seat.state == "gone" for seat in self.seats.values())

    def owing(self) -> list[Actor]:
        """Actors that were sent something for the session and haven't answered."""
        return [seat.actor for seat in self.seats.values() if seat.errands or self._session in seat.actor.tasks]

    def _initialize(self, stage: str, seat: Seat) -> None:
        assert self._request is not None, "initialized after all were"
        request, names = self._request, self._spec.stage(stage).request_tensors
        group = seat.actor.group
        message = InitializeStage(
            session=self._session,
            pipeline=self._spec.name,
            stage=stage,
            epoch=self._epoch,
            stage_epoch=STAGE_EPOCH,
            chunks=request.chunks,
            parameters=request.parameters,
            tensors={name: request.tensors[name] for name in names if name in request.tensors},
            handed=self._handed,
        )
        if group is not None:
            message = group.number(message)
        packed, reason = fitted(message, seat.actor.limits)
        if reason is not None:
            text = f"worker {seat.actor.worker.name!r} can't be told of the session: {reason}"
            self._desk.unfit[self._session] = Failure("request", text, stage, field=largest_field(request))
            return
        seat.state = "initializing"
        self._send(seat, "initialize", message, packed)

    def _release(self, stage: str, seat: Seat) -> None:
        self._request, self._handed = None, Artifact()
        seat.state = "releasing"
        seat.attempts += 1
        self._send(seat, "release", ReleaseStage(self._session, self._spec.name, stage, self._epoch, STAGE_EPOCH))

    def _send(
        self, seat: Seat, errand: Errand, message: InitializeStage | ReleaseStage, packed: Packed | None = None
    ) -> None:
        seat.errands.add(errand)
        seat.actor.send_errand(errand, self._desk.now)
        self._desk.watch(seat.actor)
        if seat.actor.group is not None and isinstance(message, InitializeStage):
            seat.actor.group.send(self._desk, message, packed)
        else:
            self._desk.send(seat.actor.worker, message, packed)

    def _answered(self, seat: Seat, errand: Errand) -> bool:
        if errand not in seat.errands:
            return False
        seat.errands.remove(errand)
        seat.actor.errands[errand] -= 1
        self._desk.answered(seat.actor)
        self._desk.watch(seat.actor)
        return True

    def _vacate(self, stage: str, seat: Seat) -> None:
        seat.state = "gone"
        self._leases.vacated(stage, lost=seat.actor.worker.gone)
        seat.actor.errands.subtract(seat.errands)
        seat.errands.clear()
        seat.actor.evict(self._session)
        self._desk.watch(seat.actor)
        self._desk.stirred[seat.actor] = None
        self._desk.freed = True
        worker = seat.actor.worker
        if all(other.state == "gone" or other.actor.worker is not worker for other in self.seats.values()):
            worker.sessions.pop(self._session, None)

    def check(self) -> None:
        """Assert that the places and the actors agree."""
        for stage, seat in self.seats.items():
            assert (seat.state == "gone") == (self._session not in seat.actor.tenants), f"{stage}: place and tenant"
            assert seat.state == "gone" or not seat.actor.worker.gone, f"{stage}: its worker is gone"
            assert seat.state != "gone" or not seat.errands, f"{stage}: an errand without a place"
        # A stage that is still being initialized when the session ends answers beside the first release.
        for state in ("initializing", "releasing"):
            assert sum(seat.state == state for seat in self.seats.values()) <= 1, f"{state}: one at a time"
