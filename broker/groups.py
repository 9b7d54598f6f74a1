"""Worker groups as the broker sees them: who belongs to one, how it is formed, what its ranks are sent, and its end.

A worker that leads nobody but does jobs is a group of one. The state of a group::

    gathering --all ranks attached--> opening --GroupOpened--> forming --GroupFormed--> formed
        |  (all of them already in one epoch: formed)                                      |     (and waiting)
        `------------- a rank lost, RanksLost, or too slow: over (in every state) <--------'

A rank of a formed group may lose its connection and live: it says hello again, as the same process in the same epoch, and
takes its place back. Meanwhile the group is *waiting*: it goes on with what it has and is given no job and no session. Who
was silent, left, or is said to be lost isn't waited for, and nobody for longer than the silence that a peer is dropped for.

While a group gathers, all of its ranks say the same epoch: 0 when they are new, else the one that an earlier broker gave
them. Whoever says another one is told that its epoch is over, and leaves. A group that gathers outlives the loss of a rank,
because its ranks haven't met; any other is over with it. All ranks of a group that is over are told so and dropped at once,
so that whoever comes under its name finds none.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Literal

from reelwire.job_spec import JobSpec
from reelwire.messages import (
    EndGroup,
    GroupFormed,
    GroupOpened,
    JoinGroup,
    LeadGroup,
    Membership,
    RanksLost,
    WorkerHello,
)
from reelwire.spec import Plain
from reelwire.wire import pack

from .desk import Desk, shortened
from .events import Received
from .group import Group as Group
from .group_admission import (
    is_same_process,
    kinds_objection,
    member_objection,
    membership_of,
    place_objection,
    taken_objection,
)
from .peers import Peer
from .timers import Timers

INCARNATION_SHIFT = 32
"""An epoch is the broker's incarnation, and below that a counter."""
SECRET_BYTES = 32
ENDED_EPOCHS_MAX = 1024
"""Adopted epochs that are over and are remembered, so that nobody brings them up again."""
ADDRESS_CHARACTERS_MAX = 256


class Groups:
    """All groups that aren't over.

    Args:
        desk: where actions go, and what follows from a group's beginning and end.
        incarnation: how many brokers there were with this one's state, this one included: its epochs are higher than
            theirs.

    Attributes:
        by_name: in the order in which they came.
    """

    def __init__(self, desk: Desk, incarnation: int) -> None:
        """Start with none."""
        self.by_name: dict[str, Group] = {}
        self._desk = desk
        self._incarnation = incarnation
        self._raised = 0
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._deadlines: Timers[str] = Timers()

    # --- who comes ----------------------------------------------------------------------------------------------------

    def objection(self, hello: WorkerHello, replaced: Container[int]) -> tuple[str, str] | None:
        """Why a worker isn't taken: a code of `Rejected` and a sentence; None when it is.

        Peers with the numbers `replaced` leave when it is taken, and with them the groups that they have formed.
        """
        place = membership_of(hello)
        if place is None:
            return None
        objection = place_objection(hello, place) or self._taken(place, replaced)
        if objection is not None:
            return objection
        left = {name: ranks for name in self.by_name if (ranks := self._left(name, place, replaced)) is not None}
        group = self.by_name[place.group] if place.group in left else None
        fate = self._fate(group, place)
        if fate == "leaves":
            return None
        if group is not None and fate in ("joins", "returns"):
            said = {rank: group.hellos[rank] for rank in left[group.name]}
            objection = member_objection(hello, place, group.world, said)
            if objection is not None:
                return objection
        others = [(self.by_name[name], ranks) for name, ranks in left.items() if name != place.group]
        leads = [group for group, ranks in others if 0 in ranks or 0 in group.awaited]
        return kinds_objection(hello.jobs, {spec.name: spec for group in leads for spec in group.jobs})

    def going_with(self, hello: WorkerHello, replaced: Collection[int]) -> frozenset[int]:
        """The numbers of all who go when a worker is taken in the place of peers with these numbers.

        With a rank the others of a group that has begun, unless it is that rank itself which comes back.
        """
        place = membership_of(hello)
        gone = [group for name, group in self.by_name.items() if self._left(name, place, replaced) is None]
        return frozenset(replaced).union(*({peer.attachment for peer in group.ranks.values()} for group in gone))

    def is_back(self, hello: WorkerHello) -> bool:
        """Whether a worker is the very process that is, or was a moment ago, a rank of a formed group."""
        place = membership_of(hello)
        group = None if place is None else self.by_name.get(place.group)
        return place is not None and group is not None and group.is_member(place)

    def _taken(self, place: Membership, replaced: Container[int]) -> tuple[str, str] | None:
        """Why a rank can't be a newcomer's: another process has it, which is here and is heard.

        That one may be as dead as whoever is started in its place takes it for. Then it is dropped soon, and the newcomer,
        who tries again, gets in; but nobody ends a group that works by saying that he is a rank of it.
        """
        group = self.by_name.get(place.group)
        holder = None if group is None else group.ranks.get(place.rank)
        if group is None or holder is None:
            return None
        held, fate, is_replaced = group.places[place.rank], self._fate(group, place), holder.attachment in replaced
        if is_replaced and (holder.mute or is_same_process(held, place)):
            return None
        if (fate == "leaves" and not is_replaced) or (fate == "renews" and place.epoch):
            return None  # it is told to leave, or the other one is
        return taken_objection(place, held, holder.name)

    def _left(self, name: str, place: Membership | None, replaced: Container[int]) -> Mapping[int, Peer] | None:
        """The ranks that stay in a group when a worker is taken in the place of others; None when that ends the group."""
        group = self.by_name[name]
        left = {rank: peer for rank, peer in group.ranks.items() if peer.attachment not in replaced}
        own = place if place is not None and place.group == name else None
        if own is not None and group.is_member(own):
            return left
        if group.state == "gathering":
            return left or None
        if own is not None and not own.epoch and own.rank in group.awaited:
            return None
        return left if len(left) == len(group.ranks) else None

    def add(self, peer: Peer, hello: WorkerHello, entropy: bytes) -> None:
        """Take a worker into the group that it belongs to, if it does; `objection` had none.

        Args:
            peer: the worker; it was told that it is attached.
            hello: what it said.
            entropy: 16 random bytes or more.
        """
        place = membership_of(hello)
        if place is None:
            return
        group = self.by_name.get(place.group)
        fate = self._fate(group, place)
        peer.rank = place.rank
        if fate == "leaves":
            others = tuple(rank for rank in range(place.world) if rank != place.rank)
            self._dismiss(peer, EndGroup(place.epoch, others, "the group has no such epoch any more"))
            return
        if group is not None and fate == "returns":
            self._take_back(group, peer, place, hello)
            return
        if group is not None and group.state == "waiting":  # whom it waits for is another process now
            self._end(group, (place.rank,), f"rank {place.rank} ({peer.name}) has begun anew")
            group = None
        if group is None:
            group = self.by_name[place.group] = Group(place.group, place.world)
        elif fate == "renews":
            self._disband(group, "another rank is in a later epoch" if place.epoch else "another rank has begun anew")
        if not group.ranks:
            group.world, group.epoch = place.world, place.epoch
            if place.epoch:
                self._deadlines.set(group.name, self._desk.now + self._desk.config.rejoin_s)
        peer.group = group
        group.take(peer, place, hello)
        self._desk.log("info", "rank_attached", group=group.name, rank=place.rank, peer=peer.name, epoch=place.epoch)
        self._go_on(group, entropy)

    def _fate(self, group: Group | None, place: Membership) -> Literal["joins", "returns", "renews", "leaves"]:
        """What becomes of a newcomer: it joins the group, or takes its place back, or others leave for it, or it leaves.

        0 is the newest epoch: where one rank has begun anew, no epoch of the others can go on. So whoever leaves comes back
        with 0.
        """
        epoch = place.epoch
        if group is not None and group.is_member(place):
            return "returns"
        if epoch and self._is_void(place):
            return "leaves"
        if group is None:
            return "joins"
        if group.state != "gathering":
            return "leaves" if epoch else "joins"  # its rank is taken, and it is told so
        if epoch == group.epoch:
            return "joins"
        return "leaves" if group.epoch == 0 or 0 < epoch < group.epoch else "renews"

    def _take_back(self, group: Group, peer: Peer, place: Membership, hello: WorkerHello) -> None:
        """A rank is here again: it hears what it has missed, and when all are here the group goes on as it was."""
        peer.group = group
        if any(other.draining for other in group.ranks.values()):
            peer.draining = True
        group.take(peer, place, hello)
        self._desk.log("info", "rank_back", group=group.name, rank=place.rank, peer=peer.name, epoch=group.epoch)
        if place.rank == 0:
            group.sequence = max(group.sequence, place.sequence)
            group.forget_sent()
        elif not group.send_again(self._desk, peer, place.sequence):
            self._end(group, (), f"rank {place.rank} ({peer.name}) has lost more than can be said again")
            return
        if group.awaited:
            self._deadlines.set(group.name, min(group.awaited.values()))
        else:
            self._formed(group)

    def _is_void(self, place: Membership) -> bool:
        """Whether an epoch is nobody's, another group's, or has ended.

        One that this broker gave lives as long as its ranks stay attached. A group of one has met itself in any case.
        """
        incarnation, counter = divmod(place.epoch, 1 << INCARNATION_SHIFT)
        if any(group.epoch == place.epoch for name, group in self.by_name.items() if name != place.group):
            return True
        if place.world == 1:
            return incarnation == self._incarnation and counter > self._raised
        return incarnation == self._incarnation or place.epoch in self._ended

    # --- how a group is formed ----------------------------------------------------------------------------------------

    def _go_on(self, group: Group, entropy: bytes) -> None:
        """Begin when all ranks are there; what they have formed already goes on."""
        if group.missing:
            return
        if group.epoch:
            group.sequence = max(place.sequence for place in group.places.values())
            self._formed(group)
            if any(peer.draining for peer in group.ranks.values()):
                for peer in group.ranks.values():
                    peer.draining = True
            return
        if any(peer.draining for peer in group.ranks.values()):
            return  # it will be replaced: nobody loads weights for it
        self._raised += 1
        group.epoch = self._incarnation << INCARNATION_SHIFT | self._raised
        name = group.name.encode()
        group.secret = hashlib.blake2b(entropy + name, digest_size=SECRET_BYTES, person=b"group").digest()
        group.state = "opening"
        self._wait(group)
        self._desk.log("info", "group_opening", group=group.name, epoch=group.epoch, ranks=group.world)
        self._desk.send(group.leader, LeadGroup(group.epoch, group.secret, group.members))

    def hear(self, peer: Peer, event: Received) -> None:
        """A rank says how far its group is: GroupOpened, GroupFormed or RanksLost."""
        message, group = event.message, peer.group
        assert isinstance(message, GroupOpened | GroupFormed | RanksLost)
        if group is None or group.state == "over" or (peer.rank and not isinstance(message, RanksLost)):
            self._desk.count("out_of_protocol", peer=peer.name, message=type(message).__name__)
            return
        if message.epoch != group.epoch or not group.epoch:
            self._desk.count("stale_epochs", peer=peer.name, message=type(message).__name__)
            return
        match message, group.state:
            case RanksLost(), _:
                self._ranks_lost(group, message)
            case GroupOpened(), "opening":
                self._opened(group, message)
            case (GroupFormed(), "forming"):
                self._formed(group)
            case (GroupFormed(), "opening") if group.world == 1:  # there is nobody to be found by
                self._formed(group)
            case _:
                self._desk.count("out_of_protocol", peer=peer.name, message=type(message).__name__)

    def _opened(self, group: Group, message: GroupOpened) -> None:
        if max(len(message.link), len(message.store)) > ADDRESS_CHARACTERS_MAX:
            self._end(group, (), f"its leader said an address of more than {ADDRESS_CHARACTERS_MAX} characters")
            return
        group.state = "forming"
        self._wait(group)
        join = JoinGroup(group.epoch, group.secret, group.members, message.link, message.store)
        packed = pack(join)
        for rank, peer in group.ranks.items():
            if rank:
                self._desk.send(peer, join, packed)

    def _formed(self, group: Group) -> None:
        desk, is_back = self._desk, group.state == "waiting"
        group.state, group.secret = "formed", b""
        self._deadlines.drop(group.name)
        desk.formed[group] = None
        desk.is_job_due = desk.freed = True
        desk.counters["groups_whole_again" if is_back else "groups_formed"] += 1
        event = "group_whole_again" if is_back else "group_formed"
        desk.log("info", event, group=group.name, epoch=group.epoch, ranks=group.world, sequence=group.sequence)

    def _wait(self, group: Group) -> None:
        self._deadlines.set(group.name, self._desk.now + self._desk.config.group_timeout_s)

    # --- how it ends --------------------------------------------------------------------------------------------------

    def lose(self, peer: Peer, reason: str, *, left: bool = False, returns: bool = False) -> None:
        """A rank was dropped, for whatever reason; `left`: it said goodbye; `returns`: its connection broke, or is new."""
        group = peer.group
        if group is None or group.state == "over" or group.ranks.get(peer.rank) is not peer:
            return
        if group.state == "gathering":
            group.release(peer.rank)
            if not group.ranks:
                self._forget(group)
            return
        if returns and group.state in ("formed", "waiting"):
            self._part(group, peer, reason)
            return
        is_orderly = left and peer.draining and not group.job
        self._end(group, (peer.rank,), f"rank {peer.rank} ({peer.name}) is gone: {reason}", is_orderly=is_orderly)

    def _part(self, group: Group, peer: Peer, reason: str) -> None:
        """Wait for a rank: no longer than it may be silent, as it may have died, but for two signs of life at least."""
        desk, config = self._desk, self._desk.config
        silence_s, grace_s = config.missed * config.heartbeat_s, (config.missed - 1) * config.heartbeat_s
        group.part(peer.rank, max(peer.heard_at + silence_s, desk.now + min(grace_s, config.rejoin_s)))
        self._deadlines.set(group.name, min(group.awaited.values()))
        desk.formed.pop(group, None)
        if not peer.rank:
            desk.parted[group] = peer
        desk.log("warning", "rank_away", group=group.name, rank=peer.rank, peer=peer.name, reason=reason)

    def _ranks_lost(self, group: Group, message: RanksLost) -> None:
        lost = tuple(sorted({rank for rank in message.ranks if 0 <= rank < group.world}))
        if group.state == "gathering":
            self._disband(group, shortened(message.reason), lost)
            self._forget(group)
        else:
            self._end(group, lost, f"ranks {', '.join(map(str, lost)) or 'unknown'} are lost: {message.reason}")

    def _end(self, group: Group, lost: tuple[int, ...], reason: str, *, is_orderly: bool = False) -> None:
        """The epoch is over, for all ranks: they are told, and dropped."""
        desk, reason = self._desk, shortened(reason)
        desk.formed.pop(group, None)
        desk.over[group] = reason
        group.awaited.clear()
        desk.counters["groups_left" if is_orderly else "groups_lost"] += 1
        level: Literal["info", "warning"] = "info" if is_orderly else "warning"
        desk.log(level, "group_over", group=group.name, epoch=group.epoch, lost=list(lost), reason=reason)
        if group.world > 1 and group.epoch >> INCARNATION_SHIFT != self._incarnation:
            self._ended[group.epoch] = None
            if len(self._ended) > ENDED_EPOCHS_MAX:
                self._ended.popitem(last=False)
        group.state = "over"
        self._forget(group)
        word = EndGroup(group.epoch, lost, reason)
        for peer in group.ranks.values():
            self._dismiss(peer, word)

    def _disband(self, group: Group, reason: str, lost: tuple[int, ...] = ()) -> None:
        """Those that gather can't go on with the epoch that they say: they leave, and come back as new."""
        word = EndGroup(group.epoch, tuple(sorted({*group.missing, *lost})), reason)
        self._desk.log("warning", "group_disbanded", group=group.name, epoch=group.epoch, reason=reason)
        self._deadlines.drop(group.name)
        for rank, peer in list(group.ranks.items()):
            group.release(rank)
            self._dismiss(peer, word)

    def _dismiss(self, peer: Peer, word: EndGroup) -> None:
        """Tell a rank that it is to leave; nothing else it says is heard, and nothing else is said to it."""
        if not peer.gone:
            self._desk.send(peer, word)
            peer.dismissed = True
            self._desk.give_up(peer, word.reason)

    def _forget(self, group: Group) -> None:
        del self.by_name[group.name]
        self._deadlines.drop(group.name)

    # --- time ---------------------------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float | None:
        """When `due` has something to do, in seconds; None when there is no such time."""
        return self._deadlines.next_at

    def due(self, now: float) -> None:
        """Give up what takes too long."""
        while (name := self._deadlines.pop_due(now)) is not None:
            group, config = self.by_name[name], self._desk.config
            busy_until = max((peer.busy_until for peer in group.ranks.values()), default=0.0)
            if group.state == "gathering":
                self._disband(group, f"not all ranks came back within {config.rejoin_s:g} s")
                self._forget(group)
            elif group.state == "waiting":
                lost = tuple(sorted(rank for rank, until in group.awaited.items() if until <= now))
                self._end(group, lost, f"ranks {', '.join(map(str, lost))} are gone: their connections broke")
            elif busy_until > now:  # it loads its weights: the time that it may take begins after that
                self._deadlines.set(name, busy_until + config.group_timeout_s)
            else:
                self._end(group, (), f"its ranks didn't meet within {config.group_timeout_s:g} s")

    # --- what others ask ----------------------------------------------------------------------------------------------

    def kinds(self) -> tuple[JobSpec, ...]:
        """The kinds of jobs that can be asked for now, in the order in which their groups came."""
        return tuple({spec.name: spec for group in self.by_name.values() for spec in group.jobs}.values())

    def formed(self) -> Iterable[Group]:
        """Those that have formed, in the order in which they came."""
        return [group for group in self.by_name.values() if group.state == "formed"]

    def drained(self, peer: Peer) -> tuple[Peer, ...]:
        """Who takes nothing new when this worker was asked to stop: all ranks of a group that has begun."""
        group = peer.group
        if group is None or group.state in ("gathering", "over"):
            return (peer,)
        return tuple(group.ranks.values())

    def status(self) -> list[dict[str, Plain]]:
        """All groups, as plain data."""
        return [
            {
                "name": group.name,
                "state": group.state,
                "epoch": group.epoch,
                "world": group.world,
                "job": group.job,
                "kinds": [spec.name for spec in group.jobs],
                "sequence": group.sequence,
                "draining": any(peer.draining for peer in group.ranks.values()),
                "ranks": [
                    {"rank": rank, "name": peer.name, "device": peer.device}
                    for rank, peer in sorted(group.ranks.items())
                ],
                "missing": list(group.missing),
            }
            for group in self.by_name.values()
        ]

    def check(self) -> None:
        """Assert the invariants; when an event is done, not amid it."""
        self._deadlines.check()
        epochs = [group.epoch for group in self.by_name.values() if group.state != "gathering"]
        assert len(set(epochs)) == len(epochs), "two groups in one epoch"
        assert len(self._ended) <= ENDED_EPOCHS_MAX, "too many epochs are remembered"
        due = {group.name for group in self.by_name.values() if _is_awaited(group)}
        assert set(self._deadlines.all()) == due, "a group that nobody waits for is due, or the other way round"
        for name, group in self.by_name.items():
            assert group.name == name, "a group under another name"
            assert group.state != "over", f"{name}: over, and listed"
            assert group.ranks or group.awaited, f"{name}: a group of nobody"
            assert {*group.ranks, *group.awaited} == set(group.places), f"{name}: ranks without a place"
            assert set(group.places) == set(group.hellos), f"{name}: ranks without a word"
            assert not set(group.ranks) & set(group.awaited), f"{name}: somebody who is here is waited for"
            assert (group.state == "waiting") == bool(group.awaited), f"{name}: {group.state}, and waits or not"
            assert set(group.ranks) <= set(range(group.world)), f"{name}: a rank beyond its world"
            for rank, peer in group.ranks.items():
                assert (peer.group, peer.rank) == (group, rank), f"{name}: rank {rank} belongs elsewhere"
                assert not peer.gone, f"{name}: rank {rank} is gone"
                assert not peer.dismissed, f"{name}: rank {rank} was told to leave"
                for actor in peer.actors.values():
                    assert actor.group is (group if actor.offer.grouped else None), f"{name}: another group's actor"
            assert (group.state == "gathering") <= (not group.job and not group.sequence), f"{name}: works already"
            assert group.state in ("gathering", "waiting") or not group.missing, f"{name}: begun without all ranks"
            if group.state == "gathering":
                assert {place.epoch for place in group.places.values()} == {group.epoch}, f"{name}: mixed epochs"


def _is_awaited(group: Group) -> bool:
    """Whether there is a time by which it must have gone on."""
    return group.state in ("opening", "forming", "waiting") or (group.state == "gathering" and group.epoch > 0)
