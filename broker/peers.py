"""Clients and workers: who is attached, under which number, and when each was last heard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from reelwire.messages import MemoryOffer
from reelwire.wire import Limits

if TYPE_CHECKING:
    from .actors import Actor
    from .groups import Group
    from .leases import Piece
    from .session import Session

Kind = Literal["client", "worker"]
KINDS: tuple[Kind, ...] = ("client", "worker")


@dataclass(slots=True, eq=False)
class Peer:
    """One attached client or worker.

    Attributes:
        route: the socket's name of its connection.
        attachment: its number; never given twice.
        kind: client or worker.
        name: a worker's own, which nobody else has; a client's own, which others may have too, or one that is made for it.
        heard_at: when its last message arrived, in seconds.
        busy_until: until when it said that it may be silent.
        gone: it was dropped; nothing is sent to it.
        mute: why nothing can be sent to it any more; what it has said by then is still read. Else empty.
        draining: a worker that takes no new sessions.
        forwards: a worker that gives what one of its stages makes to another one itself.
        limits: what it accepts of a message.
        device: a worker's device.
        packages: a worker's versions of what its results depend on.
        sessions: a client's sessions, or those that live at a worker.
        actors: a worker's stage actors, by pipeline and stage.
        keys: a client's session by the key that it asked for it with.
        memory: shared memory that a worker writes.
        lent: pieces of it that it wasn't told to be free again, by segment.
        maps: numbers of the workers whose shared memory it can open.
        group: the worker group that it is a rank of.
        rank: which of its ranks.
        dismissed: it was told to leave, and is dropped without another word.
    """

    route: bytes
    attachment: int
    kind: Kind
    name: str
    heard_at: float
    busy_until: float = 0.0
    gone: bool = False
    mute: str = ""
    draining: bool = False
    forwards: bool = False
    limits: Limits = field(default_factory=Limits)
    device: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    actors: dict[tuple[str, str], Actor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    memory: MemoryOffer | None = None
    lent: dict[str, Piece] = field(default_factory=dict)
    maps: set[int] = field(default_factory=set)
    group: Group | None = None
    rank: int = 0
    dismissed: bool = False


class Peers:
    """All attached peers, by route, number, and for workers name and shared memory.

    Args:
        incarnation: of the broker.
    """

    def __init__(self, incarnation: int) -> None:
        """Start with none."""
        self._incarnation = incarnation
        self.by_route: dict[bytes, Peer] = {}
        self.by_attachment: dict[int, Peer] = {}
        self.workers: dict[str, Peer] = {}
        self.owners: dict[str, Peer] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self.by_route)

    def attach(self, route: bytes, kind: Kind, name: str, now: float) -> Peer:
        """Give a connection its number, and a name if it has none: one that no other broker with this one's state has given.

        Nobody else may be attached under its route, nor under a worker's name.
        """
        assert route not in self.by_route, "attached over somebody else"
        self._last += 1
        peer = Peer(route, self._last, kind, name or f"{kind}-{self._incarnation}.{self._last}", now)
        self.by_route[route] = self.by_attachment[peer.attachment] = peer
        if kind == "worker":
            assert name not in self.workers, "a worker's name twice"
            self.workers[name] = peer
        return peer

    def lend(self, worker: Peer, memory: MemoryOffer) -> None:
        """A worker writes shared memory, which nobody else writes."""
        assert memory.owner not in self.owners, "one memory of two workers"
        worker.memory = memory
        self.owners[memory.owner] = worker

    def detach(self, peer: Peer) -> None:
        """Forget a peer; its number stays used."""
        peer.gone = True
        del self.by_route[peer.route]
        del self.by_attachment[peer.attachment]
        if peer.kind == "worker":
            del self.workers[peer.name]
        if peer.memory is not None:
            del self.owners[peer.memory.owner]
            for reader in self.by_route.values():
                reader.maps.discard(peer.attachment)

    def check(self) -> None:
        """Assert that the tables agree."""
        assert len(self.by_route) == len(self.by_attachment), "a peer is in one table only"
        for route, peer in self.by_route.items():
            assert peer.route == route, "a route leads to somebody else"
            assert self.by_attachment.get(peer.attachment) is peer, "a number leads to somebody else"
            assert not peer.gone, "a dropped peer is listed"
            assert peer.attachment <= self._last, "a number that wasn't given"
        workers = {peer.name for peer in self.by_route.values() if peer.kind == "worker"}
        assert workers == set(self.workers), "workers by name don't agree"
        lenders = {peer.memory.owner: peer for peer in self.workers.values() if peer.memory is not None}
        assert lenders == self.owners, "shared memory and workers don't agree"
        numbers = {peer.attachment for peer in lenders.values()}
        assert all(peer.maps <= numbers for peer in self.by_route.values()), "memory of nobody is mapped"


class Told:
    """Routes of strangers that were told once that nobody knows them; the oldest are forgotten first.

    Args:
        capacity: routes that are remembered.
    """

    def __init__(self, capacity: int) -> None:
        """Start with none."""
        self._capacity = capacity
        self._routes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, route: bytes) -> bool:
        """Whether the route wasn't told yet."""
        if route in self._routes:
            return False
        self._routes[route] = None
        if len(self._routes) > self._capacity:
            self._routes.popitem(last=False)
        return True

    def discard(self, route: bytes) -> None:
        """Forget a route: it said hello."""
        self._routes.pop(route, None)
