"""The ranks of groups as the broker's `Groups` sees them, with what the core does around it: who comes, who is dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reelwire import messages as m
from reelwire.broker.actions import Send
from reelwire.broker.config import BrokerConfig
from reelwire.broker.desk import Desk
from reelwire.broker.events import Received
from reelwire.broker.groups import Group, Groups
from reelwire.broker.peers import Peer, Peers
from reelwire.broker.placement import Placement
from reelwire.job_spec import JobSpec
from reelwire.spec import Parameter, check_registrable

from .fake_peers import VERSION, world

KIND = JobSpec("t2v", "a video of a text", (Parameter("prompt", "string", "what is to be seen"),))
STAGES = ("encode", "denoise", "decode")
EARLIER = 7 << 32 | 5
"""An epoch of an earlier broker: those of tests are number 8."""


def hello(name: str, rank: int = 0, size: int = 2, group: str | None = "g", **more: Any) -> m.WorkerHello:
    """What a rank says; rank 0 offers the world's stages, of which the ranks compute `denoise` together, and a kind of job."""
    leads = rank == 0
    offers = tuple(m.StageOffer("world", stage, 8, 1000, 1, stage == "denoise") for stage in STAGES) if leads else ()
    place = None
    if group is not None:
        told = {
            key: more.pop(key)
            for key in ("epoch", "sequence", "machine", "pid", "fingerprint", "started")
            if key in more
        }
        place = m.Membership(group, rank, size, **{"machine": "host", "pid": 100 + rank, "started": 7 + rank, **told})
    said = m.WorkerHello(
        version=VERSION,
        name=name,
        device="cpu",
        specs=(world(),),
        stages=offers,
        packages={"torch": "2.13"},
        group=place,
        jobs=(KIND,) if leads else (),
    )
    return replace(said, **more)


class Hall:
    """Groups with a desk and peers: each step is followed by what the core does then, and by a check of all invariants."""

    def __init__(self, incarnation: int = 8, **settings: Any) -> None:
        self.desk = Desk(BrokerConfig(rejoin_s=10.0, group_timeout_s=60.0, **settings))
        self.peers = Peers(1)
        self.groups = Groups(self.desk, incarnation)
        self.placement = Placement(check_registrable)
        self.over: list[tuple[Group, str]] = []
        self.formed: list[Group] = []
        self.parted: list[Group] = []
        self.told: dict[int, list[Any]] = {}
        self.dropped: dict[int, str] = {}
        self._entropy = 0
        self.desk.begin(1000.0)

    def attach(self, said: m.WorkerHello) -> Peer:
        """Take a worker in, in place of whoever has its name."""
        old = self.peers.workers.get(said.name)
        replaced = () if old is None else (old.attachment,)
        objection = self.groups.objection(said, replaced)
        assert objection is None, objection
        if old is not None:
            self.drop(old, "said hello again", returns=self.groups.is_back(said))
        self._entropy += 1
        peer = self.peers.attach(f"{said.name}/{self._entropy}".encode(), "worker", said.name, self.desk.now)
        peer.device, peer.packages = said.device, dict(said.packages)
        self.groups.add(peer, said, self._entropy.to_bytes(16, "big"))
        self.placement.add(peer, said)
        self.put_right()
        return peer

    def rank(self, rank: int = 0, size: int = 2, group: str | None = "g", **more: Any) -> Peer:
        """Take a rank in; it has the group's name and its number."""
        name = more.pop("name", f"{group}{rank}")
        return self.attach(hello(name, rank, size, group, **more))

    def objection(self, said: m.WorkerHello) -> tuple[str, str] | None:
        """Why a worker isn't taken."""
        old = self.peers.workers.get(said.name)
        return self.groups.objection(said, () if old is None else (old.attachment,))

    def drop(
        self, peer: Peer, reason: str = "not heard for 3.0 s", *, left: bool = False, returns: bool = False
    ) -> None:
        """Let go of a peer."""
        self._detach(peer, reason, left=left, returns=returns)
        self.put_right()

    def say(self, peer: Peer, message: Any) -> None:
        """A rank says something."""
        self.groups.hear(peer, Received(self.desk.now, peer.route, peer.attachment, message, 100, b""))
        self.put_right()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.desk.begin(self.desk.now + seconds)
        self.groups.due(self.desk.now)
        self.put_right()

    def form(self, size: int = 2, group: str = "g") -> Group:
        """A group that has formed."""
        ranks = [self.rank(rank, size, group) for rank in range(size)]
        made = self.groups.by_name[group]
        self.say(ranks[0], m.GroupOpened(made.epoch, "tcp://host:1", "host:2"))
        self.say(ranks[0], m.GroupFormed(made.epoch))
        assert made.state == "formed"
        return made

    def put_right(self) -> None:
        """What the core does after each step."""
        desk = self.desk
        while desk.lost:
            peer, reason = desk.lost.popitem()
            assert peer.dismissed, "a rank is given up, and wasn't told"
            if not peer.gone:
                self._detach(peer, reason, left=True)
        self.over += desk.over.items()
        self.formed += desk.formed
        self.parted += desk.parted
        desk.parted.clear()
        desk.over.clear()
        desk.formed.clear()
        for action in desk.finish():
            if isinstance(action, Send):
                self.told.setdefault(action.attachment, []).append(action.message)
        self.peers.check()
        self.groups.check()

    def heard(self, peer: Peer) -> list[Any]:
        """What a rank was told, oldest first."""
        return self.told.get(peer.attachment, [])

    def _detach(self, peer: Peer, reason: str, *, left: bool, returns: bool = False) -> None:
        self.dropped[peer.attachment] = reason
        self.peers.detach(peer)
        self.groups.lose(peer, reason, left=left, returns=returns)
        self.placement.remove(peer)


def in_state(hall: Hall, state: str) -> tuple[Any, Any, Any]:
    """A group of two or, while it gathers or waits, of three ranks, of which two are there; with its ranks 0 and 1."""
    if state in ("gathering", "rejoining"):
        epoch = EARLIER if state == "rejoining" else 0
        leader, other = (hall.rank(rank, 3, epoch=epoch) for rank in (0, 1))
    elif state == "waiting":
        leader, other, _ = (hall.rank(rank, 3) for rank in range(3))
    else:
        leader, other = hall.rank(0), hall.rank(1)
    group: Any = hall.groups.by_name["g"]
    if state in ("forming", "formed", "waiting"):
        hall.say(leader, m.GroupOpened(group.epoch, "ipc:///link", "host:2"))
    if state in ("formed", "waiting"):
        hall.say(leader, m.GroupFormed(group.epoch))
    if state == "waiting":
        hall.drop(group.ranks[2], "unreachable", returns=True)
    return group, leader, other
