"""Random orders of what happens to worker groups: ranks that come, die and come back, brokers that are killed, sessions.

A seed replays one; every event is followed by a check of all invariants.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from reelwire import messages as m
from reelwire.broker.events import Malformed, OutboxFull, Unreachable
from reelwire.broker.peers import Peer

from .fake_groups import Hall, hello
from .fake_ranks import Rank, Team
from .test_core_random import STAGES, Chaos, check_applied, check_memory

SIZES = {"one": 1, "two": 2, "four": 4}


@dataclass
class Process:
    """A rank's process: what it knows of its group, and what it has heard and not acted on yet."""

    group: str
    rank: int
    epoch: int = 0
    sequence: int = 0
    peer: Peer | None = None
    heard: int = 0
    formed: int = 0
    owes: list[Any] = field(default_factory=list)


class Town:
    """Ranks of three groups, and the brokers that they have one after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.incarnation = 1
        self.hall = Hall(1)
        self.slots = [(group, rank) for group, size in SIZES.items() for rank in range(size)]
        self.processes: dict[tuple[str, int], Process] = {}
        self.epochs: list[int] = []
        self.names = 0

    def come(self, slot: tuple[str, int]) -> None:
        """A rank says hello, over a new attachment if it had one; there is a new process if there was none."""
        process = self.processes.setdefault(slot, Process(*slot))
        group, rank = slot
        said = hello(f"{group}{rank}", rank, SIZES[group], group, epoch=process.epoch, sequence=process.sequence)
        assert self.hall.objection(said) is None
        process.peer, process.heard, process.owes = self.hall.attach(said), 0, []
        self.listen()

    def die(self, slot: tuple[str, int]) -> None:
        """A process is gone; the broker finds out now, later, or by what another rank says."""
        process = self.processes.pop(slot)
        peer = process.peer
        if peer is None or peer.gone:
            return
        match self.random.randrange(3):
            case 0:
                self.hall.drop(peer, left=self.random.random() < 0.5)
            case 1:
                others = [each for key, each in self.processes.items() if key[0] == slot[0] and each.peer is not None]
                if others:
                    other = self.random.choice(others)
                    assert other.peer is not None
                    if not other.peer.gone:
                        self.hall.say(other.peer, m.RanksLost(other.epoch, (slot[1],), "dead"))
        self.listen()

    def restart(self) -> None:
        """The broker is killed, and another one begins with nobody attached."""
        self.incarnation += 1
        for process in self.processes.values():
            process.peer = None
        self.hall = Hall(self.incarnation)

    def listen(self) -> None:
        """Take in what was said; who hears that its epoch is over leaves."""
        for slot, process in list(self.processes.items()):
            if process.peer is None:
                continue
            words = self.hall.heard(process.peer)
            new, process.heard = words[process.heard :], len(words)
            for word in new:
                match word:
                    case m.LeadGroup():
                        self.epochs.append(word.epoch)
                        assert process.epoch == 0
                        process.epoch, process.sequence = word.epoch, 0
                        process.owes = [m.GroupOpened(word.epoch, "l", "s"), m.GroupFormed(word.epoch)]
                    case m.JoinGroup():
                        assert process.epoch == 0
                        process.epoch, process.sequence = word.epoch, 0
                    case m.EndGroup():
                        assert process.epoch in (0, word.epoch)
                        del self.processes[slot]
                        break
                    case m.RunJob():
                        assert word.sequence > process.sequence
                        process.sequence = word.sequence

    def speak(self) -> None:
        """A leader says how far it is; formed it is when all others have the epoch."""
        leaders = [each for each in self.processes.values() if each.owes and each.peer is not None]
        if not leaders:
            return
        leader = self.random.choice(leaders)
        assert leader.peer is not None
        ranks = [self.processes.get((leader.group, rank)) for rank in range(SIZES[leader.group])]
        if len(leader.owes) == 1 and any(each is None or each.epoch != leader.epoch for each in ranks):
            return
        word = leader.owes.pop(0)
        if not leader.peer.gone:
            self.hall.say(leader.peer, word)
        self.listen()

    def work(self) -> None:
        """A group that has formed is sent a body."""
        formed = list(self.hall.groups.formed())
        if formed:
            group = self.random.choice(formed)
            group.send(self.hall.desk, group.number(m.RunJob("j", 1, "t2v", {}, {}, None, 0, 5, 0)))
            self.hall.put_right()
            self.listen()

    def check(self) -> None:
        """A group that has formed consists of those processes that know its epoch, each once, and all have its bodies."""
        placed: list[Peer] = []
        for group in self.hall.groups.by_name.values():
            placed += group.ranks.values()
            if group.state != "formed":
                continue
            for rank, peer in group.ranks.items():
                process = self.processes.get((group.name, rank))
                if process is not None and process.peer is peer:
                    assert process.epoch == group.epoch
                    assert process.sequence == group.sequence or group.epoch >> 32 < self.incarnation
        assert len(placed) == len({id(peer) for peer in placed}), "a rank of two groups"
        assert self.epochs == sorted(set(self.epochs)), "epochs don't rise"

    def step(self) -> None:
        """Something happens."""
        slot = self.random.choice(self.slots)
        process = self.processes.get(slot)
        match self.random.randrange(12):
            case 0 | 1 | 2 | 3 if process is None or process.peer is None or process.peer.gone:
                self.come(slot)
            case 4 if process is not None and self.random.random() < 0.3:
                self.come(slot)  # it lost the broker from sight, and says hello again
            case 4 if process is not None and process.peer is not None and not process.peer.gone:
                self.hall.drop(process.peer, "unreachable", returns=True)
                self.listen()
            case 5 if process is not None and self.random.random() < 0.4:
                self.die(slot)
            case 6 | 7 | 8:
                self.speak()
            case 9:
                self.work()
            case 10:
                self.hall.advance(self.random.choice((0.1, 3.0, 11.0, 61.0)))
                self.listen()
            case 11 if self.random.random() < 0.1:
                self.restart()
        self.check()

    def settle(self) -> None:
        """Everybody comes who isn't there, and leaders say what they have to say, until nothing is left to do."""
        for _ in range(20):
            for slot in self.random.sample(self.slots, len(self.slots)):
                process = self.processes.get(slot)
                if process is None or process.peer is None or process.peer.gone:
                    self.come(slot)
            for _ in range(20):
                self.speak()
            self.check()


@pytest.mark.seeds(60)
def test_groups_04_any_order_of_hellos_losses_and_restarts_ends_well(seed: int) -> None:
    """Whatever has happened: when all ranks are there again, every group forms, in one epoch, and stays as it is."""
    town = Town(seed)
    for _ in range(300):
        town.step()
    town.settle()
    before = {name: (group.state, group.epoch) for name, group in town.hall.groups.by_name.items()}
    assert {state for state, _ in before.values()} == {"formed"}
    assert set(before) == set(SIZES)
    town.settle()
    assert {name: (group.state, group.epoch) for name, group in town.hall.groups.by_name.items()} == before


class GroupChaos(Chaos):
    """A broker's random schedule in which some workers are groups, whose ranks come and go one by one."""

    def __init__(self, kit: Any, seed: int) -> None:
        super().__init__(kit, seed)
        self.teams: list[Team] = []

    def add_worker(self) -> None:
        """Mostly another group: the denoise stage is its ranks', the others its leader's, or of workers beside it."""
        if self.random.random() < 0.3:
            super().add_worker()
            return
        self.names += 1
        size = self.random.choice((1, 2, 3))
        parts: tuple[tuple[str, ...], ...] = (("denoise",), STAGES, STAGES)
        more = {
            "spec": self.spec,
            "stages": parts[0] if self.is_split else self.random.choice(parts),
            "slots": 2,
            "mailbox": self.mailbox,
            "memory": self.random.random() < 0.8,
            "forwards": self.random.random() < 0.6,
            "maps": tuple(self.random.random() < 0.9 for _ in range(size)),
        }
        team = Team(self.rig, f"t{self.names}", size, **more)
        team.forms = self.random.random() < 0.95
        self.teams.append(team.start())
        self.workers.append(team.leader)

    def lose(self) -> None:
        """Now and then a rank goes, or those that are gone come back."""
        if not self.teams or self.random.random() < 0.3:
            super().lose()
            return
        team = self.random.choice(self.teams)
        gone = [rank.rank for rank in team.ranks if not rank.attachment]
        if gone:
            for rank in gone[: self.random.randint(1, len(gone))]:
                team.start_rank(rank)
            team.forms = True
        elif self.random.random() < 0.08:
            self.lose_rank(self.random.choice(team.ranks))
        leaders = [team.leader for team in self.teams if team.leader.attachment]
        self.workers = [each for each in self.workers if not isinstance(each, Rank)] + leaders

    def lose_rank(self, rank: Rank) -> None:
        """It goes in one of the ways that there are."""
        rig = self.rig
        match self.random.randrange(9):
            case 7 | 8:  # it lives, and says hello again, with or without what it was told last
                if rank.rank and rank.epoch and rank.team.leader.attachment:
                    last = rank.lost_last() if self.random.random() < 0.5 else []
                    rank.inbox = [word for word in rank.inbox if word not in last]
                    if self.random.random() < 0.5:
                        rig.handle(Unreachable(rig.now, rank.route))
                        rig.turn()
                    rank.attach()
                return
            case 0:
                rank.say(m.Goodbye())
            case 1:
                rig.handle(Unreachable(rig.now, rank.route))
            case 2:
                rig.handle(OutboxFull(rig.now, rank.route))
            case 3:
                rig.handle(Malformed(rig.now, rank.route, "malformed", "garbage"))
            case 4:
                other = self.random.choice(rank.team.ranks)
                if other.attachment:
                    other.say(m.RanksLost(rank.epoch, (rank.rank,), "dead"))
                return
            case 5:
                rank.say(m.Draining())
                return
            case 6:
                words = (m.GroupOpened, m.GroupFormed)
                epoch = self.random.choice((0, 1, rank.epoch))
                rank.say(m.RanksLost(epoch, (99,), "a lie") if epoch != rank.epoch else words[0](epoch, "l", "s"))
                return
        rank.attachment = 0


def check_bodies(chaos: GroupChaos) -> None:
    """Each rank was told the same numbers as its leader while it was there, each once, rising by one from 1."""
    for team in chaos.teams:
        for rank in team.ranks:
            if rank.attachment:
                found = [body.sequence for body in rank.bodies]
                assert found == list(range(1, len(found) + 1))
                if team.leader.attachment and rank.epoch == team.leader.epoch:
                    assert rank.bodies == team.leader.bodies


@pytest.mark.seeds(40)
def test_groups_05_sessions_live_through_any_schedule_of_groups(kit: Any, seed: int) -> None:
    """Chunks come in order, each once; all ranks are told the same; every session ends; nothing is left in a table."""
    chaos = GroupChaos(kit, 5000 + seed)
    chaos.run(lies=False)
    assert not chaos.rig.core.sessions
    chaos.workers += [team.leader for team in chaos.teams if team.leader not in chaos.workers]
    check_memory(chaos)
    check_bodies(chaos)
    for name, (client, chunks, _) in chaos.sessions.items():
        got = [chunk.index for chunk in client.chunks(name)]
        assert got == list(range(len(got)))
        ended = [x for x in client.heard(m.SessionEnded) if x.session == name]
        assert len(ended) <= 1
        if ended and ended[0].state == "completed":
            assert len(got) == chunks
        check_applied(chaos, client.chunks(name))
    status = chaos.rig.core.status()
    for worker in status["workers"]:
        assert all(stage["sessions"] == stage["tasks"] == stage["cache_bytes"] == 0 for stage in worker["stages"])
