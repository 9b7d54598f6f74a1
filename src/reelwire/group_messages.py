"""What the ranks of a worker group are told by the broker, and say to each other; see `messages` and `workers/leader.py`.

A group's *epoch* counts its formings, over all brokers; a rank that holds another one is fenced off. *Bodies* (what a task or
a job is about) come from the broker to every rank, numbered by the group's own *sequence*. What is done with them, and when,
is the leader's *decision*: a message over the link between the ranks, numbered too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .job_parts import Member
from .parts import Applied, Failure
from .tensors import ITEM_BYTES

BROADCAST_BYTES_MIN = 64 << 10
"""Smaller tensors of a body are sent to every rank: a broadcast would cost more, as a mapping would of shared memory."""
Act = Literal["form", "initialize", "run", "release", "start", "step", "end", "leave"]
"""What a decision can say; see `Decision`."""

# --- broker to rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeadGroup:
    """To rank 0, when all ranks are attached: begin an epoch, and say where the others find you.

    Attributes:
        epoch: the new epoch.
        secret: what the others will say on the link.
        members: all ranks.
    """

    epoch: int
    secret: bytes
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """To the other ranks: the leader can be found.

    Attributes:
        epoch: the epoch.
        secret: what to say on the link.
        members: all ranks.
        link: endpoint of the leader's link.
        store: ``HOST:PORT`` of the leader's TCPStore.
    """

    epoch: int
    secret: bytes
    members: tuple[Member, ...]
    link: str
    store: str


@dataclass(frozen=True, slots=True)
class EndGroup:
    """To every rank: the epoch is over.

    Attributes:
        epoch: which.
        lost: ranks that are dead, or to be killed by whoever can.
        reason: one sentence.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LeaderTensor:
    """A tensor of a body whose bytes the leader alone is sent: it broadcasts them when all ranks do the body.

    Attributes:
        artifact: which of the body's `artifacts` it belongs to.
        tensor: its name there.
        dtype: one of `tensors.ITEM_BYTES`.
        shape: its dimensions.
    """

    artifact: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


# --- rank to broker ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupOpened:
    """Of rank 0: where the others find it in this epoch; as in `JoinGroup`."""

    epoch: int
    link: str
    store: str


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """Of rank 0: all ranks have met and have their weights; tasks and jobs can come."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RanksLost:
    """Ranks are gone, or do nothing any more: the epoch can't go on."""

    epoch: int
    ranks: tuple[int, ...]
    reason: str


# --- between the ranks, over the link --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankHello:
    """First message of a rank on the link."""

    epoch: int
    secret: bytes
    rank: int


@dataclass(frozen=True, slots=True)
class Have:
    """A rank has the body of that number, and can read its inputs, but for those that the leader has and broadcasts.

    `lacks`: of a job's files it can't see any itself.
    """

    sequence: int
    lacks: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The leader's word on what all ranks do next. The next one comes when all have answered this one.

    Only a ``step`` may follow a ``start`` or a ``step`` before that; a rank does and answers both in order, and never has more.

    Attributes:
        number: from 1 within the epoch.
        act: ``form``: leave the process group, if there is one, and meet in a new one (`round` names it);
            ``initialize``, ``run``: what body `sequence` says; ``release``: drop a session at a stage; ``start``: begin
            the job of body `sequence`, up to its first yield; ``step``: go on with it to its next yield; ``end``: close
            it; ``leave``: leave the process group and end the process.
        sequence: number of the body.
        round: number of the process group within the epoch.
        applied: of a ``run``, the control that its reservation was bound to.
        session: of a ``release``.
        stage: of a ``release``.
        below: bodies with a lower number won't be asked for any more.
        share: of a ``start``: the leader broadcasts the job's files first, because some rank lacks them.
    """

    number: int
    act: Act
    sequence: int = 0
    round: int = 0
    applied: Applied | None = None
    session: str = ""
    stage: str = ""
    below: int = 0
    share: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rank has done what a decision said.

    Attributes:
        number: of the decision.
        failure: why it couldn't.
        broken: another rank is to blame for it: a collective failed, or that one refuses what was about to be begun.
        apart: of a failure: with it this rank has left the process group; False: none has, as nothing was begun.
    """

    number: int
    failure: Failure | None = None
    broken: bool = False
    apart: bool = True


@dataclass(frozen=True, slots=True)
class Farewell:
    """Of either side: this process leaves now, and why; `in_order`: because it was asked to, and nothing is wrong."""

    reason: str
    in_order: bool = False


ToRank = Decision | Farewell
ToLeader = RankHello | Have | Outcome | Farewell
