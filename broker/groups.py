"""Worker groups as the broker sees them: who belongs to one, how it is formed, what its ranks are sent, and its end.

A worker that leads nobody but does jobs is a group of one. The state of a group::

    gathering --all ranks attached--> opening --GroupOpened--> forming --GroupFormed--> formed
        |  (all of them already in one epoch: formed)                                      |
        `------------- a rank lost, RanksLost, or too slow: over (in every state) <--------'
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from reelwire.job_spec import JobSpec
from reelwire.messages import InitializeStage, RunJob, RunTask
from reelwire.wire import Limits, Packed, pack

from .desk import Desk
from .peers import Peer

GroupState = Literal["gathering", "opening", "forming", "formed", "over"]
Body = InitializeStage | RunTask | RunJob
B = TypeVar("B", InitializeStage, RunTask, RunJob)


@dataclass(slots=True, eq=False)
class Group:
    """One group.

    Attributes:
        name: its name.
        world: how many ranks it has.
        state: see the module.
        epoch: its newest forming; over all groups no number comes twice.
        ranks: those that are attached.
        jobs: kinds of jobs that it does.
        job: the id of the job that it has; empty: none.
        sequence: number of the newest body.
    """

    name: str
    world: int
    state: GroupState = "gathering"
    epoch: int = 0
    ranks: dict[int, Peer] = field(default_factory=dict)
    jobs: tuple[JobSpec, ...] = ()
    job: str = ""
    sequence: int = 0

    @property
    def leader(self) -> Peer:
        """Rank 0, which speaks for all."""
        return self.ranks[0]

    @property
    def takes_jobs(self) -> bool:
        """Whether a job may be sent to it now."""
        if self.state != "formed" or self.job or not self.jobs:
            return False
        return not any(peer.draining or peer.mute for peer in self.ranks.values())

    def number(self, body: B) -> B:
        """The body with the next number."""
        self.sequence += 1
        return replace(body, sequence=self.sequence)

    def limits(self) -> Limits:
        """What all ranks accept."""
        return min((peer.limits for peer in self.ranks.values()), key=lambda limits: limits.message_bytes_max)

    def send(self, desk: Desk, body: Body, packed: Packed | None = None) -> None:
        """Tell every rank."""
        packed = packed or pack(body)
        for peer in self.ranks.values():
            desk.send(peer, body, packed)
