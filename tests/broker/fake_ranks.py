"""The ranks of a worker group on the fake wire: they meet when they are told to, and keep what all of them are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reelwire import messages as m

from .fake_groups import KIND
from .fake_peers import Worker

if TYPE_CHECKING:
    from .conftest import Rig


class Rank(Worker):
    """One rank. Rank 0 answers for all; the others only keep bodies, and read their inputs until the leader is through.

    A rank that hears that its epoch is over leaves at once: nothing of it is heard any more.
    """

    def __init__(self, team: Team, rank: int, route: bytes, *, maps: bool = True) -> None:
        super().__init__(team.rig, route, route.decode(), maps=maps)
        self.team = team
        self.rank = rank
        self.pid = 100 + rank
        self.epoch = 0
        self.number = 0
        self.has_left = False
        if rank == 0:
            self.bound = team.bound  # what its former processes bound holds as well

    @property
    def bodies(self) -> list[Any]:
        """What all ranks are told, in order."""
        return [word for word in self.inbox if getattr(word, "sequence", 0)]

    def lost_last(self) -> list[Any]:
        """What a connection that breaks may lose: the last body, unless the leader is through with it, as all had it then."""
        return [
            body
            for body in self.bodies[-1:]
            if not isinstance(body, m.RunTask)
            or all(artifact.is_inline for artifact in body.inputs.values())
            or self.rig.memory.is_reading(self.reader(body))
        ]

    def attach(self, **more: Any) -> Rank:
        """Say hello, and all that the team says."""
        leads = self.rank == 0
        more = {"limits": self.team.limits[self.rank], **self.team.more, **more}
        last = max((body.sequence for body in self.bodies), default=0) if self.epoch else 0
        more["group"] = m.Membership(self.team.name, self.rank, self.team.size, self.epoch, last, "host", self.pid, "f")
        if not leads:
            more.pop("held", None)
            more.pop("memory", None)
        stages = more.pop("stages", ("encode", "denoise", "decode"))
        self.rig.peers[self.route] = self
        before = self.attachment if self.epoch and not leads else 0
        self.hello(stages=stages if leads else (), jobs=(KIND,) if leads else (), grouped=("denoise",), **more)
        if before:  # it is the same process, over another connection
            self.rig.memory.renamed(before, self.attachment)
        self.number = self.attachment
        return self

    def reader(self, task: m.RunTask) -> tuple[Any, ...]:
        """Who reads the inputs of a task: also when the connection is lost meanwhile."""
        return (self.number, task.session, task.stage, task.index)

    def hear(self, attachment: int, message: Any) -> None:
        """Meet the others; keep bodies."""
        if isinstance(message, m.EndGroup):
            assert message.epoch == self.epoch or not self.epoch, "told of an epoch that isn't its own"
            self.has_left, self.attachment = True, 0
            self.inbox.append(message)
            return
        if self.has_left and not isinstance(message, m.Welcome):
            return
        if self.rank and isinstance(message, m.RunTask | m.InitializeStage):
            super(Worker, self).hear(attachment, message)
            if isinstance(message, m.RunTask):
                self.rig.memory.read(self.reader(message), message.inputs)
            return
        super().hear(attachment, message)
        match message:
            case m.LeadGroup():
                self.epoch = message.epoch
                self.rig.later(lambda: self.say(m.GroupOpened(message.epoch, "ipc:///link", "host:1")))
                if self.team.size == 1:
                    self.rig.later(lambda: self.say(m.GroupFormed(message.epoch)))
            case m.JoinGroup():
                self.epoch = message.epoch
                self.team.joined(message.epoch)

    def finish(self, stage: str, **more: Any) -> m.RunTask:
        """The other ranks have read their inputs by the time that the leader says that a task is done."""
        self.team.has_read(self.jobs[stage][0])
        return super().finish(stage, **more)

    def released(self, x: m.ReleaseStage) -> None:
        """None of the ranks reads anything of a session any more when its release is answered."""
        for rank in self.team.ranks[1:]:
            self.rig.memory.has_read((rank.attachment, x.session, x.stage))
        super().released(x)

    def fail(self, stage: str, message: str = "it broke") -> m.RunTask:
        """The same when it raises."""
        self.team.has_read(self.jobs[stage][0])
        return super().fail(stage, message)


class Team:
    """All ranks of a group.

    Args:
        rig: the broker.
        name: of the group.
        size: how many ranks it has.
        more: what each says in its hello.
    """

    def __init__(self, rig: Rig, name: str = "g", size: int = 2, **more: Any) -> None:
        self.rig = rig
        self.name = name
        self.size = size
        self.maps = more.pop("maps", (True,) * size)
        self.limits: list[dict[str, int]] = [{}] * size
        self.more = more
        self.forms = True
        self.bound: dict[tuple[str, int], m.Applied] = {}
        self.ranks: list[Rank] = []

    @property
    def leader(self) -> Rank:
        """Rank 0."""
        return self.ranks[0]

    def start(self) -> Team:
        """New processes for all ranks attach."""
        self.ranks = []
        for rank in range(self.size):
            self.start_rank(rank)
        return self

    def start_rank(self, rank: int) -> Rank:
        """A new process for one rank attaches, in place of the one that was."""
        new = Rank(self, rank, f"{self.name}{rank}".encode(), maps=self.maps[rank])
        self.ranks[rank : rank + 1] = [new]
        return new.attach()

    def move_to(self, rig: Rig) -> None:
        """The broker is gone; the ranks say hello to another one."""
        self.rig = rig
        for rank in self.ranks:
            rank.rig = rig
            rank.attachment = 0
            rank.attach()

    def joined(self, epoch: int) -> None:
        """A rank knows where the leader is: when all do, they have met."""
        if self.forms and all(rank.epoch == epoch for rank in self.ranks):
            self.rig.later(lambda: self.leader.say(m.GroupFormed(epoch)))

    def has_read(self, task: m.RunTask) -> None:
        """The other ranks have copied the inputs of a task."""
        for rank in self.ranks[1:]:
            self.rig.memory.has_read(rank.reader(task))

    def sequences(self) -> list[list[tuple[str, int]]]:
        """For each rank what it was told as one of all, by kind and number."""
        return [[(type(body).__name__, body.sequence) for body in rank.bodies] for rank in self.ranks]
