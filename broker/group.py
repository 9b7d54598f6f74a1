"""One worker group: its ranks, how far it is, and the numbered bodies that all of them are sent; see `groups`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeVar

from reelwire.group_messages import BROADCAST_BYTES_MIN, LeaderTensor
from reelwire.job_spec import JobSpec
from reelwire.messages import Artifact, HeldJob, InitializeStage, Member, Membership, RunJob, RunTask, WorkerHello
from reelwire.tensors import Inline
from reelwire.wire import Limits, Packed, pack

from .desk import Desk
from .peers import Peer

GroupState = Literal["gathering", "opening", "forming", "formed", "waiting", "over"]
SENT_MAX = 64
SENT_BYTES_MAX = 32 << 20
"""Newest bodies of a group that are kept for a rank whose connection lost them."""
Body = InitializeStage | RunTask | RunJob
B = TypeVar("B", InitializeStage, RunTask, RunJob)


@dataclass(slots=True, eq=False)
class Group:
    """One group.

    Attributes:
        name: its name.
        world: how many ranks it has.
        state: see the module.
        epoch: its newest forming, over all groups no number comes twice; while it gathers, what its ranks say.
        ranks: those that are attached; of a group that is over, those that were.
        awaited: while it waits for ranks that were attached: when each is taken for dead, in seconds.
        jobs: kinds of jobs that it does.
        job: the id of the job that it has; empty: none.
        sequence: number of the newest body that all ranks were sent.
        held: jobs that its leader had when it came.
        hellos: what each rank said, also those that are waited for.
        places: where each says that it belongs.
        secret: what its ranks say to each other first; empty once they have met.
    """

    name: str
    world: int
    state: GroupState = "gathering"
    epoch: int = 0
    ranks: dict[int, Peer] = field(default_factory=dict)
    jobs: tuple[JobSpec, ...] = ()
    job: str = ""
    sequence: int = 0
    held: tuple[HeldJob, ...] = ()
    hellos: dict[int, WorkerHello] = field(default_factory=dict)
    places: dict[int, Membership] = field(default_factory=dict)
    secret: bytes = b""
    awaited: dict[int, float] = field(default_factory=dict)
    _smallest: Limits | None = None
    _sent: deque[tuple[Body, Packed]] = field(default_factory=deque)
    _sent_bytes: int = 0
    _forgotten: int = 0

    @property
    def leader(self) -> Peer:
        """Rank 0, which speaks for all."""
        return self.ranks[0]

    @property
    def is_open(self) -> bool:
        """Whether it has formed, and none of its ranks leaves."""
        return self.state == "formed" and not any(peer.draining or peer.mute for peer in self.ranks.values())

    @property
    def takes_jobs(self) -> bool:
        """Whether a job may be sent to it now."""
        return bool(self.jobs) and not self.job and self.is_open

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that aren't attached."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)

    @property
    def members(self) -> tuple[Member, ...]:
        """All ranks, as they are told of each other."""
        return tuple(Member(rank, at.machine, at.pid, at.started) for rank, at in sorted(self.places.items()))

    @property
    def next_number(self) -> int:
        """The number of the body that is sent next."""
        return self.sequence + 1

    def number(self, body: B) -> B:
        """The body with the next number; it is used up when the body is sent.

        It says which of its tensors the leader alone is sent: the large ones, but for those in shared memory, which all
        ranks can read.
        """
        if isinstance(body, RunJob) or self.world == 1:
            return replace(body, sequence=self.next_number)
        return replace(body, sequence=self.next_number, broadcast=tuple(_large(body.artifacts)))

    def limits(self) -> Limits:
        """What all ranks accept."""
        if self._smallest is None:
            all_limits = [peer.limits for peer in self.ranks.values()] or [Limits()]
            least = {one.name: min(getattr(limits, one.name) for limits in all_limits) for one in fields(Limits)}
            self._smallest = Limits(**least)
        return self._smallest

    def send(self, desk: Desk, body: Body, packed: Packed | None = None) -> None:
        """Tell every rank the body that has the next number; `packed`: as it is sent, if that was made already.

        Its large tensors are said to the leader alone, which broadcasts them.
        """
        assert body.sequence == self.next_number, f"{self.name}: body {body.sequence} after {self.sequence}"
        self.sequence = body.sequence
        packed = packed or pack(body)
        rest, packed_rest = body, packed
        if not isinstance(body, RunJob) and body.broadcast:
            rest = _without_large(body)
            packed_rest = pack(rest)
        for rank, peer in self.ranks.items():
            if rank == 0:
                desk.send(peer, body, packed)
            else:
                desk.send(peer, rest, packed_rest)
        if self.world > 1:
            self._keep(rest, packed_rest)

    def send_again(self, desk: Desk, peer: Peer, after: int) -> bool:
        """Tell a rank that is back the bodies after the number `after`, which its old connection lost; False: they are gone.

        It isn't the leader, which gives up what it hadn't begun.
        """
        if after < self._forgotten:
            return False
        for body, packed in self._sent:
            if body.sequence > after:
                desk.send(peer, body, packed)
        return True

    def forget_sent(self) -> None:
        """Nobody wants what was sent by now: its leader has given up all that it hadn't begun."""
        self._sent.clear()
        self._sent_bytes = self._forgotten = 0

    def is_member(self, place: Membership) -> bool:
        """Whether a place is that of the very process that was a rank when it formed."""
        was = self.places.get(place.rank)
        if self.state not in ("formed", "waiting") or was is None or place.epoch != self.epoch:
            return False
        return replace(was, epoch=0, sequence=0) == replace(place, epoch=0, sequence=0)

    def part(self, rank: int, until: float) -> None:
        """A rank isn't attached any more; until `until`, in seconds, it is waited for."""
        del self.ranks[rank]
        self.awaited[rank] = until
        self.state = "waiting"

    def take(self, peer: Peer, place: Membership, hello: WorkerHello) -> None:
        """A rank belongs to it from now on."""
        rank = peer.rank
        self.ranks[rank], self.places[rank], self.hellos[rank] = peer, place, hello
        self.awaited.pop(rank, None)
        self._smallest = None
        if rank == 0:
            self.jobs, self.held = hello.jobs, hello.held

    def release(self, rank: int) -> None:
        """A rank doesn't belong to it any more."""
        del self.ranks[rank], self.places[rank], self.hellos[rank]
        self._smallest = None
        if rank == 0:
            self.jobs, self.held = (), ()

    def _keep(self, body: Body, packed: Packed) -> None:
        self._sent.append((body, packed))
        self._sent_bytes += _nbytes(packed)
        while len(self._sent) > SENT_MAX or self._sent_bytes > SENT_BYTES_MAX:
            oldest, packed = self._sent.popleft()
            self._sent_bytes -= _nbytes(packed)
            self._forgotten = oldest.sequence


def _large(artifacts: Mapping[str, Artifact]) -> Iterator[LeaderTensor]:
    for name, artifact in artifacts.items():
        for tensor, ref in artifact.tensors.items():
            if isinstance(ref.place, Inline) and ref.nbytes >= BROADCAST_BYTES_MIN:
                yield LeaderTensor(name, tensor, ref.dtype, ref.shape)


def _without_large(body: InitializeStage | RunTask) -> InitializeStage | RunTask:
    artifacts = body.artifacts
    for each in body.broadcast:
        artifact = artifacts[each.artifact]
        left = {name: ref for name, ref in artifact.tensors.items() if name != each.tensor}
        artifacts[each.artifact] = Artifact(artifact.values, left)
    return body.with_artifacts(artifacts)


def _nbytes(packed: Packed) -> int:
    return len(packed.body) + sum(memoryview(buffer).nbytes for buffer in packed.buffers)
